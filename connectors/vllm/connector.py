"""`KVStoreConnector`: vLLM's connector interface, passed on to the scheduler's or the worker's side.

This is the boundary: an exception inside stops here, is logged and counted, and turns into a fallback that is safe
for the engine (no hit, a failed load, an empty plan). Only start-up errors pass, since they are meant for the user.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from connectors.vllm import adapt
from connectors.vllm.scheduler_side import SchedulerSide
from connectors.vllm.settings import read_settings
from connectors.vllm.wire import PlanMetadata
from connectors.vllm.worker_side import WorkerSide
from kvstore.errors import ContractError
from kvstore.messages import Plan

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvstore")


class KVStoreConnector(KVConnectorBase_V1):
    """Saves chunks after prefill and loads prefix hits before the forward pass that needs them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, settings, adapt.hash_block_tokens(kv_cache_config))
        else:
            self._worker = WorkerSide(vllm_config, settings, adapt.worker_rank())

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's side, in the scheduler's process."""
        if self._scheduler is None:
            raise ContractError("this is a worker's connector")
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's side, in a worker's process."""
        if self._worker is None:
            raise ContractError("this is the scheduler's connector")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is only a later miss."""
        return False

    def _stopped(self, hook: str) -> None:
        """Logs and counts an exception that was stopped in ``hook``."""
        log.exception("kvstore.hook_failed hook=%s", hook)
        side = self._scheduler or self._worker
        if side is not None:
            side.counters.add("hook_errors_total", reason=hook)

    # -- scheduler --------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.kv_cache_manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.handshake(metadata)

    def on_new_request(self, request: Request) -> None:
        try:
            self.scheduler_side.new_request(request)
        except Exception:
            self._stopped("on_new_request")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        try:
            return self.scheduler_side.matched_tokens(request, num_computed_tokens)
        except Exception:
            self._stopped("get_num_new_matched_tokens")
            return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        try:
            self.scheduler_side.allocated(request, blocks, num_external_tokens)
        except Exception:
            self._stopped("update_state_after_alloc")
            self._fail_load(request, blocks, num_external_tokens)

    def _fail_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        try:
            if num_external_tokens > 0:
                self.scheduler_side.fail_load(request, blocks, num_external_tokens)
        except Exception:
            self._stopped("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        try:
            return self.scheduler_side.build_plan(scheduler_output)
        except Exception:
            self._stopped("build_connector_meta")
        try:
            return self.scheduler_side.fallback_plan()
        except Exception:
            self._stopped("build_connector_meta")
            return PlanMetadata(Plan(-1, 0))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        try:
            self.scheduler_side.output(connector_output)
        except Exception:
            self._stopped("update_connector_output")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        try:
            self.scheduler_side.finished(request)
        except Exception:
            self._stopped("request_finished")
        return False, None

    def reset_cache(self) -> bool | None:
        try:
            self.scheduler_side.reset()
        except Exception:
            self._stopped("reset_cache")
            return False
        return True

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        try:
            self.worker_side.begin(kv_connector_metadata)
        except Exception:
            self._worker_stopped("handle_preemptions")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        try:
            self.worker_side.begin(self._get_connector_metadata())
            self.worker_side.start_loads(forward_context)
        except Exception:
            self._worker_stopped("start_load_kv", self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """All layers are saved at once in `wait_for_save`."""

    def wait_for_save(self) -> None:
        try:
            self.worker_side.save()
        except Exception:
            self._worker_stopped("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        try:
            return None, self.worker_side.finished() or None
        except Exception:
            self._worker_stopped("get_finished")
        try:
            return None, self.worker_side.finished() or None
        except Exception:
            # What ended stays with the worker's side until the next step.
            self._stopped("get_finished")
            return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        try:
            return self.worker_side.invalid_blocks()
        except Exception:
            self._stopped("get_block_ids_with_load_errors")
        # Not guarded a second time: rather an engine that ends than one that computes on blocks that were not loaded.
        return self.worker_side.invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        try:
            return self.worker_side.report()
        except Exception:
            self._stopped("build_connector_worker_meta")
            return None

    def _worker_stopped(self, hook: str, metadata: KVConnectorMetadata | None = None) -> None:
        """Also answers as failed what was not done yet, of ``metadata`` too, which no later hook would take."""
        self._stopped(hook)
        try:
            self.worker_side.refuse(metadata)
        except Exception:
            self._stopped(hook)

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            try:
                if side is not None:
                    side.close()
            except Exception:
                self._stopped("shutdown")
