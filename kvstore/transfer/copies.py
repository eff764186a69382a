"""Copies between the engine's paged KV memory and slots, on the CPU, by declared strides.

Invariant: a copy touches the bytes of the named blocks and the slot's payload of those blocks, and no others; it
moves bytes and never interprets them. Nothing is inferred from a shape: axes, strides and dtype are compared with the
declared geometry when the memory is registered.

Payload order: layer after layer, in each the chunk's blocks, in each the page's bytes in the **physical** order of the
memory (axes by falling stride). A page that is one run of bytes is therefore copied as it lies, whatever its logical
axis order. Two memories understand each other's payloads if their `PagedMemory.orders` are equal, which the layout
name in the namespace stands for.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import ContractError, LayoutMismatch
from kvstore.layout import HEADER_BYTES, LayerGeometry, RecordGeometry

if TYPE_CHECKING:
    import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_WORDS: Mapping[int, np.dtype[Any]] = {
    8: np.dtype(np.uint64),
    4: np.dtype(np.uint32),
    2: np.dtype(np.uint16),
    1: np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where one layer's blocks lie.

    Attributes:
        address: address of the first byte of block 0.
        num_blocks: blocks in the memory.
        block_stride_bytes: bytes from one block to the next.
        shape: axes of one block, in the declared order.
        strides_bytes: byte stride of each of these axes.
        itemsize: bytes per element.
    """

    address: int
    num_blocks: int
    block_stride_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    itemsize: int

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the axes longer than 1, by falling stride: the order of a page's bytes in a payload."""
        axes = [axis for axis, size in enumerate(self.shape) if size > 1]
        return tuple(sorted(axes, key=lambda axis: -self.strides_bytes[axis]))

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(length, byte stride) of a page's axes by falling stride, adjacent ones merged; the last is bytes.

        The last entry always has stride 1: a run of contiguous bytes.
        """
        merged = [(self.itemsize, 1)]
        for axis in reversed(self.order):
            size, stride = self.shape[axis], self.strides_bytes[axis]
            inner_size, inner_stride = merged[0]
            if stride == inner_size * inner_stride:
                merged[0] = (size * inner_size, inner_stride)
            else:
                merged.insert(0, (size, stride))
        return tuple(merged)

    def extent(self) -> int:
        """Bytes from the first byte of block 0 to behind the last byte of the last block."""
        inside = sum((size - 1) * stride for size, stride in self.runs())
        return (self.num_blocks - 1) * self.block_stride_bytes + inside + 1

    def overlaps_itself(self) -> bool:
        """Whether two elements may share a byte (expanded or overlapping strides) or lie backwards."""
        return _overlap([*self.runs(), (self.num_blocks, self.block_stride_bytes)])


class _Span:
    """Layers of equal form at a constant distance, copied together.

    ``pages`` is a view of the engine's memory, ``[layers, blocks, *runs]`` in words; a slot's payload is viewed the
    same way.
    """

    __slots__ = ("offset", "pages", "payload_shape", "word")

    def __init__(self, layers: Sequence[LayerMemory], offset: int, chunk_blocks: int) -> None:
        first = layers[0]
        step = layers[1].address - first.address if len(layers) > 1 else 0
        *outer, (run, _) = first.runs()
        strides = [step, first.block_stride_bytes, *(stride for _, stride in outer)]
        width = math.gcd(8, run, offset, first.address, *(abs(stride) for stride in strides))
        self.word = _WORDS[width]
        shape = (len(layers), first.num_blocks, *(size for size, _ in outer), run // width)
        low = min(layer.address for layer in layers)
        region = (ctypes.c_uint8 * (max(x.address + x.extent() for x in layers) - low)).from_address(low)
        self.pages: np.ndarray[Any, Any] = np.ndarray(
            shape, self.word, buffer=memoryview(region), offset=first.address - low, strides=(*strides, width)
        )
        self.payload_shape = (len(layers), chunk_blocks, *shape[2:])
        self.offset = offset

    def payload(self, slot: Bytes) -> np.ndarray[Any, Any]:
        """This span's part of the slot's payload: ``[layers, chunk blocks, *runs]`` in words."""
        return np.ndarray(self.payload_shape, self.word, buffer=slot, offset=self.offset)


class PagedMemory:
    """The paged KV memory of one group on one rank, on the CPU.

    `save` and `load` may be called from any thread; the caller orders them against the computation that writes or
    reads the blocks, and against other users of the slot. They release the GIL and start no threads. Cost: about
    4 us per run of consecutive block ids, and the copy.

    Attributes:
        geometry: what a slot holds.
        num_blocks: blocks in the memory.
        orders: for each layer the physical order of its axes (`LayerMemory.order`).
    """

    def __init__(
        self, geometry: RecordGeometry, layers: Sequence[LayerMemory], *, owners: Sequence[object] = ()
    ) -> None:
        """Registers memory; ``owners`` are kept so that it stays alive.

        Raises:
            LayoutMismatch: the memory is not what the geometry declares; names the layer.
        """
        declared = geometry.group.layers
        if len(layers) != len(declared) or not layers:
            raise LayoutMismatch(f"{len(layers)} layers of memory for {len(declared)} declared layers")
        for layer, memory in zip(declared, layers, strict=True):
            _check(layer, memory)
        if len({memory.num_blocks for memory in layers}) > 1:
            raise LayoutMismatch("layers of one group must have the same number of blocks")
        if len({memory.address for memory in layers}) != len(layers):
            raise LayoutMismatch("two layers of one group share their memory")
        self.geometry = geometry
        self.num_blocks = layers[0].num_blocks
        self.orders = tuple(memory.order for memory in layers)
        self._owners = tuple(owners)
        offsets = [HEADER_BYTES + offset for offset in geometry.layer_offsets()]
        self._spans = []
        for start, stop in _equal_steps(layers):
            if _overlap(_axes_across(layers[start:stop])):
                raise LayoutMismatch(f"layers {declared[start].name} to {declared[stop - 1].name}: memory overlaps")
            self._spans.append(_Span(layers[start:stop], offsets[start], geometry.blocks))

    @classmethod
    def from_tensors(cls, geometry: RecordGeometry, tensors: Mapping[str, torch.Tensor]) -> PagedMemory:
        """Registers tensors by layer name, each viewed as ``[blocks, *declared shape]`` with any strides.

        Raises:
            LayoutMismatch: a missing or undeclared layer, another shape or dtype, or memory not on the CPU.
        """
        _check_names(geometry, tensors)
        layers = []
        for layer in geometry.group.layers:
            tensor = tensors[layer.name]
            if tensor.device.type != "cpu":
                raise LayoutMismatch(
                    f"layer {layer.name}: memory on {tensor.device.type}; device copies come with a later release, "
                    f"this one serves KV on the CPU"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype != layer.dtype:
                raise LayoutMismatch(f"layer {layer.name}: memory of {dtype}, declared {layer.dtype}")
            item = tensor.element_size()
            strides = [stride * item for stride in tensor.stride()]
            layers.append(_layer_memory(layer, tensor.data_ptr(), tuple(tensor.shape), strides, item))
        return cls(geometry, layers, owners=tuple(tensors.values()))

    @classmethod
    def from_arrays(cls, geometry: RecordGeometry, arrays: Mapping[str, np.ndarray[Any, Any]]) -> PagedMemory:
        """Registers numpy arrays, as `from_tensors`. A dtype that numpy lacks is given as unsigned of its width."""
        _check_names(geometry, arrays)
        layers = []
        for layer in geometry.group.layers:
            array = arrays[layer.name]
            if array.dtype.name != layer.dtype and (_is_numpy(layer.dtype) or array.dtype.kind != "u"):
                raise LayoutMismatch(f"layer {layer.name}: memory of {array.dtype.name}, declared {layer.dtype}")
            if not array.flags.writeable:
                raise LayoutMismatch(f"layer {layer.name}: memory is read-only")
            layers.append(_layer_memory(layer, array.ctypes.data, array.shape, array.strides, array.itemsize))
        return cls(geometry, layers, owners=tuple(arrays.values()))

    def save(self, block_ids: Sequence[int], slot: Bytes, first_block: int = 0) -> None:
        """Copies blocks into the slot's payload, from its block ``first_block`` on.

        Args:
            block_ids: the engine's blocks, in the chunk's order.
            slot: uint8 ``[slot_bytes]``, contiguous; its header and pad are left alone.
            first_block: place of the first of them within the chunk.

        Raises:
            ContractError: a block or place out of range, or not a slot; before any byte moves.
        """
        self._copy(block_ids, slot, first_block, into_slot=True)

    def load(self, slot: Bytes, first_block: int, block_ids: Sequence[int]) -> None:
        """Copies the slot's payload, from its block ``first_block`` on, into blocks. The reverse of `save`."""
        self._copy(block_ids, slot, first_block, into_slot=False)

    def _copy(self, block_ids: Sequence[int], slot: Bytes, first_block: int, *, into_slot: bool) -> None:
        self._check_call(block_ids, slot, first_block)
        runs = list(_consecutive(block_ids))
        for span in self._spans:
            payload = span.payload(slot)
            for block, at, count in runs:
                here = payload[:, first_block + at : first_block + at + count]
                there = span.pages[:, block : block + count]
                if into_slot:
                    np.copyto(here, there)
                else:
                    np.copyto(there, here)

    def _check_call(self, block_ids: Sequence[int], slot: Bytes, first_block: int) -> None:
        if slot.dtype != np.uint8 or slot.shape != (self.geometry.slot_bytes,) or not slot.flags.c_contiguous:
            raise ContractError(f"not a slot of {self.geometry.slot_bytes} bytes: {slot.dtype} {slot.shape}")
        if first_block < 0 or first_block + len(block_ids) > self.geometry.blocks:
            raise ContractError(f"blocks {first_block}+{len(block_ids)} of a chunk of {self.geometry.blocks}")
        if len(block_ids) and (min(block_ids) < 0 or max(block_ids) >= self.num_blocks):
            raise ContractError(f"block ids {list(block_ids)} of a memory of {self.num_blocks} blocks")


def _check_names(geometry: RecordGeometry, given: Mapping[str, object]) -> None:
    declared = {layer.name for layer in geometry.group.layers}
    if missing := sorted(declared - given.keys()):
        raise LayoutMismatch(f"layer {missing[0]}: declared, but no memory was registered for it")
    if unknown := sorted(given.keys() - declared):
        raise LayoutMismatch(f"layer {unknown[0]}: memory was registered, but the geometry does not declare it")


def _layer_memory(
    layer: LayerGeometry, address: int, shape: Sequence[int], strides: Sequence[int], item: int
) -> LayerMemory:
    if len(shape) != len(layer.shape) + 1 or tuple(shape[1:]) != layer.shape or shape[0] < 1:
        raise LayoutMismatch(
            f"layer {layer.name}: memory of shape {tuple(shape)}, declared [blocks, {layer.axes} = {layer.shape}]"
        )
    return LayerMemory(address, shape[0], strides[0], tuple(shape[1:]), tuple(strides[1:]), item)


def _check(layer: LayerGeometry, memory: LayerMemory) -> None:
    if memory.shape != layer.shape or len(memory.strides_bytes) != len(layer.shape):
        raise LayoutMismatch(f"layer {layer.name}: block of shape {memory.shape}, declared {layer.axes} {layer.shape}")
    if math.prod(memory.shape) * memory.itemsize != layer.page_bytes:
        raise LayoutMismatch(
            f"layer {layer.name}: page of {math.prod(memory.shape)} x {memory.itemsize} bytes, "
            f"declared {layer.page_bytes}"
        )
    if memory.overlaps_itself():
        raise LayoutMismatch(f"layer {layer.name}: strides {memory.strides_bytes} overlap or run backwards")


def _is_numpy(dtype: str) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


def _equal_steps(layers: Sequence[LayerMemory]) -> Iterator[tuple[int, int]]:
    """(start, stop) of maximal rows of layers of equal form whose addresses have a constant difference."""
    start = 0
    while start < len(layers):
        stop = start + 1
        while stop < len(layers) and _same_form(layers[start], layers[stop]):
            step = layers[start + 1].address - layers[start].address
            if layers[stop].address - layers[stop - 1].address != step:
                break
            stop += 1
        yield start, stop
        start = stop


def _axes_across(layers: Sequence[LayerMemory]) -> list[tuple[int, int]]:
    """(length, byte stride) of all axes of layers of equal form at a constant distance."""
    first, last = layers[0], layers[-1]
    step = abs(last.address - first.address) // max(1, len(layers) - 1)
    return [*first.runs(), (first.num_blocks, first.block_stride_bytes), (len(layers), step)]


def _overlap(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether two points of a lattice of (length, stride) may coincide; sufficient, not necessary, to be apart."""
    reach = 0
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _same_form(one: LayerMemory, other: LayerMemory) -> bool:
    return (one.runs(), one.block_stride_bytes) == (other.runs(), other.block_stride_bytes)


def _consecutive(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first block id, index of it, length) of each row of consecutive ids."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield block_ids[start], start, index - start
            start = index
