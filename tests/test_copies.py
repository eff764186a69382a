"""Copies between paged KV and slots: the declared bytes move, and no others."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ContractError
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.transfer.copies import LayerMemory, PagedMemory

SENTINEL = 0xA5
ITEMS = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


def make_geometry(shape, dtype="float32", layers=1, blocks=1, block_tokens=16, layout="LBHNC", axes="HNC"):
    page = int(np.prod(shape)) * ITEMS[dtype]
    declared = tuple(LayerGeometry(f"layer.{i}", dtype, axes, tuple(shape), page) for i in range(layers))
    group = GroupGeometry(0, "full_attention", block_tokens, layout, declared)
    return RecordGeometry(group, block_tokens * blocks)


@dataclass
class Pool:
    """Paged memory made from a physical order of axes, with gaps; knows its layout without asking the code."""

    geometry: RecordGeometry
    bytes: np.ndarray
    views: list[np.ndarray]
    order: tuple[int, ...]
    num_blocks: int

    def memory(self) -> PagedMemory:
        item = self.views[0].itemsize
        layers = [
            LayerMemory(view.ctypes.data, view.shape[0], view.strides[0], view.shape[1:], view.strides[1:], item)
            for view in self.views
        ]
        return PagedMemory(self.geometry, layers, owners=(self.bytes,))

    def page_bytes(self, layer: int, block: int) -> bytes:
        return self.views[layer][block].transpose(self.order).tobytes()

    def put_page(self, layer: int, block: int, content: bytes) -> None:
        page = self.views[layer][block].transpose(self.order)
        page[...] = np.frombuffer(content, page.dtype).reshape(page.shape)


@st.composite
def pools(draw) -> Pool:
    """Any physical order of (layers, blocks, axes of a page), with gaps anywhere and any base alignment."""
    dtype = draw(st.sampled_from(sorted(ITEMS)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    layers, num_blocks, chunk_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    geometry = make_geometry(shape, dtype, layers, chunk_blocks)
    item = ITEMS[dtype]
    sizes = [layers, num_blocks, *shape]
    physical = draw(st.permutations(range(len(sizes))))
    strides, reach = [0] * len(sizes), item
    for axis in reversed(physical):
        strides[axis] = reach + item * draw(st.sampled_from([0, 0, 0, 1, 3]))
        reach = strides[axis] * sizes[axis]
    base = item * draw(st.integers(0, 9))
    memory = np.zeros(base + reach + 16, np.uint8)
    word = np.dtype(f"u{item}")
    views = []
    for layer in draw(st.sampled_from([range(layers), range(layers)[::-1]])):
        offset = base + layer * strides[0]
        views.append(np.ndarray(tuple(sizes[1:]), word, buffer=memory, offset=offset, strides=tuple(strides[1:])))
    order = tuple(axis - 2 for axis in physical if axis >= 2)
    return Pool(geometry, memory, views, order, num_blocks)


@st.composite
def placements(draw, pool: Pool) -> tuple[list[int], int]:
    """(distinct block ids in any order, often consecutive ones; first block within the chunk)."""
    most = min(pool.geometry.blocks, pool.num_blocks)
    count = draw(st.integers(0, most))
    if draw(st.booleans()):
        start = draw(st.integers(0, pool.num_blocks - count))
        ids = list(range(start, start + count))
    else:
        ids = draw(st.permutations(range(pool.num_blocks)))[:count]
    return ids, draw(st.integers(0, pool.geometry.blocks - count))


def slot_of(geometry: RecordGeometry, fill: int = SENTINEL) -> np.ndarray:
    return np.full(geometry.slot_bytes, fill, np.uint8)


def spans(geometry: RecordGeometry, first: int, ids: list[int]):
    """(layer, block id, start, stop) of every page in the slot, from the format's definition."""
    at = HEADER_BYTES
    for index, layer in enumerate(geometry.group.layers):
        for place, block in enumerate(ids):
            start = at + (first + place) * layer.page_bytes
            yield index, block, start, start + layer.page_bytes
        at += layer.page_bytes * geometry.blocks


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_save_puts_the_named_pages_in_their_places_and_touches_nothing_else(data, seed):
    pool = data.draw(pools())
    ids, first = data.draw(placements(pool))
    pool.bytes[:] = np.random.default_rng(seed).integers(0, 256, pool.bytes.size)
    before = pool.bytes.copy()
    expected = slot_of(pool.geometry)
    for layer, block, start, stop in spans(pool.geometry, first, ids):
        expected[start:stop] = np.frombuffer(pool.page_bytes(layer, block), np.uint8)
    slot = slot_of(pool.geometry)
    pool.memory().save(ids, slot, first)
    assert np.array_equal(slot, expected)
    assert np.array_equal(pool.bytes, before)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_load_fills_the_named_blocks_and_touches_nothing_else(data, seed):
    pool = data.draw(pools())
    ids, first = data.draw(placements(pool))
    slot = slot_of(pool.geometry)
    slot[:] = np.random.default_rng(seed).integers(0, 256, slot.size)
    before = slot.copy()
    pool.bytes[:] = SENTINEL
    for layer, block, start, stop in spans(pool.geometry, first, ids):
        pool.put_page(layer, block, slot[start:stop].tobytes())
    expected = pool.bytes.copy()
    pool.bytes[:] = SENTINEL
    pool.memory().load(slot, first, ids)
    assert np.array_equal(pool.bytes, expected)
    assert np.array_equal(slot, before)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_was_saved_is_loaded_into_other_blocks_bit_for_bit(data):
    pool = data.draw(pools())
    ids, first = data.draw(placements(pool))
    pool.bytes[:] = np.random.default_rng(1).integers(0, 256, pool.bytes.size)
    saved = [[pool.page_bytes(layer, block) for block in ids] for layer in range(len(pool.views))]
    slot = slot_of(pool.geometry)
    memory = pool.memory()
    memory.save(ids, slot, first)
    others = data.draw(st.permutations(range(pool.num_blocks)))[: len(ids)]
    memory.load(slot, first, others)
    assert [[pool.page_bytes(layer, block) for block in others] for layer in range(len(pool.views))] == saved


def b35_view(order: str, num_blocks: int, gap: int) -> torch.Tensor:
    """``[blocks, *declared axes]`` of a buffer that has an unused ``gap`` behind each innermost row."""
    heads = tokens = 16
    size = 8
    if order == "KHNC":
        return torch.zeros(2, num_blocks, heads, tokens, size + gap)[..., :size].permute(1, 0, 2, 3, 4)
    return torch.zeros(num_blocks, 2, tokens, heads, size + gap)[..., :size]


@pytest.mark.parametrize("order", ["KHNC", "KNHC"])
def test_b35_declared_axis_order_is_obeyed(order):
    geometry = make_geometry((2, 16, 16, 8), blocks=3, axes=order, layout=order)
    other = {"KHNC": "KNHC", "KNHC": "KHNC"}[order]
    assert geometry.group.identity() != make_geometry((2, 16, 16, 8), axes=other, layout=other).group.identity()

    def token(view: torch.Tensor, block: int, index: int) -> torch.Tensor:
        return view[block].select(order.index("N"), index)  # [K/V, heads, size] of one token

    first, second = b35_view(order, 9, 0), b35_view(order, 11, 5)
    first.copy_(torch.rand(first.shape, generator=torch.Generator().manual_seed(3)))
    saved_in, loaded_into = [7, 0, 1], [2, 10, 5]
    slot = slot_of(geometry)
    PagedMemory.from_tensors(geometry, {"layer.0": first}).save(saved_in, slot)
    PagedMemory.from_tensors(geometry, {"layer.0": second}).load(slot, 0, loaded_into)
    for one, two in zip(saved_in, loaded_into, strict=True):
        for index in range(16):
            assert torch.equal(token(first, one, index), token(second, two, index))
    untouched = [block for block in range(11) if block not in loaded_into]
    assert not second[untouched].any()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float16, np.arange(65536, dtype=np.uint16)),
        (torch.bfloat16, np.arange(65536, dtype=np.uint16)),
        (torch.uint8, np.arange(256, dtype=np.uint8)),
        (torch.float8_e4m3fn, np.arange(256, dtype=np.uint8)),
        (torch.float8_e5m2, np.arange(256, dtype=np.uint8)),
        (torch.float32, np.random.default_rng(5).integers(0, 2**32, 65536, dtype=np.uint32)),
    ],
    ids=str,
)
def test_b37_bits_are_kept_between_blocks_and_slots(dtype, bits):
    if bits.dtype == np.uint32:
        bits[:4] = [0x7F800001, 0xFFC12345, 0x80000000, 0x00000001]  # NaNs with payloads, -0, a subnormal
    pages = bits.reshape(4, 2, 4, -1)
    name = str(dtype).removeprefix("torch.")
    shape = pages.shape[1:]
    layer = LayerGeometry("x", name, "HNC", shape, pages[0].nbytes)
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", 4, "LBHNC", (layer,)), 16)
    source, target = torch.from_numpy(pages.copy()).view(dtype), torch.zeros(pages.shape, dtype=dtype)
    slot = slot_of(geometry)
    PagedMemory.from_tensors(geometry, {"x": source}).save([3, 1, 0, 2], slot)
    PagedMemory.from_tensors(geometry, {"x": target}).load(slot, 0, [3, 1, 0, 2])
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(target.view(integers), torch.from_numpy(pages).view(integers))


def test_a_page_without_gaps_is_copied_as_it_lies_whatever_its_axis_order():
    geometry = make_geometry((2, 3, 4))
    head_first = np.arange(5 * 24, dtype=np.float32).reshape(5, 2, 3, 4)
    token_first = np.arange(5 * 24, dtype=np.float32).reshape(5, 3, 2, 4).transpose(0, 2, 1, 3)
    payloads = []
    for array in (head_first, token_first):
        slot = slot_of(geometry)
        PagedMemory.from_arrays(geometry, {"layer.0": array}).save([3], slot)
        payloads.append(slot[HEADER_BYTES : HEADER_BYTES + 96].view(np.float32).tolist())
    assert payloads == [list(range(72, 96))] * 2


def test_the_physical_order_tells_two_memories_apart():
    geometry = make_geometry((2, 3, 4))
    head_first = PagedMemory.from_arrays(geometry, {"layer.0": np.zeros((5, 2, 3, 4), np.float32)})
    token_first = PagedMemory.from_arrays(
        geometry, {"layer.0": np.zeros((5, 3, 2, 4), np.float32).transpose(0, 2, 1, 3)}
    )
    assert (head_first.orders, token_first.orders) == (((0, 1, 2),), ((1, 0, 2),))


@pytest.mark.parametrize("bad", [[-1], [0, 5], [2**40], [1, 2, 3, 4, 0]])
def test_a_block_out_of_range_is_refused_before_any_byte_moves(bad):
    geometry = make_geometry((2, 3, 4), blocks=4)
    array = np.ones((5, 2, 3, 4), np.float32)
    memory = PagedMemory.from_arrays(geometry, {"layer.0": array})
    slot = slot_of(geometry)
    with pytest.raises(ContractError):
        memory.save(bad, slot)
    with pytest.raises(ContractError):
        memory.load(slot, 0, bad)
    assert set(slot.tolist()) == {SENTINEL}
    assert set(array.reshape(-1).tolist()) == {1}


@pytest.mark.parametrize("first", [-1, 3, 4])
def test_a_place_outside_the_chunk_is_refused(first):
    geometry = make_geometry((2, 3, 4), blocks=4)
    memory = PagedMemory.from_arrays(geometry, {"layer.0": np.zeros((5, 2, 3, 4), np.float32)})
    with pytest.raises(ContractError, match="chunk of 4"):
        memory.save([0, 1], slot_of(geometry), first)


@pytest.mark.parametrize(
    "wrong",
    [lambda slot: slot[:-1], lambda slot: slot.view(np.int8), lambda slot: np.repeat(slot, 2)[::2]],
    ids=["short", "dtype", "strided"],
)
def test_what_is_not_a_slot_is_refused(wrong):
    geometry = make_geometry((2, 3, 4))
    memory = PagedMemory.from_arrays(geometry, {"layer.0": np.zeros((5, 2, 3, 4), np.float32)})
    with pytest.raises(ContractError, match="not a slot"):
        memory.load(wrong(slot_of(geometry)), 0, [0])


def test_layers_of_different_forms_in_different_allocations_keep_their_places():
    geometry = make_geometry((2, 3, 4), layers=4, blocks=2)
    narrow = replace(geometry.group.layers[1], shape=(1, 3, 4), page_bytes=48)
    layers = (geometry.group.layers[0], narrow, *geometry.group.layers[2:])
    geometry = replace(geometry, group=replace(geometry.group, layers=layers))
    tensors = {x.name: torch.rand(9, *x.shape) for x in layers}
    slot = slot_of(geometry)
    memory = PagedMemory.from_tensors(geometry, tensors)
    memory.save([8, 3], slot)
    expected = b"".join(tensors[x.name][[8, 3]].numpy().tobytes() for x in layers)
    assert slot[HEADER_BYTES : HEADER_BYTES + len(expected)].tobytes() == expected


@pytest.mark.parametrize("places", [(0, 1, 3), (0, 1, 2, 6, 7), (5, 3, 1, 0), (0, 2, 1)])
def test_layers_at_unequal_distances_keep_their_places(places):
    geometry = make_geometry((2, 3, 4), layers=len(places), blocks=2)
    whole = torch.rand(8, 9, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    slot = slot_of(geometry)
    PagedMemory.from_tensors(geometry, {f"layer.{i}": whole[place] for i, place in enumerate(places)}).save(
        [8, 3], slot
    )
    expected = whole[list(places)][:, [8, 3]].numpy().tobytes()
    assert slot[HEADER_BYTES : HEADER_BYTES + len(expected)].tobytes() == expected


def test_registered_memory_stays_alive():
    geometry = make_geometry((2, 3, 4))
    memory = PagedMemory.from_tensors(geometry, {"layer.0": torch.full((5, 2, 3, 4), 3.0)})
    slot = slot_of(geometry)
    memory.save([4], slot)
    assert set(slot[HEADER_BYTES : HEADER_BYTES + 96].view(np.float32).tolist()) == {3.0}


def test_copies_let_other_threads_run():
    geometry = make_geometry((4, 1024, 1024), block_tokens=1024)
    memory = PagedMemory.from_tensors(geometry, {"layer.0": torch.zeros(2, 4, 1024, 1024)})
    slot = slot_of(geometry)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread gives way only where it lets go of the lock itself
    try:
        # The scheduler may give this thread its turn too late; it can not give it one if the lock is held.
        assert any(_ran_during(lambda: memory.save([1], slot)) for _ in range(50))
        assert any(_ran_during(lambda: memory.load(slot, 0, [1])) for _ in range(50))
    finally:
        sys.setswitchinterval(interval)


def _ran_during(copy) -> bool:
    """Whether this thread ran between the start and the end of ``copy`` on another one."""
    marks = []

    def work() -> None:
        marks.append("begin")
        copy()
        marks.append("end")

    thread = threading.Thread(target=work)
    thread.start()
    seen = list(marks)
    thread.join()
    return seen == ["begin"]
