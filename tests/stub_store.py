"""The library's store over made-up paged memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_up import DIM, HEADS, LAYERS, Pages

from kvstore.config import parse
from kvstore.engine import Store
from kvstore.keys import Namespace
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.tiers.base import tier_types
from kvstore.transfer.copies import PagedMemory

BLOCK = 16
RECORD = 8192
NAMESPACE = Namespace({"model": "made-up", "dtype": "float32"})
TABLE = [7, 3, 11, 2, 19, 5, 23, 13]
"""Where prompts are stored from."""
OUT = [40, 33, 52, 47, 36, 61, 58, 44]
"""Where they are loaded to."""


def geometry(chunk: int = BLOCK) -> RecordGeometry:
    """Records of `made_up` KV: 4096 bytes of payload where the chunk is one block."""
    page = HEADS * BLOCK * 2 * DIM * 4
    layers = tuple(LayerGeometry(f"layer.{i}", "float32", "HNC", (HEADS, BLOCK, 2 * DIM), page) for i in range(LAYERS))
    return RecordGeometry(GroupGeometry(0, "full_attention", BLOCK, "LBHNC", layers), chunk)


class StoreLab:
    """Stores on one directory, each over its own paged memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pages: dict[Store, Pages] = {}

    def store(self, *, cpu: int = 64, disk: int = 512, namespace: Namespace = NAMESPACE, chunk: int = BLOCK) -> Store:
        """A store with these capacities in records; 0 for no tier."""
        tiers = [f"{{type: cpu, capacity: {cpu * RECORD}B}}"] if cpu else []
        if disk:
            tiers.append(f"{{type: disk, path: {self.root}, capacity: {disk * RECORD}B, min_free: 0%}}")
        text = (
            f"chunk_tokens: {chunk}\ntiers: [{', '.join(tiers)}]\nlimits: {{probe_timeout: 30s, load_timeout: 30s}}\n"
            f"stats: {{snapshot_dir: 'off'}}\n"
        )
        arrays = {f"layer.{i}": np.zeros((64, HEADS, BLOCK, 2 * DIM), np.float32) for i in range(LAYERS)}
        pages = Pages(list(arrays.values()), BLOCK)
        memory = PagedMemory.from_arrays(geometry(), arrays)
        store = Store(parse(text, tier_types()), namespace, geometry(), memory)
        self._pages[store] = pages
        return store

    def pages(self, store: Store) -> Pages:
        """The paged memory of a store."""
        return self._pages[store]

    def save(self, store: Store, tokens: Sequence[int], **identity: Any) -> Any:
        """Computes a prompt into `TABLE` and stores it."""
        self._pages[store].write(tokens, TABLE)
        return store.store(tokens, TABLE, **identity)

    def loaded(self, store: Store, tokens: Sequence[int], **identity: Any) -> int:
        """Tokens retrieved into `OUT`, which hold exactly those and nothing more."""
        pages = self._pages[store]
        pages.wipe(OUT)
        count = store.retrieve(tokens, OUT, **identity)
        assert pages.holds(tokens[:count], OUT)
        assert pages.is_untouched(OUT, count, len(OUT) * BLOCK)
        return count

    def files(self) -> list[Path]:
        """Every record on disk."""
        return sorted(self.root.rglob("*.safetensors"))

    def close(self) -> None:
        """Closes every store."""
        for store in self._pages:
            store.close()
