"""Which memory is accepted for copies: only what is exactly as the geometry declares it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.errors import LayoutMismatch
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.transfer.copies import PagedMemory


def make_geometry(shape: tuple[int, ...], dtype: str = "float32", layers: int = 1) -> RecordGeometry:
    page = int(np.prod(shape)) * {"float32": 4, "bfloat16": 2}[dtype]
    declared = tuple(LayerGeometry(f"layer.{i}", dtype, "HNC", shape, page) for i in range(layers))
    return RecordGeometry(GroupGeometry(0, "full_attention", 16, "LBHNC", declared), 16)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "layer.0: declared"),
        ({"layer.0": torch.zeros(5, 2, 3, 4), "layer.1": torch.zeros(5, 2, 3, 4)}, "layer.1: memory was registered"),
        ({"layer.0": torch.zeros(5, 3, 2, 4)}, "layer.0: memory of shape"),
        ({"layer.0": torch.zeros(2, 3, 4)}, "layer.0: memory of shape"),
        ({"layer.0": torch.zeros(0, 2, 3, 4)}, "layer.0: memory of shape"),
        ({"layer.0": torch.zeros(5, 2, 3, 4, dtype=torch.float16)}, "layer.0: memory of float16, declared float32"),
        ({"layer.0": torch.zeros(5, 2, 3, 4, dtype=torch.int32)}, "layer.0: memory of int32, declared float32"),
        ({"layer.0": torch.zeros(5, 2, 3, 4, device="meta")}, "layer.0: memory on meta; device copies"),
        ({"layer.0": torch.zeros(1, 2, 3, 4).expand(5, 2, 3, 4)}, "layer.0: strides"),
        ({"layer.0": torch.zeros(99).as_strided((5, 2, 3, 4), (12, 12, 4, 1))}, "layer.0: strides"),
    ],
)
def test_memory_that_is_not_as_declared_is_refused_by_layer(tensors, says):
    with pytest.raises(LayoutMismatch, match=says.replace(".", r"\.")):
        PagedMemory.from_tensors(make_geometry((2, 3, 4)), tensors)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros((5, 2, 3, 4), np.float64), "float32"),
        (np.zeros((5, 2, 3, 4), np.uint32), "float32"),
        (np.zeros((5, 2, 3, 4), np.float16), "bfloat16"),
        (np.zeros((5, 2, 3, 4), np.uint32), "bfloat16"),
        (np.zeros((5, 2, 3, 4), np.float32)[::-1], "float32"),
    ],
    ids=["wider", "unsigned", "float16", "width", "backwards"],
)
def test_arrays_that_are_not_as_declared_are_refused(array, dtype):
    with pytest.raises(LayoutMismatch, match=r"layer\.0"):
        PagedMemory.from_arrays(make_geometry((2, 3, 4), dtype), {"layer.0": array})


def test_read_only_memory_is_refused():
    array = np.zeros((5, 2, 3, 4), np.float32)
    array.flags.writeable = False
    with pytest.raises(LayoutMismatch, match="read-only"):
        PagedMemory.from_arrays(make_geometry((2, 3, 4)), {"layer.0": array})


def test_a_dtype_that_numpy_lacks_is_given_as_unsigned_of_its_width():
    geometry = make_geometry((2, 3, 4), "bfloat16")
    PagedMemory.from_arrays(geometry, {"layer.0": np.zeros((5, 2, 3, 4), np.uint16)})


def test_layers_that_share_or_overlap_memory_are_refused():
    geometry = make_geometry((2, 3, 4), layers=2)
    whole = torch.zeros(6, 2, 3, 4)
    with pytest.raises(LayoutMismatch, match="share"):
        PagedMemory.from_tensors(geometry, {"layer.0": whole[:5], "layer.1": whole[:5]})
    with pytest.raises(LayoutMismatch, match="overlap"):
        PagedMemory.from_tensors(geometry, {"layer.0": whole[:5], "layer.1": whole[1:]})


def test_layers_of_one_group_have_equally_many_blocks():
    geometry = make_geometry((2, 3, 4), layers=2)
    with pytest.raises(LayoutMismatch, match="same number of blocks"):
        PagedMemory.from_tensors(geometry, {"layer.0": torch.zeros(5, 2, 3, 4), "layer.1": torch.zeros(6, 2, 3, 4)})
