"""What the disk's cases of the catalogue share: prompts, stores over one directory, and KV with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from made_up import Array, Pages, fake, tok
from stub_store import BLOCK, OUT, TABLE, StoreLab

from kvstore.engine import Store

PROMPT = tok(80, 1)
CHUNKS = 5


def save_seeded(lab: StoreLab, store: Store, tokens: Sequence[int], seed: int, salt: str = "") -> int:
    """Stores the KV of one seed; the chunks that the disk has."""
    _place(lab.pages(store), fake(tokens, seed), TABLE)
    stored = store.store(tokens, TABLE, salt=salt)
    return int(stored.tiers["disk"])


def has_seed(lab: StoreLab, store: Store, tokens: Sequence[int], seed: int, salt: str = "") -> bool:
    """Whether all of a prompt is retrieved with the KV of one seed."""
    pages = lab.pages(store)
    pages.wipe(OUT)
    count = store.retrieve(tokens, OUT, salt=salt)
    found = pages.read(OUT, 0, len(tokens))
    return count == len(tokens) and bool(np.array_equal(found, _joined(fake(tokens, seed))))


def _joined(values: Array) -> Array:
    return np.concatenate([values[:, 0], values[:, 1]], axis=-1)


def _place(pages: Pages, values: Array, table: Sequence[int]) -> None:
    positions = np.arange(values.shape[2])
    blocks = np.asarray(table)[positions // BLOCK]
    for view, layer in zip(pages.views, _joined(values), strict=True):
        view[blocks, :, positions % BLOCK] = layer


def record_of(root: Path, address: bytes) -> Path:
    """The file of an address."""
    (path,) = root.rglob(f"{address.hex()}.safetensors")
    return path
