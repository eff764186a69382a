"""Tickets: what was ordered and not yet reported by every rank, and the plan that is being filled.

Invariant: a ticket is finished exactly once, when the last rank it waits for has answered (or when it was never
sent), and finishing it releases exactly the pins that ordering it took.
"""

from __future__ import annotations

from kvstore.errors import ContractError
from kvstore.messages import Batch, Fetch, Load, Outcome, Part, Plan, Report, Save, Write
from kvstore.planner.state import State
from kvstore.planner.tracks import FetchTicket, LoadTicket, SaveTicket, Track, WriteTicket

Ticket = SaveTicket | FetchTicket | WriteTicket | LoadTicket

_SEVERITY = (0, 0, 1, 4, 5, 3, 2, 2, 3)
"""By outcome: HIT, STORED, PENDING, MISS, DAMAGED, UNAVAILABLE, FULL, SKIPPED, TIMEOUT.

What one rank knows to be gone is gone, whatever kept another from looking.
"""


class Orders:
    """Part of one planner."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tickets: dict[int, Ticket] = {}
        self._next = 1
        self._acks = [-1] * state.spec.ranks
        self._saves: list[Save] = []
        self._writes: list[Write] = []
        self._fetches: list[Fetch] = []
        self._loads: list[Load] = []
        self._saved_slots: set[int] = set()
        self.failed: list[tuple[str, int]] = []
        """(request id, first chunk that was not delivered) of loads that ended since the planner looked."""

    @property
    def open(self) -> int:
        """Number of unfinished tickets."""
        return len(self._tickets)

    def ticket(self, number: int) -> Ticket | None:
        """The unfinished ticket of that number."""
        return self._tickets.get(number)

    def _add(self, ticket: Ticket) -> int:
        number, self._next = self._next, self._next + 1
        self._tickets[number] = ticket
        return number

    def saves_into(self, slot: int) -> bool:
        """Whether the plan that is being filled has a save into the slot."""
        return slot in self._saved_slots

    def pins(self) -> list[int]:
        """Pins that the unfinished tickets hold, by slot. O(everything); for `Planner.check`."""
        counts = [0] * self._state.slots.count
        for ticket in self._tickets.values():
            for slot in [p[0] for p in ticket.parts] if isinstance(ticket, LoadTicket) else [ticket.slot]:
                counts[slot] += 1
        return counts

    # -- ordering ---------------------------------------------------------------------------------------------------

    def save(self, track: Track, address: bytes, index: int, slot: int, blocks: tuple[int, ...]) -> None:
        """Blocks into a slot that was just taken."""
        state = self._state
        ticket = SaveTicket(address, slot, state.generation, state.spec.all_ranks, Outcome.STORED)
        state.catalog.set_slot(address, slot)
        state.slots.touch(slot, track.turn, index)
        self._saved_slots.add(slot)
        self._saves.append((self._add(ticket), slot, address, 0, blocks))

    def fetch(self, track: Track, address: bytes, index: int, slot: int, tier: int) -> int:
        """A record into a slot that was just taken; the ticket."""
        state = self._state
        ticket = FetchTicket(address, slot, state.generation, tier, state.spec.all_ranks, Outcome.HIT)
        number = self._add(ticket)
        state.catalog.set_slot(address, slot)
        state.slots.touch(slot, track.turn, index)
        state.fetching[address] = number
        self._fetches.append((number, slot, address, 0, tier))
        return number

    def write(self, track: Track, address: bytes, index: int, slot: int, tier: int) -> None:
        """A slot to a persistent tier; pins the slot."""
        state = self._state
        ticket = WriteTicket(address, slot, state.generation, tier, state.spec.writers, Outcome.STORED)
        number = self._add(ticket)
        state.writing[address, tier] = number
        state.slots.pin(slot, write=True)
        self._writes.append((number, slot, address, 0, tier, track.turn, index))

    def load(
        self, track: Track, first: int, parts: list[Part], tokens: list[int], tiers: list[int], lost: tuple[int, ...],
        lost_tokens: int,
    ) -> None:  # fmt: skip
        """Pinned slots into the blocks of a request."""
        ticket = LoadTicket(
            track.request_id, first, tuple(parts), lost, tuple(tokens), tuple(tiers), lost_tokens,
            self._state.spec.all_ranks, len(parts), Outcome.HIT,
        )  # fmt: skip
        self._loads.append((self._add(ticket), track.request_id, 0, ticket.parts, lost))

    # -- plans ------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What was ordered since the last plan."""
        state = self._state
        for column in (self._writes, self._fetches):
            for operation in column:
                ticket = self._tickets[operation[0]]
                if isinstance(ticket, (FetchTicket, WriteTicket)):
                    ticket.epoch = state.epochs[ticket.tier]
        plan = Plan(
            state.plans, state.generation, tuple(state.epochs), tuple(self._saves), tuple(self._writes),
            tuple(self._fetches), tuple(self._loads), tuple(self._acks),
        )  # fmt: skip
        state.plans += 1
        self._saves, self._writes, self._fetches, self._loads = [], [], [], []
        self._saved_slots.clear()
        return plan

    def abandon(self) -> None:
        """Takes back what was ordered and not sent; loads stay, as failures."""
        self._loads = [self._surrender(load) for load in self._loads]
        unsent = [op[0] for column in (self._saves, self._writes, self._fetches) for op in column]
        self._saves, self._writes, self._fetches = [], [], []
        self._saved_slots.clear()
        for number in unsent:
            self._finish(number, Outcome.SKIPPED)

    def forget_sent(self, tier: int) -> None:
        """The tier has another epoch: what was sent ends without effect; what was not is done in the new one."""
        state = self._state
        for number, ticket in self._tickets.items():
            if not isinstance(ticket, (FetchTicket, WriteTicket)) or ticket.tier != tier or not ticket.epoch:
                continue
            if isinstance(ticket, FetchTicket):
                if state.fetching.get(ticket.address) == number:
                    del state.fetching[ticket.address]
            elif state.writing.get((ticket.address, tier)) == number:
                del state.writing[ticket.address, tier]

    def _surrender(self, load: Load) -> Load:
        number, request_id, group, parts, lost = load
        ticket = self._tickets[number]
        if not isinstance(ticket, LoadTicket):
            raise ContractError("a load has a ticket of another kind")
        for part in parts:
            self._state.release(part[0])
        ticket.lost = tuple(block for part in parts for block in part[4]) + lost
        ticket.lost_tokens += sum(ticket.tokens)
        ticket.parts, ticket.tokens, ticket.tiers, ticket.delivered = (), (), (), 0
        return number, request_id, group, (), ticket.lost

    # -- reports ----------------------------------------------------------------------------------------------------

    def absorb(self, report: Report) -> None:
        """Takes every batch that was not taken before."""
        for batch in report.batches:
            if batch.sequence > self._acks[report.rank]:
                # Acknowledged only afterwards: after an exception it comes again, and what was taken is ignored.
                self._take_batch(batch, 1 << report.rank)
                self._acks[report.rank] = batch.sequence

    def _take_batch(self, batch: Batch, rank: int) -> None:
        state = self._state
        for tier, namespace, _reason in batch.tiers:
            state.set_open(tier, rank.bit_length() - 1, namespace)
        for number, outcome in batch.done:
            ticket = self._tickets.get(number)
            if ticket is None or isinstance(ticket, LoadTicket) or not ticket.waiting & rank:
                continue
            ticket.waiting &= ~rank
            ticket.outcome = max(ticket.outcome, outcome, key=_SEVERITY.__getitem__)
            if not ticket.waiting:
                self._finish(number, Outcome(ticket.outcome))
        for number, delivered, outcome in batch.loaded:
            load = self._tickets.get(number)
            if not isinstance(load, LoadTicket) or not load.waiting & rank:
                continue
            load.waiting &= ~rank
            if delivered < load.delivered:
                load.delivered, load.outcome = delivered, outcome
            if not load.waiting:
                self._finish_load(number, load)
        for tier, epoch, addresses in batch.evicted:
            if epoch == state.epochs[tier]:
                for address in addresses:
                    state.catalog.drop_hint(address, tier)

    def _finish(self, number: int, outcome: Outcome) -> None:
        state, ticket = self._state, self._tickets.pop(number)
        if isinstance(ticket, LoadTicket):
            raise ContractError("a load has a ticket of another kind")
        if isinstance(ticket, WriteTicket):
            if state.writing.get((ticket.address, ticket.tier)) == number:
                del state.writing[ticket.address, ticket.tier]
            if outcome == Outcome.STORED and self._is_current(ticket):
                state.catalog.add_hint(ticket.address, ticket.tier)
            state.accounts.written(ticket.tier, outcome)
            state.release(ticket.slot, write=True)
            return
        if isinstance(ticket, FetchTicket):
            if state.fetching.get(ticket.address) == number:
                del state.fetching[ticket.address]
            is_current = self._is_current(ticket)
            if outcome in (Outcome.MISS, Outcome.DAMAGED) and is_current:
                state.catalog.drop_hint(ticket.address, ticket.tier)
            state.accounts.fetched(ticket.tier, outcome)
            self._finish_fill(ticket, outcome == Outcome.HIT and is_current)
        else:
            state.accounts.saved(outcome)
            self._finish_fill(ticket, outcome == Outcome.STORED)

    def _is_current(self, ticket: FetchTicket | WriteTicket) -> bool:
        """Whether what it did is in the epoch that is used now."""
        state = self._state
        return ticket.generation == state.generation and ticket.epoch == state.epochs[ticket.tier] != ""

    def _finish_fill(self, ticket: SaveTicket | FetchTicket, is_good: bool) -> None:
        state = self._state
        is_current = ticket.generation == state.generation and state.catalog.slot(ticket.address) == ticket.slot
        if is_good and is_current:
            state.slots.filled(ticket.slot, ticket.address)
        else:
            if is_current:
                state.catalog.clear_slot(ticket.address)
            state.slots.emptied(ticket.slot)
        state.catalog.generation += 1
        state.drain_dropped()

    def _finish_load(self, number: int, load: LoadTicket) -> None:
        del self._tickets[number]
        for part in load.parts:
            self._state.release(part[0])
        self._state.accounts.loaded(load)
        if load.delivered < len(load.parts) or load.lost:
            self.failed.append((load.request_id, load.first_chunk + load.delivered))
