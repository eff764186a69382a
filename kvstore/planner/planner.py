"""The planner: turns lookups, finished prefills and reports into plans.

It owns the slots and believes the catalog; it never touches bytes. Given the same calls it makes the same plans, so
a trace simulator can drive the object that production runs.

Invariants: every ticket is released exactly once; a slot is readable only when all ranks reported it filled, a
persistent chunk only when all writing ranks reported it stored; no plan uses a slot for two addresses; a positive
answer commits nothing until `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.errors import ContractError
from kvstore.messages import Part, Plan, Report
from kvstore.metrics import Counters
from kvstore.planner.catalog import Catalog
from kvstore.planner.orders import Orders
from kvstore.planner.requests import Requests
from kvstore.planner.slot_table import SlotState
from kvstore.planner.state import PlannerSpec, State, TierSpec, first_tier
from kvstore.planner.tracks import FetchTicket, Match, Track
from kvstore.policies.base import EvictionPolicy

__all__ = ["Planner", "PlannerSpec", "TierSpec"]


class Planner(Requests):
    """See the module. Used from one thread; no call blocks. Times are seconds of any monotonic clock."""

    def __init__(self, spec: PlannerSpec, policy: EvictionPolicy, counters: Counters) -> None:
        super().__init__(State(spec, policy, counters))
        self.spec = spec
        self.orders = Orders(self.state)
        self.write_quarter = max(1, spec.slots // 4) if self.state.slot_tier >= 0 else spec.slots
        """Slots that lower writes may hold on an executor at a time."""
        # Twice what an executor allows itself: half may be done and unreported since the engine stopped stepping.
        self._write_limit = min(spec.slots, 2 * self.write_quarter)

    @property
    def catalog(self) -> Catalog:
        """What is where."""
        return self.state.catalog

    # -- lookup -----------------------------------------------------------------------------------------------------

    def match(
        self, track: Track, addresses: Sequence[bytes], local_tokens: int, limit_tokens: int, now: float
    ) -> Match:
        """How many tokens beyond ``local_tokens`` can be delivered.

        Args:
            track: the request.
            addresses: of the full chunks of its prompt, from the first.
            local_tokens: what the engine has, a multiple of the block.
            limit_tokens: the match ends here (prompt length - 1); rounded down to a block.
            now: seconds.

        Returns:
            A verdict that stays the same while nothing changes. ``tokens`` is None while the answer is not known,
            until the request's probe deadline at most. A positive one holds a lease on its slots until `commit`,
            `close` or the lease's end. Cost: one dict lookup a chunk; O(1) when asked again.
        """
        return self.lookup.match(track, addresses, local_tokens, limit_tokens, now)

    def answer(self, track: Track, first_absent: int) -> None:
        """A probe of this request ended: from chunk ``first_absent`` on nothing was found."""
        if track.absent_from is None or first_absent < track.absent_from:
            track.absent_from = first_absent
            track.verdict = None

    def learn(self, tier: int, addresses: Iterable[bytes]) -> None:
        """A listing or a probe found these in a persistent tier."""
        for address in addresses:
            if not self.catalog.add_hint(address, tier):
                break

    # -- load -------------------------------------------------------------------------------------------------------

    def commit(
        self, track: Track, addresses: Sequence[bytes], local_tokens: int, tokens: int, block_ids: Sequence[int]
    ) -> None:
        """Orders the load of ``tokens`` tokens after ``local_tokens`` into the blocks of the request.

        What can not be had any more is reported invalid from its first block on; nothing is raised. No tokens, no
        load.

        Args:
            block_ids: the request's block table from block 0.
        """
        chunk, block = self.spec.chunk_tokens, self.spec.block_tokens
        first, at, end = local_tokens // chunk, local_tokens, local_tokens + tokens
        if tokens <= 0:
            return
        self.state.touch_chain(track, addresses, min(-(-end // chunk), len(addresses)))
        held = self._hold(addresses[first : -(-end // chunk)])
        parts: list[Part] = []
        tiers: list[int] = []
        part_tokens: list[int] = []
        while at < end:
            index = at // chunk
            found = self._obtain(track, addresses[index], index) if index < len(addresses) else None
            if found is None:
                break
            slot, ticket, tier = found
            stop = min((index + 1) * chunk, end)
            blocks = tuple(block_ids[at // block : stop // block])
            parts.append((slot, addresses[index], ticket, (at - index * chunk) // block, blocks))
            tiers.append(tier)
            part_tokens.append(stop - at)
            at = stop
        lost = tuple(block_ids[at // block : end // block])
        self.orders.load(track, first, parts, part_tokens, tiers, lost, end - at)
        if lost:
            self._refuse(track, at // chunk)
        for slot in held:
            self.state.release(slot)
        self.lookup.end_lease(track)
        track.verdict = None

    def _hold(self, addresses: Iterable[bytes]) -> list[int]:
        """Pins those that are in slots, so that a read for one of them can not evict another."""
        slots = self.state.slots
        held = [slot for slot in map(self.catalog.slot, addresses) if slot >= 0]
        for slot in held:
            slots.pin(slot)
        return held

    def _obtain(self, track: Track, address: bytes, index: int) -> tuple[int, int, int] | None:
        """(pinned slot, fetch ticket or 0, tier) of an address, ordering a read where needed."""
        state = self.state
        running = state.fetching.get(address)
        if running is not None:
            ticket = self.orders.ticket(running)
            if not isinstance(ticket, FetchTicket):
                raise ContractError("a fetch has a ticket of another kind")
            state.slots.pin(ticket.slot)
            return ticket.slot, running, ticket.tier
        slot, mask = Catalog.split(state.catalog.code(address))
        if slot >= 0 and state.slots.state[slot] == SlotState.READY and (state.slot_tier >= 0 or mask):
            state.slots.pin(slot)
            return slot, 0, state.slot_tier if state.slot_tier >= 0 else first_tier(mask)
        mask &= state.readable
        taken = state.take(steal=False) if mask and slot < 0 else None
        if taken is None:
            return None
        tier = first_tier(mask)
        state.slots.pin(taken)
        return taken, self.orders.fetch(track, address, index, taken, tier), tier

    @staticmethod
    def _refuse(track: Track, index: int) -> None:
        track.refused_from = index if track.refused_from is None else min(track.refused_from, index)
        track.verdict = None

    # -- save -------------------------------------------------------------------------------------------------------

    def offer(self, track: Track, addresses: Sequence[bytes], tokens: int, block_ids: Sequence[int]) -> None:
        """Orders saves of what is computed and stored nowhere, and lower writes of what a writable tier lacks.

        Args:
            addresses: of the full chunks of the request so far.
            tokens: tokens whose KV will be in the blocks when the plan is executed.
            block_ids: the request's block table; an id < 0 or a missing one ends the offer.

        Cost: amortised O(1) a chunk over the request's life; O(1) when nothing is new or nothing has room.
        """
        chunk, per_chunk = self.spec.chunk_tokens, self.spec.chunk_tokens // self.spec.block_tokens
        full = min(tokens // chunk, len(addresses), len(block_ids) // per_chunk)
        if track.barred or (full <= track.save_cursor and track.write_cursor == track.save_cursor):
            return
        wanted = self.state.writable
        while track.save_cursor < full:
            index = track.save_cursor
            blocks = tuple(block_ids[index * per_chunk : (index + 1) * per_chunk])
            if min(blocks) < 0 or not self._save(track, addresses[index], index, blocks, wanted):
                break
            track.save_cursor += 1
        while track.write_cursor < track.save_cursor:
            if not self._write_lower(track, addresses[track.write_cursor], track.write_cursor, wanted):
                break
            track.write_cursor += 1

    def _save(self, track: Track, address: bytes, index: int, blocks: tuple[int, ...], wanted: int) -> bool:
        """Whether the chunk is in a slot, on its way into one, or needs none."""
        state = self.state
        slot, mask = Catalog.split(state.catalog.code(address))
        if slot >= 0:
            state.slots.touch(slot, track.turn, index)
            return True
        if (mask and not wanted & ~mask) or not (wanted or state.slot_tier >= 0):
            return True
        # What a staging slot holds is never looked up, so there nothing is worth keeping.
        taken = state.take(steal=True, keep_turn=track.turn if state.slot_tier >= 0 else None)
        if taken is None:
            if track.no_slot_at != index:
                track.no_slot_at = index
                state.accounts.no_slot()
            return False
        self.orders.save(track, address, index, taken, blocks)
        return True

    def _write_lower(self, track: Track, address: bytes, index: int, wanted: int) -> bool:
        """False if a writable tier lacks the address and can not be given it now."""
        state, slots = self.state, self.state.slots
        slot, mask = Catalog.split(state.catalog.code(address))
        missing = wanted & ~mask
        if slot < 0 or not missing or address in state.fetching:
            return True
        tiers = [t for t in state.persistent if missing >> t & 1 and (address, t) not in state.writing]
        if not tiers:
            return True
        # A save of an earlier plan may have been skipped on some rank, which then holds something else there.
        if slots.state[slot] != SlotState.READY and not self.orders.saves_into(slot):
            return False
        if not slots.writes[slot] and slots.writing >= self._write_limit:
            return False
        for tier in tiers:
            self.orders.write(track, address, index, slot, tier)
        return True

    # -- plan and report --------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """This step's orders. Ends leases whose time has come."""
        self.lookup.expire(self._tracks.values(), now)
        return self.orders.plan()

    def fallback_plan(self) -> Plan:
        """A plan for when making one failed: nothing but the failure of every load that was not sent yet."""
        self.orders.abandon()
        return self.orders.plan()

    def absorb(self, report: Report) -> None:
        """Takes what a rank reports; what was taken before is ignored."""
        self.orders.absorb(report)
        failed, self.orders.failed = self.orders.failed, []
        for request_id, index in failed:
            track = self._tracks.get(request_id)
            if track is not None:
                self._refuse(track, index)

    # -- tiers and reset --------------------------------------------------------------------------------------------

    def set_namespace(self, digest: bytes) -> None:
        """The namespace is known: tiers that every rank has open for it can be used. Once."""
        self.state.namespace = digest.hex()
        self.state.refresh()

    def set_epoch(self, tier: int, epoch: str) -> None:
        """The epoch of a persistent tier, "" for none that could be used.

        Another one than before forgets what this tier had, and what is on its way from or to it ends without effect.
        Slots and other tiers are as they were: only a `reset` says that the engine's KV is another. O(catalog).
        """
        if epoch and self.state.epochs[tier] == epoch:
            return
        # Also where there was no epoch: what was learnt meanwhile belongs to none.
        self.state.catalog.drop_hints(tier)
        if self.state.epochs[tier]:
            self.orders.forget_sent(tier)
        self.state.epochs[tier] = epoch
        self.state.refresh()

    def reset(self) -> None:
        """Forgets everything stored; what is on its way ends without effect, live requests save nothing more.

        No I/O. The caller gives the persistent tiers new epochs (`set_epoch`).
        """
        state = self.state
        state.generation += 1
        self.orders.abandon()
        for slot in range(state.slots.count):
            if state.slots.state[slot] == SlotState.READY:
                state.slots.discard(slot)
        state.catalog.clear()
        state.fetching.clear()
        state.writing.clear()
        for track in self._tracks.values():
            self.lookup.end_lease(track)
            track.barred, track.verdict = True, None

    def check(self) -> None:
        """Raises ContractError if slots, catalog and tickets disagree. O(everything); for tests and idle moments."""
        state = self.state
        state.slots.check()
        for slot in range(state.slots.count):
            address = state.slots.address[slot]
            if address is not None and state.catalog.slot(address) != slot:
                raise ContractError(f"slot {slot} holds an address that the catalog has elsewhere")
        pins = self.orders.pins()
        for track in self._tracks.values():
            for slot in track.leased:
                pins[slot] += 1
        if pins != list(state.slots.pins):
            raise ContractError(f"slots have the pins {list(state.slots.pins)}, tickets and leases {pins}")
        if self.lookup.leased_slots != sum(len(track.leased) for track in self._tracks.values()):
            raise ContractError(f"{self.lookup.leased_slots} leased slots counted")
        for slot in state.catalog.used_slots():
            if state.slots.state[slot] not in (SlotState.FILLING, SlotState.READY):
                raise ContractError(f"the catalog has an address in slot {slot}, which holds none")
