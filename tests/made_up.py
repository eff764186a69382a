"""Made-up tokens and KV that names its prompt: the value at a position depends on every token up to it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LAYERS, HEADS, DIM = 2, 2, 8
SENTINEL = 777.0
"""What paged memory holds before anything was written; `fake` has values in [1, 2) only."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def tok(n: int, seed: int) -> list[int]:
    """``n`` token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 32000, n)]


def fake(tokens: Sequence[int], seed: int = 0) -> Array:
    """KV of a prompt, float32 ``[layers 2, K/V 2, n, heads 2, dim 8]``."""
    running, seeds = blake2b(seed.to_bytes(8, "little"), digest_size=8), []
    for token in tokens:
        running.update(int(token).to_bytes(4, "little"))
        seeds.append(int.from_bytes(running.copy().digest(), "little"))
    per_token = LAYERS * 2 * HEADS * DIM
    mixed = np.array(seeds, np.uint64)[:, None] + np.arange(1, per_token + 1, dtype=np.uint64) * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    bits = (mixed >> np.uint64(41)).astype(np.uint32) | np.uint32(0x3F800000)
    return bits.view(np.float32).reshape(len(seeds), LAYERS, 2, HEADS, DIM).transpose(1, 2, 0, 3, 4)


class Pages:
    """Paged KV memory of one rank: for each layer a view ``[blocks, heads, block tokens, K then V]``.

    Args:
        views: one array a layer, float32; filled with the sentinel here.
        block_tokens: tokens per block.
        heads: which heads of `fake` these layers hold.
    """

    def __init__(self, views: Sequence[Array], block_tokens: int, heads: slice = slice(None)) -> None:
        self.views = views
        self.block_tokens = block_tokens
        self.heads = heads
        for view in views:
            view[...] = SENTINEL

    def _at(self, table: Sequence[int], first: int, last: int) -> tuple[Array, Array]:
        positions = np.arange(first, last)
        return np.asarray(table)[positions // self.block_tokens], positions % self.block_tokens

    def _expected(self, tokens: Sequence[int], first: int) -> Array:
        values = fake(tokens)[:, :, first:, self.heads]
        return np.concatenate([values[:, 0], values[:, 1]], axis=-1)

    def write(self, tokens: Sequence[int], table: Sequence[int], first: int = 0) -> None:
        """Computes the KV of ``tokens`` from position ``first`` on."""
        blocks, offsets = self._at(table, first, len(tokens))
        for view, values in zip(self.views, self._expected(tokens, first), strict=True):
            view[blocks, :, offsets] = values

    def read(self, table: Sequence[int], first: int, last: int) -> Array:
        """``[layers, tokens, heads, K then V]`` of the positions from ``first`` to ``last``."""
        blocks, offsets = self._at(table, first, last)
        return np.stack([view[blocks, :, offsets] for view in self.views])

    def holds(self, tokens: Sequence[int], table: Sequence[int], first: int = 0) -> bool:
        """Whether positions ``first`` to ``len(tokens)`` have exactly the KV of ``tokens``."""
        if first >= len(tokens):
            return True
        return bool(np.array_equal(self.read(table, first, len(tokens)), self._expected(tokens, first)))

    def is_untouched(self, table: Sequence[int], first: int, last: int) -> bool:
        """Whether positions ``first`` to ``last`` still have the sentinel everywhere."""
        return bool((self.read(table, first, last) == SENTINEL).all())

    def wipe(self, blocks: Sequence[int]) -> None:
        """Puts the sentinel into blocks."""
        for view in self.views:
            view[list(blocks)] = SENTINEL
