"""Ranks without bytes: a reference of what an executor does with a plan, as `kvstore.messages` says it.

A slot's content is the address that it holds. A rank checks what it is ordered to do: an order that a planner must
never give is a failed assertion here. What ends, when, and how, is decided by the test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.messages import Batch, Evicted, Load, Outcome, Plan, Report, TierState

NAMESPACE = b"\xab" * 32

Store = dict[tuple[int, str], set[bytes]]
"""A shard's persistent tiers: addresses by (tier, epoch)."""


@dataclass
class Transfer:
    """A read or write that is on its way."""

    ticket: int
    slot: int
    address: bytes
    tier: int
    epoch: str


@dataclass
class FakeRank:
    """One rank. ``store`` is shared by the ranks of a shard; only its lowest is a writer.

    ``write_limit`` is the number of lower writes that may be on their way at a time; the rest is SKIPPED.
    """

    rank: int
    slots: int
    is_writer: bool
    store: Store
    write_limit: int = 1 << 30
    plans: deque[Plan] = field(default_factory=deque)
    reads: list[Transfer] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    delivered: list[tuple[str, int, tuple[int, ...], bytes]] = field(default_factory=list)
    """(request, first block within the chunk, blocks, address) of every part copied into blocks."""
    ended: list[int] = field(default_factory=list)
    """Tickets of ended loads."""

    def __post_init__(self) -> None:
        self.content: list[bytes | None] = [None] * self.slots
        self._failed: set[int] = set()
        self._unacknowledged: deque[Batch] = deque()
        self._next_batch = 0
        self._done: list[tuple[int, Outcome]] = []
        self._loaded: list[tuple[int, int, Outcome]] = []
        self._evicted: list[Evicted] = []
        self._tiers: list[TierState] = []

    # -- orders -----------------------------------------------------------------------------------------------------

    def execute(self, failing_saves: int = 0) -> None:
        """Takes the oldest plan that waits; bit i of ``failing_saves`` lets its i-th save fail."""
        plan = self.plans.popleft()
        acked = plan.acks[self.rank]
        while self._unacknowledged and self._unacknowledged[0].sequence <= acked:
            self._unacknowledged.popleft()
        saved = {slot for _, slot, *_ in plan.saves}
        for index, (ticket, slot, address, _, blocks) in enumerate(plan.saves):
            assert blocks
            self._done.append((ticket, self._save(slot, address, bool(failing_saves >> index & 1))))
        for ticket, slot, address, _, tier, _turn, _position in plan.writes:
            self._write(Transfer(ticket, slot, address, tier, plan.epochs[tier]), slot in saved)
        for ticket, slot, address, _, tier in plan.fetches:
            assert not self._is_used(slot), "a read into a slot that is in use"
            self.content[slot] = None
            self.reads.append(Transfer(ticket, slot, address, tier, plan.epochs[tier]))
        self.loads.extend(plan.loads)
        self.advance()

    def _is_used(self, slot: int) -> bool:
        return (
            self._is_busy(slot)
            or any(read.slot == slot for read in self.reads)
            or any(part[0] == slot for load in self.loads for part in load[3])
        )

    def _is_busy(self, slot: int) -> bool:
        return any(write.slot == slot for write in self.writes)

    def _save(self, slot: int, address: bytes, fails: bool) -> Outcome:
        if self._is_busy(slot):
            return Outcome.SKIPPED
        assert not self._is_used(slot), "a save into a slot that is in use"
        self.content[slot] = None if fails else address
        return Outcome.UNAVAILABLE if fails else Outcome.STORED

    def _write(self, write: Transfer, is_after_save: bool) -> None:
        if not self.is_writer:
            return
        is_held = self.content[write.slot] == write.address
        assert is_held or is_after_save, "a write of a slot that holds something else"
        if is_held and write.epoch and len(self.writes) < self.write_limit:
            self.writes.append(write)
        else:
            self._done.append((write.ticket, Outcome.SKIPPED))

    # -- what ends --------------------------------------------------------------------------------------------------

    def end_read(self, index: int, outcome: Outcome = Outcome.HIT) -> None:
        """Ends a read; a HIT of what is not there is a MISS."""
        read = self.reads.pop(index)
        if outcome == Outcome.HIT and read.address not in self.store.get((read.tier, read.epoch), ()):
            outcome = Outcome.MISS
        if outcome == Outcome.HIT:
            self.content[read.slot] = read.address
        else:
            self._failed.add(read.ticket)
        self._done.append((read.ticket, outcome))
        self.advance()

    def end_write(self, index: int, outcome: Outcome = Outcome.STORED) -> None:
        """Ends a write."""
        write = self.writes.pop(index)
        assert self.content[write.slot] == write.address, "a slot changed under a write"
        if outcome == Outcome.STORED:
            self.store.setdefault((write.tier, write.epoch), set()).add(write.address)
        self._done.append((write.ticket, outcome))

    def end_everything(self) -> None:
        """Executes every plan and ends every transfer well."""
        while self.plans:
            self.execute()
        while self.reads:
            self.end_read(0)
        while self.writes:
            self.end_write(0)
        assert not self.loads, "a load waits for a read that nobody does"

    def advance(self) -> None:
        """Ends the loads that wait for no read any more."""
        reading = {read.ticket for read in self.reads}
        for load in list(self.loads):
            if not any(part[2] in reading for part in load[3]):
                self.end_load(load)

    def end_load(self, load: Load) -> None:
        """Ends a load now: what is being read still, and all behind it, comes too late."""
        self.loads.remove(load)
        ticket, request_id, _, parts, _ = load
        outcome, count, reading = Outcome.HIT, 0, {read.ticket for read in self.reads}
        for slot, address, read, first, blocks in parts:
            if read in reading or self.content[slot] != address:
                assert read in reading or read in self._failed, "a load of a slot that holds something else"
                outcome = Outcome.TIMEOUT if read in reading else Outcome.MISS
                break
            self.delivered.append((request_id, first, blocks, address))
            count += 1
        assert ticket not in self.ended
        self.ended.append(ticket)
        self._loaded.append((ticket, count, outcome))

    def set_tier(self, tier: int, namespace: bytes = NAMESPACE) -> None:
        """The tier opens for a namespace on this rank, or closes (``b""``)."""
        self._tiers.append((tier, namespace.hex(), "" if namespace else "gone"))

    def evict(self, tier: int, epoch: str, addresses: Iterable[bytes]) -> None:
        """The tier removes records of this shard."""
        gone = tuple(addresses)
        self.store.get((tier, epoch), set()).difference_update(gone)
        self._evicted.append((tier, epoch, gone))

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What ended since, with everything that no plan has acknowledged."""
        if self._done or self._loaded or self._evicted or self._tiers:
            columns = tuple(self._done), tuple(self._loaded), tuple(self._evicted), tuple(self._tiers)
            self._unacknowledged.append(Batch(self._next_batch, *columns))
            self._next_batch += 1
            self._done, self._loaded, self._evicted, self._tiers = [], [], [], []
        return Report(self.rank, tuple(self._unacknowledged))
