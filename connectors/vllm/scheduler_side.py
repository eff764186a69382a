"""The scheduler's half: feeds the planner, asks the prober, sends plans, takes reports.

Runs on the engine's scheduler thread and never blocks on it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from connectors.vllm import adapt
from connectors.vllm.adapters import Adapters
from connectors.vllm.requests import LiveRequest
from connectors.vllm.settings import Settings, digest_cache, log, log_start
from connectors.vllm.weights import LoadedWeights
from connectors.vllm.wire import HandshakeMetadata, PlanMetadata, ReportMetadata
from kvstore.errors import ConfigError, ContractError, KVStoreError
from kvstore.keys import Addresser, Namespace
from kvstore.messages import Plan
from kvstore.metrics import Counters
from kvstore.transfer.events import Opened, take_events

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


MAX_ADDRESSERS = 256
"""Request identities whose addressers are kept."""


class SchedulerSide:
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings, hash_tokens: int) -> None:
        self.settings = settings
        self.counters = Counters()
        self.kv_cache_manager: Any = None
        self._vllm_config = vllm_config
        self._blueprint = settings.blueprint
        self._chunk = settings.config.chunk_tokens
        self._hashes_per_chunk = self._chunk // hash_tokens
        self.planner = self._blueprint.planner(self.counters)
        self._live: dict[str, LiveRequest] = {}
        self._namespace: Namespace | None = None
        self._is_known = False
        """Whether the planner has the namespace."""
        self._addressers: OrderedDict[bytes, Addresser] = OrderedDict()
        self._private: set[int] = set()
        """Persistent tiers that this engine works in a private epoch of until it ends."""
        self._lost: list[tuple[str, tuple[int, ...]]] = []
        self._weights = LoadedWeights(vllm_config, settings.config.identity.weights_digest)
        if not settings.has_persistent:
            self._namespace = self._own_namespace()
        self._snapshot = settings.snapshot_writer("scheduler")
        self._probed = Counters()
        self._prober = self._blueprint.prober(self._probed, self._resolve, self._publish)
        self._adapters = Adapters(self._prober.run, digest_cache())
        log_start(settings)
        self._prober.start()

    def _resolve(self) -> Namespace:
        """On the prober's thread."""
        try:
            weights = self._weights.digest(digest_cache())
        except KVStoreError:
            # Persistent tiers stay closed; slots work all the same.
            self._namespace = self._own_namespace()
            raise
        self._namespace = self.settings.namespace(weights)
        log.info("kvstore.namespace digest=%s", self._namespace.ns16)
        return self._namespace

    def _own_namespace(self) -> Namespace:
        """A namespace of this process alone: slots die with it, so any weights identity of its own will do."""
        return self.settings.namespace(f"private:{secrets.token_hex(16)}")

    # -- start ------------------------------------------------------------------------------------------------------

    def handshake(self, metadata: Mapping[Any, Any]) -> None:
        """Checks that every rank has the same store as this side.

        Raises:
            ConfigError: they differ.
        """
        workers = [m for m in metadata.values() if isinstance(m, HandshakeMetadata)]
        if not workers:
            return
        if any(worker.identity != self.settings.identity for worker in workers):
            raise ConfigError("KVStoreConnector: the ranks have different models, settings or layouts")
        slots = {worker.slots for worker in workers}
        if slots != {self._blueprint.slots}:
            raise ConfigError(
                f"KVStoreConnector: the ranks have {sorted(slots)} slots and the scheduler expects "
                f"{self._blueprint.slots}; set tiers.capacity explicitly, since its default depends on the machine"
            )

    # -- lookup -----------------------------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """A request arrived."""
        barred = adapt.bars_request(self._vllm_config, request)
        self._live[request.request_id] = LiveRequest(request, barred, self._adapters.of(request))

    def _of(self, request: Request) -> LiveRequest:
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            self.new_request(request)
            live = self._live[request.request_id]
        return live

    def _addresser_of(self, live: LiveRequest) -> Addresser:
        found = self._addressers.get(live.identity)
        if found is None:
            if self._namespace is None:
                raise ContractError("an address without a namespace")
            found = self._addressers[live.identity] = Addresser(self._namespace.digest, 0, live.identity)
            if len(self._addressers) > MAX_ADDRESSERS:
                self._addressers.popitem(last=False)
        return found

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: asked again every step while the request can not be placed."""
        live = self._of(request)
        live.local_tokens = local_tokens
        if request.skip_reading_prefix_cache or live.barred or live.is_refused or not self.settings.loads:
            return 0, False
        self._learn()
        if not self._is_known:
            return 0, False
        addresses = live.addresses(self._addresser_of(live), self._hashes_per_chunk)
        track = self.planner.track(request.request_id)
        match = self.planner.match(track, addresses, local_tokens, request.num_tokens - 1, monotonic())
        if match.tokens is None:
            if match.probe and not live.has_asked and track.wait_until is not None:
                live.has_asked = True
                first = addresses.index(match.probe[0])
                self._prober.ask(request.request_id, first, match.probe, track.wait_until)
            return None, False
        return match.tokens, match.tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """vLLM's ``update_state_after_alloc``: a positive count commits, and is the one that counts."""
        live = self._of(request)
        track = self.planner.track(request.request_id)
        self.planner.admit(track, request.num_tokens, live.local_tokens, tokens, self._unasked(live))
        if tokens <= 0 or not self._is_known:
            return
        addresses = live.addresses(self._addresser_of(live), self._hashes_per_chunk)
        self.planner.commit(track, addresses, live.local_tokens, tokens, blocks.get_block_ids()[0])
        self._prober.touch(addresses[: -(-(live.local_tokens + tokens) // self._chunk)])

    def _unasked(self, live: LiveRequest) -> str:
        """Why a request that was never looked up was not."""
        if live.barred:
            return live.barred
        return "not_open" if not self._is_known else "filtered"

    # -- step -------------------------------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: Any) -> PlanMetadata:
        """Offers what this step will have computed, and sends the step's orders."""
        self._learn()
        if self.settings.saves and self._is_known and not adapt.has_foreign_sync_loads(scheduler_output):
            for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
                self._offer(scheduler_output, request_id, scheduled)
        return self._metadata(self.planner.plan(monotonic()))

    def _offer(self, scheduler_output: Any, request_id: str, scheduled: int) -> None:
        live = self._live.get(request_id)
        if live is None or live.barred or not self._is_known:
            return
        request = live.request
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self.settings.config.save.decode:
            tokens = min(tokens, request.num_prompt_tokens)
        track = self.planner.track(request_id)
        full = tokens // self._chunk
        if full <= track.save_cursor and track.write_cursor == track.save_cursor:
            return
        addresses = live.addresses(self._addresser_of(live), self._hashes_per_chunk)
        self.planner.offer(
            track, addresses, tokens, adapt.block_table(scheduler_output, self.kv_cache_manager, request_id)
        )

    def fallback_plan(self) -> PlanMetadata:
        """After an exception: no orders, but every load that was promised and not sent is failed."""
        return self._metadata(self.planner.fallback_plan())

    def _metadata(self, plan: Plan) -> PlanMetadata:
        # A load whose ordering failed late is in the plan all the same, and ends there: once, not twice.
        ordered = {load[1] for load in plan.loads}
        lost, self._lost = tuple(item for item in self._lost if item[0] not in ordered), []
        block = self._blueprint.geometry.group.block_tokens
        for _request_id, blocks in lost:
            self.counters.add("failed_tokens_total", len(blocks) * block, reason="not_ordered")
        return PlanMetadata(plan, lost)

    def fail_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """After an exception in `allocated`: the promise is kept as a failed load, without the planner."""
        live = self._live[request.request_id]
        live.is_refused = True
        block = self._blueprint.geometry.group.block_tokens
        table = blocks.get_block_ids()[0][live.local_tokens // block : (live.local_tokens + tokens) // block]
        self._lost.append((request.request_id, tuple(table)))

    def output(self, connector_output: Any) -> None:
        """Takes the workers' reports."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            for report in metadata.reports:
                self.planner.absorb(report)

    def finished(self, request: Request) -> None:
        """A request ended, in whatever state."""
        self._live.pop(request.request_id, None)
        self.planner.close(request.request_id)

    def reset(self) -> None:
        """Forgets everything, and starts every persistent tier anew as ``identity.on_reset`` says. No I/O."""
        self.planner.reset()
        state, generation = self.planner.state, self.planner.state.generation
        drops = self.settings.config.identity.on_reset == "drop"
        dropped = [tier for tier in state.persistent if drops and state.spec.tiers[tier].is_writable]
        for tier in dropped:
            # Neither read nor written until the prober has published a new epoch.
            self.planner.set_epoch(tier, "")
        self._prober.drop(dropped, generation)
        self._private.update(set(state.persistent) - set(dropped))
        self._detach([tier for tier in self._private if state.epochs[tier]])

    def _detach(self, tiers: Iterable[int]) -> None:
        epochs = {tier: secrets.token_hex(8) for tier in tiers}
        for tier, epoch in epochs.items():
            self.planner.set_epoch(tier, epoch)
        self._prober.detach(epochs, self.planner.state.generation)

    def _opened(self, opened: Opened) -> None:
        if opened.tier in self._private:
            # The published epoch is of no use after a reset, also if the tier opens only now.
            if not self.planner.state.epochs[opened.tier]:
                self._detach([opened.tier])
        elif opened.generation == self.planner.state.generation:
            self.planner.set_epoch(opened.tier, opened.epoch)

    def _learn(self) -> None:
        if not self._is_known and self._namespace is not None:
            self._is_known = True
            self.planner.set_namespace(self._namespace.digest)
        if self._prober.has_events:
            take_events(self._prober.drain(), self.planner, self._opened)

    # -- for people -------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """On the prober's thread; reads numbers only."""
        if self._snapshot is None:
            return
        plan, record = self._blueprint, self._blueprint.geometry.slot_bytes
        ranks = len(plan.topology.shards)
        tiers = []
        for index, kind in enumerate(plan.types):
            row: dict[str, Any] = {"name": kind.name, "notes": []}
            if kind.volatile:
                ready = self.planner.state.slots.ready
                row |= {"capacity_bytes": plan.slots * record * ranks, "used_bytes": ready * record * ranks}
                row |= {"chunks": ready, "state": "open"}
            elif self.planner.state.readable >> index & 1:
                row["state"] = "open"
            else:
                row["state"] = "closed"
            tiers.append(row)
        counters = Counters()
        counters.merge(self.counters.snapshot())
        counters.merge(self._probed.snapshot())
        self._snapshot.publish({"engine": self._engine(), "tiers": tiers, "counters": counters.snapshot()})

    def _engine(self) -> dict[str, Any]:
        geometry = self._blueprint.geometry
        return {
            "model": self.settings.model,
            "namespace": self._namespace.ns16 if self._namespace is not None else None,
            "chunk_tokens": geometry.chunk_tokens,
            "block_tokens": geometry.group.block_tokens,
            "ranks": len(self._blueprint.topology.shards),
        }

    def close(self) -> None:
        """Stops the prober and publishes a last time."""
        self._prober.close()
        self._publish()
