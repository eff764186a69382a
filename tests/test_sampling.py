"""Sampled digests of weights: what they notice, and what they are documented not to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transfer.sampling import SAMPLE_BYTES, sampled_weights_digest
from kvstore.transfer.weights import weights_digest

SIZES = {"a": 40_000, "b": 100, "c": 0, "d": 4096}


def model(path: Path, change: Callable[[bytearray], None] = lambda payload: None, note: str = "") -> Path:
    """A safetensors file with the tensors of `SIZES`."""
    entries, at = {}, 0
    for name, size in SIZES.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": {"note": note}, **entries}).encode()
    payload = bytearray(index * 7 % 251 for index in range(at))
    change(payload)
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    return path


def digest(path: Path) -> str:
    return sampled_weights_digest([path])


def _flip(*positions: int) -> Callable[[bytearray], None]:
    def change(payload: bytearray) -> None:
        for position in positions:
            payload[position] ^= 1

    return change


def test_equal_files_have_one_digest_and_it_is_no_full_one(tmp_path: Path) -> None:
    one = digest(model(tmp_path / "model.safetensors"))
    assert one == digest(model(tmp_path / "model.safetensors"))
    assert one.startswith("sampled-blake3:")
    assert weights_digest([tmp_path / "model.safetensors"], None) not in one


@pytest.mark.parametrize("at", [0, SAMPLE_BYTES - 1, 20_000, 20_000 + SAMPLE_BYTES - 1, 39_999, 40_000, 40_099, 44_195])
def test_a_change_in_a_sample_of_any_tensor_is_noticed(tmp_path: Path, at: int) -> None:
    one = digest(model(tmp_path / "model.safetensors"))
    assert digest(model(tmp_path / "model.safetensors", _flip(at))) != one


def test_a_change_between_the_samples_is_not_noticed_as_the_documents_say(tmp_path: Path) -> None:
    one = digest(model(tmp_path / "model.safetensors"))
    assert digest(model(tmp_path / "model.safetensors", _flip(SAMPLE_BYTES))) == one


def test_the_header_and_the_length_are_noticed(tmp_path: Path) -> None:
    path = model(tmp_path / "model.safetensors")
    one = digest(path)
    assert digest(model(path, note="x")) != one
    model(path)
    with path.open("ab") as file:
        file.write(b"\0")
    assert digest(path) != one


@pytest.mark.parametrize(
    "head",
    [b"", b"short", (10**9).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"[1]]", b"\2" + b"\0" * 7 + b"{x"],
)
def test_what_is_no_safetensors_file_is_read_as_a_whole(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + b"x" * 50_000)
    one = digest(path)
    path.write_bytes(head + b"x" * 30_000 + b"y" + b"x" * 19_999)
    assert digest(path) != one


def test_offsets_outside_of_the_file_are_not_followed(tmp_path: Path) -> None:
    header = json.dumps({"a": {"data_offsets": [-100, 10**15]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 100)
    assert digest(path).startswith("sampled-blake3:")


def test_a_model_without_files_has_no_digest() -> None:
    with pytest.raises(ConfigError):
        sampled_weights_digest([])
