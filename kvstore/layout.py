"""Geometry: how the engine's paged KV memory and a record's payload are laid out.

Invariant: nothing is inferred from a tensor's shape. Axis order and dtype are declared by who owns the memory, and
everything that changes the meaning of a payload's bytes is in `GroupGeometry.identity`, hence in the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import LayoutMismatch
from kvstore.units import PAGE, align_up

HEADER_BYTES = PAGE
"""A record's header is one page, so that its payload is aligned for direct I/O."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's share of a block on one rank.

    ``shape`` are the axes of one block in the declared logical order of ``axes`` (for vLLM: heads, tokens, content);
    ``page_bytes`` is their product in bytes.
    """

    name: str
    dtype: str
    axes: str
    shape: tuple[int, ...]
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Layers that share one block table (vLLM's KV cache group), on one rank.

    Attributes:
        group_id: index of the group in the engine.
        kind: ``full_attention`` or ``mla``.
        block_tokens: tokens per block.
        layout: declared name of the physical layout of the pages (for vLLM: ``LBHNC`` and so on).
        layers: in the order in which a payload has them.
        packing: name of what packs the bytes inside a page, where something does (CPU ISA), else ``""``.
        hash_tokens: tokens per engine block hash; equals ``block_tokens`` while one group is served.
        alignment_tokens: a usable prefix is a multiple of this.
        window_tokens: tokens that a windowed kind looks back, None for none.
        prefix_cacheable: whether a prefix of the group may be reused.
        draft: whether these are layers of a draft model.
    """

    group_id: int
    kind: str
    block_tokens: int
    layout: str
    layers: tuple[LayerGeometry, ...]
    packing: str = ""
    hash_tokens: int = 0
    alignment_tokens: int = 0
    window_tokens: int | None = None
    prefix_cacheable: bool = True
    draft: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the pages of all layers."""
        return sum(layer.page_bytes for layer in self.layers)

    def identity(self) -> Mapping[str, Any]:
        """The fields for the namespace."""
        return {
            "group": self.group_id,
            "kind": self.kind,
            "block_tokens": self.block_tokens,
            "layout": self.layout,
            "packing": self.packing,
            "window_tokens": self.window_tokens,
            "draft": self.draft,
            "layers": [[x.name, x.dtype, x.axes, list(x.shape)] for x in self.layers],
        }


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one rank holds; ranks with equal KV are the same shard."""

    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """Injective name for directories and keys."""
        return f"s{self.index}of{self.count}"


@dataclass(frozen=True, slots=True)
class RecordGeometry:
    """One record: a chunk of one group on one shard, as bytes ``[header page, payload, pad]``.

    The payload has the layers one after the other, and in each the chunk's blocks one after the other.
    """

    group: GroupGeometry
    chunk_tokens: int
    shard: Shard = field(default_factory=Shard)

    def __post_init__(self) -> None:
        block = self.group.block_tokens
        if self.chunk_tokens < block or self.chunk_tokens % block:
            low = max(block, self.chunk_tokens // block * block)
            raise LayoutMismatch(
                f"chunk_tokens: {self.chunk_tokens} is not a multiple of the engine's block of {block} tokens; "
                f"the nearest good values are {low} and {low + block}"
            )

    @property
    def blocks(self) -> int:
        """Blocks per chunk."""
        return self.chunk_tokens // self.group.block_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of KV in a record."""
        return self.group.block_bytes * self.blocks

    @property
    def slot_bytes(self) -> int:
        """Bytes of the whole record, a multiple of 4096; also its file's and its slot's size."""
        return HEADER_BYTES + align_up(self.payload_bytes)

    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer in the payload, in bytes."""
        offsets, at = [], 0
        for layer in self.group.layers:
            offsets.append(at)
            at += layer.page_bytes * self.blocks
        return tuple(offsets)
