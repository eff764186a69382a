"""The loading half of an executor: records into slots, slots into blocks, and the end of each load.

A load delivers its parts in order and ends at the first one that it can not deliver; the blocks from there on are
reported invalid. A read that ends after its load lands in its slot and touches no block.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.messages import Fetch, Load, Outcome, Part
from kvstore.transfer.workspace import Workspace

_REMEMBERED_FAILURES = 4096


@dataclass(slots=True)
class _OpenLoad:
    ticket: int
    request_id: str
    parts: tuple[Part, ...]
    lost: tuple[int, ...]
    deadline: float
    delivered: int = 0


class Loader:
    """Part of one executor."""

    def __init__(self, workspace: Workspace) -> None:
        self._space = workspace
        self._fetching: set[int] = set()
        self._failed: OrderedDict[int, Outcome] = OrderedDict()
        self._open: deque[_OpenLoad] = deque()
        self.finished: set[str] = set()
        self.invalid: set[int] = set()

    @property
    def open(self) -> int:
        """Loads that have not ended."""
        return len(self._open)

    def fetch(self, fetch: Fetch) -> None:
        """Queues a read into a slot."""
        ticket, slot, address, _group, tier = fetch
        space, channel = self._space, self._space.channels[tier]
        space.content[slot] = None
        if channel is None:
            self._fetched(ticket, slot, address, Outcome.UNAVAILABLE)
            return
        term, deadline = channel.gate.term, space.clock() + space.spec.load_timeout
        buffer = space.arena.buffer(slot)

        def run() -> None:
            outcome = Outcome.SKIPPED
            if channel.gate.enter(term):
                try:
                    outcome = channel.client.read([address], [buffer], deadline)[0]
                finally:
                    channel.gate.leave()
            space.post(lambda: self._fetched(ticket, slot, address, outcome))

        def failed() -> None:
            space.post(lambda: self._fetched(ticket, slot, address, Outcome.UNAVAILABLE))

        self._fetching.add(ticket)
        if not channel.lane.submit(run, failed, is_load=True):
            self._fetched(ticket, slot, address, Outcome.FULL)

    def _fetched(self, ticket: int, slot: int, address: bytes, outcome: Outcome) -> None:
        self._fetching.discard(ticket)
        if outcome == Outcome.HIT:
            self._space.content[slot], self._space.sealed[slot] = address, 1
        else:
            self._failed[ticket] = outcome
            if len(self._failed) > _REMEMBERED_FAILURES:
                self._failed.popitem(last=False)
        self._space.done.append((ticket, outcome))

    def start(self, load: Load) -> None:
        """Opens a load; its deadline begins now."""
        ticket, request_id, _group, parts, lost = load
        deadline = self._space.clock() + self._space.spec.load_timeout
        self._open.append(_OpenLoad(ticket, request_id, parts, lost, deadline))

    def advance(self, budget: int | None) -> None:
        """Copies what has arrived, in the order of the loads, and ends loads that are complete, failed or too late.

        Args:
            budget: bytes to copy at most (the part that passes it is still copied), None for no limit.
        """
        if not self._open:
            return
        space = self._space
        begun, copied = space.clock(), 0
        waiting: deque[_OpenLoad] = deque()
        try:
            while self._open:
                load = self._open[0]
                copied, outcome = self._fill(load, copied, budget, begun)
                self._open.popleft()
                if outcome == Outcome.PENDING:
                    waiting.append(load)
                else:
                    self._end(load, outcome)
        finally:
            waiting.extend(self._open)
            self._open = waiting
        if copied:
            space.counters.add("copied_out_bytes_total", copied)
            space.counters.add("copy_seconds_total", space.clock() - begun, reason="out")

    def _fill(self, load: _OpenLoad, copied: int, budget: int | None, now: float) -> tuple[int, Outcome]:
        """Copies the parts that can be; (bytes copied so far in this call, HIT when the load is complete)."""
        space = self._space
        while load.delivered < len(load.parts):
            slot, address, fetch, first, blocks = load.parts[load.delivered]
            if fetch in self._fetching:
                return copied, Outcome.TIMEOUT if now >= load.deadline else Outcome.PENDING
            if space.content[slot] != address or space.memory is None:
                return copied, self._failed.get(fetch, Outcome.MISS)
            if budget is not None and copied >= budget:
                return copied, Outcome.PENDING
            space.memory.load(space.arena.array(slot), first, blocks)
            copied += len(blocks) * space.spec.geometries[0].group.block_bytes
            load.delivered += 1
        return copied, Outcome.HIT

    def _end(self, load: _OpenLoad, outcome: Outcome) -> None:
        self.finished.add(load.request_id)
        for part in load.parts[load.delivered :]:
            self.invalid.update(part[4])
        self.invalid.update(load.lost)
        self._space.loaded.append((load.ticket, load.delivered, outcome))

    def abandon(self, unstarted: Iterable[Load]) -> None:
        """Ends every load as failed."""
        for load in unstarted:
            self.start(load)
        while self._open:
            self._end(self._open.popleft(), Outcome.UNAVAILABLE)
