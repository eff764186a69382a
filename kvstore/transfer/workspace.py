"""What the parts of one executor share: slot memory and what it holds, tiers with their lanes, and the results.

Owned by the thread that calls the executor. Lanes only queue closures with `post`; the owner runs them in `drain`, so
nothing here but that queue is shared between threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from kvstore.layout import RecordGeometry
from kvstore.messages import Done, Evicted, Loaded, TierState
from kvstore.metrics import Counters
from kvstore.tiers.base import Tier
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.slots import SlotArena
from kvstore.transfer.copies import PagedMemory
from kvstore.transfer.gate import EpochGate
from kvstore.transfer.lanes import Lane


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What an executor is made for.

    Attributes:
        rank: index of the rank.
        is_writer: whether this rank writes persistent tiers (the lowest of its shard).
        geometries: one per group.
        write_limit: slots that lower writes may hold at a time.
        load_timeout: seconds from the order of a load to its end.
        lane_threads: I/O threads per persistent tier.
        lane_depth: jobs that may wait per persistent tier.
    """

    rank: int
    is_writer: bool
    geometries: tuple[RecordGeometry, ...]
    write_limit: int
    load_timeout: float
    lane_threads: int = 2
    lane_depth: int = 1024


@dataclass(frozen=True, slots=True)
class Channel:
    """A persistent tier of this executor: its client, its gate, its lane."""

    client: Tier
    gate: EpochGate
    lane: Lane


class Workspace:
    """See the module. ``content[slot]`` is the address that the slot holds completely, None for none."""

    def __init__(
        self,
        spec: ExecutorSpec,
        arena: SlotArena,
        tiers: Sequence[Tier | None],
        counters: Counters,
        cpus: Set[int] | None,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.arena = arena
        self.counters = counters
        self.clock = clock
        self.channels = tuple(
            Channel(tier, EpochGate(tier), Lane(tier.name, spec.lane_threads, spec.lane_depth, cpus))
            if tier is not None
            else None
            for tier in tiers
        )
        self.memory: PagedMemory | None = None
        self.format: RecordFormat | None = None
        self.content: list[bytes | None] = [None] * arena.count
        self.sealed = bytearray(arena.count)
        self.busy = [0] * arena.count
        """Lower writes that read the slot now."""
        self.done: list[Done] = []
        self.loaded: list[Loaded] = []
        self.evicted: list[Evicted] = []
        self.tier_states: list[TierState] = []
        self.arrived = threading.Condition()
        self._results: deque[Callable[[], None]] = deque()

    @property
    def has_results(self) -> bool:
        """Whether `drain` would do something."""
        return bool(self._results)

    def post(self, result: Callable[[], None]) -> None:
        """Queues what the owner has to do next. Any thread."""
        with self.arrived:
            self._results.append(result)
            self.arrived.notify_all()

    def drain(self) -> None:
        """Does what was queued. Owner only."""
        while self._results:
            self._results.popleft()()
