"""What a stub engine is made from: vLLM's real configuration and specs over a tiny model folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from made_up import DIM, HEADS, LAYERS
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

from connectors.vllm import adapt, plugin
from kvstore.testing.models import make_model

LAYOUT = "LBHNC"
RECORD = 8192
"""Bytes of a record of 16 tokens, as slot and as file."""


@dataclass(frozen=True)
class Setup:
    """One engine: ``config`` is the YAML file, None for no ``config`` key at all."""

    model: Path
    config: Path | None
    block: int = 16
    blocks: int = 512
    ranks: int = 1
    caching: bool = False
    role: str = "kv_both"
    policy: str = "recompute"
    extra: dict[str, Any] = field(default_factory=dict)

    def vllm_config(self) -> VllmConfig:
        """A `VllmConfig` as vLLM makes it, with the block and ranks of the test."""
        config = copy.copy(_base_config(self.model))
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.block_size = self.block
        config.cache_config.num_gpu_blocks = self.blocks
        config.cache_config.enable_prefix_caching = self.caching
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.tensor_parallel_size = self.ranks
        extra = {**({} if self.config is None else {"config": str(self.config)}), **self.extra}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVStoreConnector", kv_role=self.role, kv_load_failure_policy=self.policy,
            kv_connector_extra_config=extra,
        )  # fmt: skip
        return config

    def spec(self) -> FullAttentionSpec:
        """The layers of one rank."""
        return FullAttentionSpec(
            block_size=self.block, num_kv_heads=HEADS // self.ranks, head_size=DIM, dtype=torch.float32
        )

    def kv_cache_config(self, spec: KVCacheSpec | None = None) -> KVCacheConfig:
        """One group of all layers."""
        spec = spec or self.spec()
        names, page = [f"layer.{i}" for i in range(LAYERS)], spec.page_size_bytes
        size = page * self.blocks * LAYERS
        return KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[KVCacheTensor(size, names, page * self.blocks, page)],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            kv_cache_layout=LAYOUT,
            hash_block_size=self.block,
        )

    def connector(self, role: KVConnectorRole, rank: int = 0, kv: KVCacheConfig | None = None) -> Any:
        """A connector, made by vLLM's own factory."""
        plugin.register()
        asked, adapt.worker_rank = adapt.worker_rank, lambda: rank
        try:
            return KVConnectorFactory.create_connector(self.vllm_config(), role, kv or self.kv_cache_config())
        finally:
            adapt.worker_rank = asked


_CONFIGS: dict[Path, VllmConfig] = {}


def _base_config(model: Path) -> VllmConfig:
    if model not in _CONFIGS:
        arguments = EngineArgs(
            model=str(model), skip_tokenizer_init=True, block_size=32, max_model_len=8192,
            max_num_batched_tokens=8192, max_num_seqs=64, enable_prefix_caching=False,
            disable_hybrid_kv_cache_manager=True,
        )  # fmt: skip
        _CONFIGS[model] = arguments.create_engine_config()
    return _CONFIGS[model]


def write_model(folder: Path) -> Path:
    """A model folder whose KV heads are those of `made_up`."""
    return make_model(
        folder, layers=LAYERS, hidden=4 * DIM, heads=4, kv_heads=HEADS, vocab=512, seed=1, dtype="float32",
        tokenizer=False,
    )  # fmt: skip
