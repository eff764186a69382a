"""Real vLLM engines for tests: a tiny Llama with real random weights, prefix caching off, one core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demo.child import EngineProcess
from demo.scenario import engine_environment
from kvstore.snapshots import read_all
from kvstore.testing.models import make_model

BLOCK = 32
VOCABULARY = 512


def tiny_model(folder: Path) -> Path:
    """2 layers, hidden 64, 2 KV heads of 32, float32."""
    return make_model(
        folder, layers=2, hidden=64, heads=2, kv_heads=2, vocab=VOCABULARY, seed=11, dtype="float32", max_len=2048
    )


def tok(count: int, seed: int) -> list[int]:
    """``count`` token ids that depend on nothing but the seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


class Engine(EngineProcess):
    """One engine; ``settings`` is the store's YAML text, None for an engine without the connector."""

    def __init__(
        self, folder: Path, model: Path, settings: str | None, name: str, *, blocks: int | None = None
    ) -> None:
        self.folder = folder
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        if blocks is not None:
            arguments["num_gpu_blocks_override"] = blocks
        if settings is not None:
            yaml = folder / f"{name}.yaml"
            yaml.write_text(settings)
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": str(yaml)},
            }
        super().__init__(arguments, engine_environment(os.environ), folder / f"{name}.log", module="tests.engine_child")

    def start_batch(self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None) -> None:
        """Sends a batch without waiting for it."""
        self.send({"verb": "batch", "prompts": [list(p) for p in prompts], "tokens": tokens, "logprobs": logprobs})

    def batch(self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None) -> list[dict[str, Any]]:
        """Runs a batch of greedy requests."""
        self.start_batch(prompts, tokens, logprobs)
        outputs: list[dict[str, Any]] = self.receive(180.0)["outputs"]
        return outputs


def settings(folder: Path, *, cpu: str = "64MiB", disk: str | None = "1GiB", extra: str = "") -> str:
    """A store below ``folder``."""
    tiers = [f"  - {{type: cpu, capacity: {cpu}}}"] if cpu != "0" else []
    if disk is not None:
        tiers.append(f'  - {{type: disk, path: "{folder / "store"}", capacity: {disk}}}')
    stats = f'stats: {{snapshot_dir: "{folder / "stats"}", every: 50ms}}'
    return "\n".join([f"chunk_tokens: {BLOCK}", "tiers:", *tiers, stats, extra, ""])


def counter(folder: Path, name: str, *, tier: str | None = None) -> float:
    """A counter of the newest engine that published below ``folder``."""
    return read_all(folder / "stats")[0].value(name, tier=tier)
