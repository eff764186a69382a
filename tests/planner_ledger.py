"""A plain model of what a planner may believe: built from the plans that it sent and the reports that it got."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.messages import OK_OUTCOMES, Batch, Load, Outcome, Plan
from kvstore.planner.planner import Planner
from kvstore.planner.slot_table import SlotState
from tests.fake_ranks import NAMESPACE

GONE = {Outcome.MISS, Outcome.DAMAGED}


@dataclass
class Ticket:
    """An order that some rank has not answered."""

    kind: str
    slots: tuple[int, ...]
    address: bytes
    tier: int
    generation: int
    epoch: str
    waiting: set[int]
    outcomes: set[Outcome] = field(default_factory=set)


@dataclass
class Ledger:
    """``where`` are the readable slots, ``hints`` what persistent tiers hold, ``open`` the unanswered tickets."""

    planner: Planner
    where: dict[bytes, int] = field(default_factory=dict)
    hints: set[tuple[int, bytes]] = field(default_factory=set)
    open: dict[int, Ticket] = field(default_factory=dict)
    expected: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By request: first token and blocks of a load that was committed and not planned."""
    received: dict[int, int] = field(default_factory=dict)
    opened: dict[int, set[int]] = field(default_factory=dict)
    loading: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """By ticket: request, first chunk, parts that every rank so far delivered."""
    refused: dict[str, int] = field(default_factory=dict)
    """By request: the first chunk that was not delivered."""
    planned_loads: int = 0
    has_abandoned: bool = False

    @property
    def generation(self) -> int:
        return self.planner.state.generation

    @property
    def writers(self) -> set[int]:
        return {r for r in range(self.planner.spec.ranks) if self.planner.spec.writers >> r & 1}

    def sent(self, plan: Plan) -> None:
        """A plan left the planner."""
        ranks = set(range(self.planner.spec.ranks))
        filled = {op[1]: op[2] for op in (*plan.saves, *plan.fetches)}
        assert len(filled) == len(plan.saves) + len(plan.fetches), "a plan uses a slot for two addresses"
        assert not ({op[0] for op in plan.saves} | {op[0] for op in plan.fetches}) & self.open.keys()
        for kind, column in (("save", plan.saves), ("fetch", plan.fetches)):
            for number, slot, address, *rest in column:
                tier = rest[-1] if kind == "fetch" else -1
                allowed = {"write"} if kind == "save" else set()
                users = {t.kind for t in self.open.values() if slot in t.slots}
                assert users <= allowed, f"a {kind} into a slot that {users} use"
                self.open[number] = Ticket(kind, (slot,), address, tier, plan.generation, self._epoch(tier), set(ranks))
        for load in plan.loads:
            self._sent_load(load, plan, filled, ranks)
        for number, slot, address, _, tier, _turn, _position in plan.writes:
            saved = any(op[1] == slot and op[2] == address for op in plan.saves)
            assert saved or self.where.get(address) == slot, "a write of what is not in the slot"
            epoch = self._epoch(tier)
            self.open[number] = Ticket("write", (slot,), address, tier, plan.generation, epoch, set(self.writers))
        self.where = {address: slot for address, slot in self.where.items() if slot not in filled}

    def _sent_load(self, load: Load, plan: Plan, filled: dict[int, bytes], ranks: set[int]) -> None:
        number, request_id, _, parts, lost = load
        first_token, blocks = self.expected.pop(request_id)
        chunk, block = self.planner.spec.chunk_tokens, self.planner.spec.block_tokens
        assert tuple(b for part in parts for b in part[4]) + lost == blocks
        at = first_token
        for slot, address, read, first, filled_blocks in parts:
            assert first == at % chunk // block
            at += len(filled_blocks) * block
            if read:
                assert self.open[read].kind == "fetch" and self.open[read].slots == (slot,)
                assert self.open[read].address == address
            else:
                assert self.where.get(address) == slot, "a load of a slot that not all ranks reported filled"
                assert slot not in filled
        self.open[number] = Ticket("load", tuple(p[0] for p in parts), b"", -1, plan.generation, "", set(ranks))
        self.loading[number] = request_id, first_token // chunk, len(parts)
        if lost:
            self._refuse(request_id, first_token // chunk + len(parts))
        self.planned_loads += 1

    def got(self, rank: int, batch: Batch) -> None:
        """A batch reached the planner."""
        if batch.sequence <= self.received.get(rank, -1):
            return
        assert batch.sequence == self.received.get(rank, -1) + 1, "a batch was acknowledged that never arrived"
        self.received[rank] = batch.sequence
        for tier, namespace, _ in batch.tiers:
            ranks = self.opened.setdefault(tier, set())
            (ranks.add if namespace == NAMESPACE.hex() else ranks.discard)(rank)
        for number, outcome in batch.done:
            ticket = self.open[number]
            ticket.waiting.remove(rank)
            ticket.outcomes.add(outcome)
            if not ticket.waiting:
                del self.open[number]
                if ticket.generation == self.generation and ticket.epoch == self._epoch(ticket.tier):
                    self._ended(ticket)
        for number, delivered, _ in batch.loaded:
            ticket, (request_id, first, least) = self.open[number], self.loading[number]
            ticket.waiting.remove(rank)
            least = min(least, delivered)
            self.loading[number] = request_id, first, least
            if not ticket.waiting:
                del self.open[number], self.loading[number]
                if least < len(ticket.slots):
                    self._refuse(request_id, first + least)
        for tier, epoch, addresses in batch.evicted:
            if epoch == self.planner.state.epochs[tier]:
                self.hints -= {(tier, address) for address in addresses}

    def _refuse(self, request_id: str, chunk: int) -> None:
        self.refused[request_id] = min(chunk, self.refused.get(request_id, chunk))

    def _ended(self, ticket: Ticket) -> None:
        if ticket.kind == "write":
            if ticket.outcomes == {Outcome.STORED}:
                self.hints.add((ticket.tier, ticket.address))
        elif ticket.outcomes <= OK_OUTCOMES:
            self.where[ticket.address] = ticket.slots[0]
        elif ticket.outcomes & GONE:
            self.hints.discard((ticket.tier, ticket.address))

    def _epoch(self, tier: int) -> str:
        return self.planner.state.epochs[tier] if tier >= 0 else ""

    def forget_tier(self, tier: int) -> None:
        """The tier has another epoch."""
        self.hints = {(t, address) for t, address in self.hints if t != tier}
        self.has_abandoned = True

    def forget(self) -> None:
        """The planner was reset."""
        self.where.clear()
        self.hints.clear()
        self.has_abandoned = True

    def is_readable(self, tier: int) -> bool:
        """Whether every rank has the tier open."""
        return len(self.opened.get(tier, ())) == self.planner.spec.ranks and bool(self.planner.state.epochs[tier])

    def compare(self, is_settled: bool) -> None:
        """What the planner believes is what it may believe; ``is_settled`` right after a plan."""
        state = self.planner.state
        ready = {state.slots.address[s]: s for s in range(state.slots.count) if state.slots.state[s] == SlotState.READY}
        assert ready.items() <= self.where.items(), "a slot is readable that not all ranks reported filled"
        if is_settled and not self.has_abandoned and state.slot_tier >= 0:
            assert ready.items() == self.where.items(), "a chunk was lost"
        hints = {(t, a) for a in self.addresses() for t in state.persistent if state.catalog.tiers(a) >> t & 1}
        assert hints == self.hints
        assert sum(state.catalog.hint_counts) == len(self.hints)
        for tier in state.persistent:
            assert bool(state.readable >> tier & 1) == self.is_readable(tier)

    def addresses(self) -> set[bytes]:
        """Every address that a tier may have."""
        return {address for _, address in self.hints} | set(self.where)
