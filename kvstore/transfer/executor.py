"""The executor of one rank: takes plans, moves bytes, returns reports. Decides nothing.

Two kinds of movement, never mixed: lanes move records between tiers and slots; copies between slots and the engine's
blocks happen only inside the calls below, on the caller's thread, which the engine orders against its compute.

Invariants: a slot's bytes go into blocks only while the slot is known to hold exactly the address that the plan names;
a slot that a lane reads or writes is never filled; every ticket of every plan is answered exactly once.

Calls of one step, in this order and all from one thread: `begin`, `start_loads`, `take_snapshots`, `poll`, `report`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from time import monotonic

from kvstore.messages import Batch, Fetch, Load, Outcome, Plan, Report, Save, Write
from kvstore.metrics import Counters
from kvstore.tiers.base import Scope, Tier, TierStatus
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.slots import SlotArena
from kvstore.transfer.copies import PagedMemory
from kvstore.transfer.loader import Loader
from kvstore.transfer.saver import Saver
from kvstore.transfer.workspace import ExecutorSpec, Workspace

__all__ = ["Executor", "ExecutorSpec"]

IDLE_WAIT = 0.005
"""Seconds that `poll` waits for lanes in a step without a forward: about what a further empty step costs."""

COPY_BUDGET = 256 << 20
"""Bytes copied into blocks in one step that has a forward; the rest follows in the next steps."""


COLLECT_BATCH = 1024
"""Records of abandoned epochs that are removed at a time: 0.2 s of unlinking (measured)."""


class Executor:
    """See the module. ``tiers`` has the persistent tier's client at its index and None elsewhere."""

    def __init__(
        self,
        spec: ExecutorSpec,
        arena: SlotArena,
        tiers: Sequence[Tier | None],
        counters: Counters,
        *,
        cpus: Set[int] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.spec = spec
        self._space = Workspace(spec, arena, tiers, counters, cpus, clock)
        self._loader = Loader(self._space)
        self._saver = Saver(self._space)
        self._saves: deque[Save] = deque()
        self._writes: deque[Write] = deque()
        self._fetches: deque[Fetch] = deque()
        self._loads: deque[Load] = deque()
        self._next_batch = 0
        self._unacknowledged: deque[Batch] = deque()

    # -- set-up -----------------------------------------------------------------------------------------------------

    def register(self, memory: PagedMemory) -> None:
        """Names the engine's KV memory. Before the first plan."""
        self._space.memory = memory

    def attach(self, tier: int, scope: Scope, *, measures: bool = False) -> None:
        """Opens a tier for a namespace; may block, so it is called from a thread of its own.

        Args:
            tier, scope: which, and for what.
            measures: whether the tier also finds out what it has to say in `tier_status`, once it can be used.

        Raises:
            TierUnavailable, ConfigError: from the tier.
        """
        channel = self._space.channels[tier]
        if channel is None:
            return
        channel.client.attach(scope)
        self._space.format = RecordFormat(scope.namespace, scope.geometries[0], scope.key)
        channel.gate.attached()
        digest = scope.namespace.digest.hex()
        self._space.post(lambda: self._space.tier_states.append((tier, digest, "")))
        if measures:
            channel.client.measure()

    def collect(self, limit: int) -> int:
        """Removes up to ``limit`` records a tier of epochs that nobody uses; the number. Blocks; background thread."""
        if not self.spec.is_writer:
            return 0
        return sum(channel.client.collect(limit) for channel in self._space.channels if channel is not None)

    def detached(self, tier: int, reason: str) -> None:
        """A tier could not be opened. Any thread."""
        self._space.post(lambda: self._space.tier_states.append((tier, "", reason)))

    # -- one step ---------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Takes a plan. Snapshots of the last one that were not taken yet are taken now, before anything changes.

        The plan is taken even if that raises: then the caller can answer it as a whole with `abandon`.
        """
        try:
            if self._saves or self._writes:
                self.take_snapshots()
            self._enter(plan)
        finally:
            self._saves.extend(plan.saves)
            self._writes.extend(plan.writes)
            self._fetches.extend(plan.fetches)
            self._loads.extend(plan.loads)

    def _enter(self, plan: Plan) -> None:
        space = self._space
        space.drain()
        if plan.epochs:
            for tier, channel in enumerate(space.channels):
                if channel is not None:
                    channel.gate.change(plan.epochs[tier], plan.generation)
        if plan.acks:
            acked = plan.acks[self.spec.rank]
            while self._unacknowledged and self._unacknowledged[0].sequence <= acked:
                self._unacknowledged.popleft()

    def start_loads(self, *, has_forward: bool = True) -> None:
        """Starts the plan's reads, and copies into blocks what is in slots already."""
        while self._fetches:
            self._loader.fetch(self._fetches[0])
            self._fetches.popleft()
        while self._loads:
            self._loader.start(self._loads[0])
            self._loads.popleft()
        self._loader.advance(COPY_BUDGET if has_forward else None)

    def take_snapshots(self) -> None:
        """Copies the plan's blocks into slots and queues their lower writes. The blocks may be reused afterwards."""
        space, copied, begun = self._space, 0, self._space.clock()
        if self._saves:
            # A lower write that ended since the step began frees its slot.
            space.drain()
        while self._saves:
            copied += self._saver.snapshot(self._saves[0])
            self._saves.popleft()
        if copied:
            space.counters.add("copied_in_bytes_total", copied)
            space.counters.add("copy_seconds_total", space.clock() - begun, reason="in")
        while self._writes:
            self._saver.write(self._writes[0])
            self._writes.popleft()

    def poll(self, *, wait: bool = False) -> tuple[set[str], set[int]]:
        """(requests whose load ended, blocks that were not loaded), each once.

        Args:
            wait: whether to wait up to `IDLE_WAIT` for loads; only where nothing else has to be computed.
        """
        space, loader = self._space, self._loader
        space.drain()
        loader.advance(None if wait else COPY_BUDGET)
        until = space.clock() + IDLE_WAIT
        while wait and loader.open and not loader.finished:
            with space.arrived:
                if not space.has_results and not space.arrived.wait(max(0.0, until - space.clock())):
                    break
            space.drain()
            loader.advance(None)
        finished, loader.finished = loader.finished, set()
        invalid, loader.invalid = loader.invalid, set()
        return finished, invalid

    def report(self) -> Report | None:
        """What ended, with everything that no plan has acknowledged; None for nothing."""
        space = self._space
        space.drain()
        if space.done or space.loaded or space.evicted or space.tier_states:
            items = tuple(space.done), tuple(space.loaded), tuple(space.evicted), tuple(space.tier_states)
            self._unacknowledged.append(Batch(self._next_batch, *items))
            self._next_batch += 1
            space.done, space.loaded, space.evicted, space.tier_states = [], [], [], []
        return Report(self.spec.rank, tuple(self._unacknowledged)) if self._unacknowledged else None

    def abandon(self) -> None:
        """Answers what is left of the current plan as failed: for a caller that caught an exception in a step."""
        space = self._space
        for column in (self._saves, self._fetches):
            for op in column:
                space.content[op[1]] = None
                space.done.append((op[0], Outcome.UNAVAILABLE))
            column.clear()
        if self.spec.is_writer:
            space.done.extend((op[0], Outcome.UNAVAILABLE) for op in self._writes)
        self._writes.clear()
        self._loader.abandon(self._loads)
        self._loads.clear()

    def close(self, timeout: float) -> int:
        """Finishes queued writes for ``timeout`` seconds, then lets go of everything; the number of dropped jobs."""
        deadline = monotonic() + timeout
        dropped = 0
        for channel in self._space.channels:
            if channel is not None:
                dropped += channel.lane.close(max(0.0, deadline - monotonic()))
                channel.client.close()
        return dropped

    # -- for people and tests ---------------------------------------------------------------------------------------

    @property
    def pending_jobs(self) -> int:
        """Lane jobs that wait or run."""
        return sum(channel.lane.pending for channel in self._space.channels if channel is not None)

    @property
    def open_loads(self) -> int:
        """Loads that have not ended."""
        return self._loader.open

    def wait_results(self, timeout: float) -> None:
        """Blocks until a lane answers, at most ``timeout`` seconds."""
        with self._space.arrived:
            if not self._space.has_results:
                self._space.arrived.wait(timeout)

    def tier_status(self, tier: int) -> TierStatus | None:
        """Status of a persistent tier, None for a volatile one. Any thread."""
        channel = self._space.channels[tier]
        return channel.client.status() if channel is not None else None
