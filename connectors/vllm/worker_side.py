"""A worker's half: one executor, and a thread that opens its tiers and publishes its part of the statistics."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from connectors.vllm import adapt
from connectors.vllm.settings import Settings, digest_cache, log
from connectors.vllm.weights import LoadedWeights
from connectors.vllm.wire import HandshakeMetadata, PlanMetadata, ReportMetadata
from kvstore.errors import KVStoreError
from kvstore.metrics import Counters
from kvstore.transfer.copies import PagedMemory
from kvstore.transfer.executor import COLLECT_BATCH
from kvstore.transfer.lanes import contain

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

RETRY_SECONDS = 5.0
CLOSE_SECONDS = 2.0
"""The front end kills an engine that takes about 5 s to end."""


class WorkerSide:
    """See the module. Every method but `close` is called by the engine's worker thread."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.counters = Counters()
        self._weights = LoadedWeights(vllm_config, settings.config.identity.weights_digest)
        self._plan = settings.blueprint
        self._arena = self._plan.arena()
        self.executor = self._plan.executor(rank, self._arena, self.counters, adapt.parent_cpus())
        self._snapshot = settings.snapshot_writer(f"rank{rank}")
        self._is_idle = False
        self._sequence = -1
        self._ended: set[str] = set()
        self._invalid: set[int] = set()
        self._registered = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvstore-worker", daemon=True)
        self._thread.start()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Names the engine's KV memory.

        Raises:
            LayoutMismatch: it is not what vLLM declared.
        """
        geometry = self._plan.geometry
        names = [layer.name for layer in geometry.group.layers]
        self.executor.register(PagedMemory.from_tensors(geometry, {name: kv_caches[name] for name in names}))
        self._registered.set()

    def handshake(self) -> HandshakeMetadata:
        """For the scheduler's side, once."""
        shard = self._plan.topology.shards[self.rank]
        return HandshakeMetadata(self.rank, shard, self._arena.count, self.settings.identity)

    # -- one step ---------------------------------------------------------------------------------------------------

    def begin(self, metadata: Any) -> None:
        """Takes the step's plan, once."""
        self._take(metadata)

    def _take(self, metadata: Any) -> None:
        if isinstance(metadata, PlanMetadata) and metadata.plan.sequence != self._sequence:
            self._sequence = metadata.plan.sequence
            for request_id, blocks in metadata.lost:
                self._ended.add(request_id)
                self._invalid.update(blocks)
            self.executor.begin(metadata.plan)

    def refuse(self, metadata: Any) -> None:
        """After an exception: whatever of the step's plan was not done is answered as failed."""
        try:
            self._take(metadata)
        finally:
            self.executor.abandon()

    def start_loads(self, forward_context: Any) -> None:
        """Starts loads, and delivers those from slots."""
        self._is_idle = adapt.is_idle_step(forward_context)
        self.executor.start_loads(has_forward=not self._is_idle)

    def save(self) -> None:
        """Takes the snapshots of this step."""
        self.executor.take_snapshots()

    def finished(self) -> set[str]:
        """Requests whose load ended."""
        finished, invalid = self.executor.poll(wait=self._is_idle)
        self._invalid |= invalid
        ended, self._ended = self._ended, set()
        return finished | ended

    def invalid_blocks(self) -> set[int]:
        """Blocks of these requests that were not loaded, each once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> ReportMetadata | None:
        """What ended."""
        report = self.executor.report()
        return ReportMetadata((report,)) if report is not None else None

    # -- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        persistent = [index for index, kind in enumerate(self._plan.types) if not kind.volatile]
        if persistent:
            contain("worker.open", lambda: self._open(persistent))
        while not self._stop.wait(self.settings.config.stats.every):
            contain("worker.publish", self._publish)
            if persistent:
                contain("worker.collect", self._collect)

    def _collect(self) -> None:
        self.executor.collect(COLLECT_BATCH)

    def _open(self, tiers: list[int]) -> None:
        try:
            digest = self._weights.digest(digest_cache())
            # Whatever the order in which the engine does it: once its KV memory is there, the weights are loaded.
            self._registered.wait()
            self._weights.verify()
            namespace = self.settings.namespace(digest)
        except KVStoreError as error:
            log.warning("kvstore.closed rank=%d reason=%s", self.rank, error)
            for tier in tiers:
                self.executor.detached(tier, str(error))
            return
        scope = self._plan.scope(namespace, self._plan.topology.shards[self.rank])
        waiting = list(tiers)
        while waiting and not self._stop.is_set():
            for tier in tuple(waiting):
                try:
                    self.executor.attach(tier, scope, measures=True)
                    waiting.remove(tier)
                except KVStoreError as error:
                    log.warning("kvstore.tier_closed rank=%d tier=%d reason=%s", self.rank, tier, error)
                    self.executor.detached(tier, str(error))
            if waiting:
                contain("worker.publish", self._publish)
                self._stop.wait(RETRY_SECONDS)

    def _publish(self) -> None:
        if self._snapshot is None:
            return
        tiers = []
        for index, kind in enumerate(self._plan.types):
            status = self.executor.tier_status(index)
            row: dict[str, Any] = {"name": kind.name}
            if status is not None:
                row |= {"capacity_bytes": status.capacity_bytes, "used_bytes": status.used_bytes}
                row |= {"chunks": status.records, "notes": list(status.notes)}
            else:
                row |= {"notes": [f"pinned: false ({self._arena.pin_note})"] if not self._arena.pinned else []}
            tiers.append(row)
        self._snapshot.publish({"engine": {}, "tiers": tiers, "counters": self.counters.snapshot()})

    def close(self) -> None:
        """Finishes queued writes for a moment, then lets go."""
        self._stop.set()
        self._registered.set()
        dropped = self.executor.close(CLOSE_SECONDS)
        if dropped:
            log.warning("kvstore.dropped rank=%d writes=%d reason=shutdown", self.rank, dropped)
        contain("worker.publish", self._publish)
