"""Copies between paged KV memory and slots, against a plain one-thread ``copy_`` of the same bytes.

The paged memory is twice what is copied and the block ids are shuffled, as in an engine that has served for a while.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Row, interleave, main, run
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.tiers.slots import SlotArena
from kvstore.transfer.copies import PagedMemory

TOKENS = 4000
ROUNDS = 7
BAR = 0.8
BAR_64K = 0.75
"""The bar where one unit (a layer's page) is 64 KiB or less."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV: K and V fused in the last axis, as vLLM has it."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    block_tokens: int
    chunk_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.heads * self.block_tokens * 2 * self.head_size * self.dtype.itemsize

    def geometry(self) -> RecordGeometry:
        shape = (self.heads, self.block_tokens, 2 * self.head_size)
        dtype = str(self.dtype).removeprefix("torch.")
        layers = tuple(LayerGeometry(f"{i}", dtype, "HNC", shape, self.page_bytes) for i in range(self.layers))
        group = GroupGeometry(0, "full_attention", self.block_tokens, "LBHNC", layers)
        return RecordGeometry(group, self.chunk_tokens)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.layers}x{self.heads}x{self.head_size} {dtype}, block {self.block_tokens}, "
            f"chunk {self.chunk_tokens}, unit {self.page_bytes >> 10} KiB"
        )


SHAPES = (
    Shape(8, 4, 64, torch.float32, 32, 32),
    Shape(8, 4, 64, torch.float32, 32, 256),
    Shape(8, 4, 64, torch.float32, 128, 256),
    Shape(32, 8, 128, torch.bfloat16, 16, 256),
    Shape(32, 8, 128, torch.bfloat16, 32, 256),
)


def rows_of(shape: Shape) -> list[Row]:
    """Save and load rows of one shape. Memory: 4 times the KV of `TOKENS` tokens, at most 2.1 GB."""
    geometry = shape.geometry()
    chunks = TOKENS // shape.chunk_tokens
    blocks = chunks * geometry.blocks
    order = random.Random(7).sample(range(2 * blocks), blocks)
    tables = [order[i * geometry.blocks : (i + 1) * geometry.blocks] for i in range(chunks)]
    kv = torch.ones((shape.layers, 2 * blocks, shape.heads, shape.block_tokens, 2 * shape.head_size), dtype=shape.dtype)
    memory = PagedMemory.from_tensors(geometry, {f"{i}": kv[i] for i in range(shape.layers)})
    arena = SlotArena(geometry.slot_bytes, chunks)
    arena.wait_prefault(60)
    slots = [arena.array(i) for i in range(chunks)]
    source = torch.ones(geometry.payload_bytes * chunks, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def save() -> None:
        for table, slot in zip(tables, slots, strict=True):
            memory.save(table, slot)

    def load() -> None:
        for table, slot in zip(tables, slots, strict=True):
            memory.load(slot, 0, table)

    def plain() -> None:
        target.copy_(source)

    bar = BAR_64K if shape.page_bytes <= 64 << 10 else BAR
    found = []
    for name, copy in (("save", save), ("load", load)):
        ours, baseline = interleave(_rate(copy, source.nbytes), _rate(plain, source.nbytes), ROUNDS)
        ratio = ours / baseline
        found.append(Row(f"{name} {shape}", ours, "GB/s", baseline, ratio, bar, ratio >= bar))
    arena.close()
    return found


def _rate(copy: Callable[[], None], count: int) -> Callable[[], float]:
    """``copy`` as a measurement in GB/s."""

    def measure() -> float:
        begin = time.perf_counter()
        copy()
        return count / (time.perf_counter() - begin) / 1e9

    return measure


def build_rows() -> Sequence[Row]:
    """All rows. About 20 s."""
    torch.set_num_threads(1)
    return [row for shape in SHAPES for row in run(str(shape), lambda shape=shape: rows_of(shape))]


if __name__ == "__main__":
    sys.exit(main(build_rows))
