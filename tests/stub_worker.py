"""One rank of a stub engine: a worker's connector over paged memory, stepped in the order of vLLM 0.32.

The forward is made up: it asserts that everything below it is in the blocks already, so a step on wrong bytes fails at
once, and writes `made_up.fake`. Blocks that no request holds are overwritten first, so that a late read or write of
the connector shows too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from made_up import HEADS, Pages
from stub_setup import LAYOUT, Setup
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True)
class Work:
    """What one step asks of a worker: ``forwards`` are (tokens, first position to compute, block table)."""

    metadata: Any
    forwards: tuple[tuple[list[int], int, list[int]], ...]
    freed: tuple[int, ...]
    finished: frozenset[str]
    has_sync_loads: bool = False


class StubWorker:
    """One rank: its connector and its paged memory."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.connector = setup.connector(KVConnectorRole.WORKER, rank)
        kv, spec = setup.kv_cache_config(), setup.spec()
        raw = torch.zeros(kv.kv_cache_tensors[0].size, dtype=torch.int8)
        views = create_kv_cache_views(raw, spec, setup.blocks, KVCacheLayout[LAYOUT], kv.kv_cache_tensors[0])
        share = HEADS // setup.ranks
        self.pages = Pages([view.numpy() for view in views], setup.block, slice(rank * share, (rank + 1) * share))
        self.connector.register_kv_caches(dict(zip(kv.kv_cache_groups[0].layer_names, views, strict=True)))
        self.invalid: list[set[int]] = []
        self.finished: list[str] = []

    def handshake(self) -> Any:
        """For the scheduler."""
        return self.connector.get_handshake_metadata()

    def step(self, work: Work) -> KVConnectorOutput:
        """One step in vLLM's order; the forward comes first, since 0.30."""
        connector, output = self.connector, KVConnectorOutput()
        connector.handle_preemptions(work.metadata)
        connector.bind_connector_metadata(work.metadata)
        context = SimpleNamespace(attn_metadata={} if work.forwards else None)
        if work.has_sync_loads:
            connector.start_load_kv(context)
        self.pages.wipe(work.freed)
        for tokens, first, table in work.forwards:
            assert self.pages.holds(tokens[:first], table), f"a forward on wrong bytes below {first}"
            self.pages.write(tokens, table, first)
        if not work.has_sync_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(set(work.finished))
        output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        self.finished += sorted(output.finished_recving or ())
        if output.invalid_block_ids:
            self.invalid.append(set(output.invalid_block_ids))
        return output

    def close(self) -> None:
        """vLLM's shutdown."""
        self.connector.shutdown()
