"""The record: golden bytes, a stock reader, and one test for every way in which a page can be wrong."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutMismatch, RecordDamaged
from kvstore.keys import Namespace
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry, Shard
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_geometry, sample_scope, sealed_record
from kvstore.tiers.record import RecordFormat, parse_header

ADDRESS = bytes(range(32))
SCOPE = sample_scope("golden")
FORMAT = RecordFormat(SCOPE.namespace, SCOPE.geometries[0])
PAGE = FORMAT.header_page(ADDRESS, bytes(16))
PAYLOAD_BYTES = SCOPE.geometries[0].payload_bytes
GOLDEN_START = (
    b'{"__metadata__":{"format":"1","namespace":"06d441357cb69c11c0c5004'
    b'7d11b22cf084a233bdfcc138eeb3d16a6ccbadcd5","group":"0","shard":"s0'
)
GOLDEN_SHA256 = "b8035d2730060f85703d327ee61be82721c110315b5dc95f10243253aae2b68a"


def _sealed() -> memoryview:
    """A record whose payload is the bytes 0, 1, 2 ..."""
    buffer = aligned_buffer(FORMAT.slot_bytes)
    payload = np.frombuffer(buffer, np.uint8)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
    payload[:] = np.arange(PAYLOAD_BYTES) % 256
    FORMAT.seal(ADDRESS, buffer)
    return buffer


def _page(text: str) -> bytes:
    return (4088).to_bytes(8, "little") + text.encode().ljust(4088)


def _changed(**metadata: object) -> bytes:
    """The golden page with some metadata replaced (None removes), written as json.dumps does."""
    whole = json.loads(PAGE[8:])
    whole["__metadata__"] = {k: v for k, v in (whole["__metadata__"] | metadata).items() if v is not None}
    return _page(json.dumps(whole, separators=(",", ":")))


def _kind(page: bytes) -> str:
    with pytest.raises(RecordDamaged) as caught:
        parse_header(page)
    return caught.value.kind


def test_the_golden_record_has_these_bytes() -> None:
    record = bytes(_sealed())
    assert record[:8] == b"\xf8\x0f\0\0\0\0\0\0"
    assert record[8:140] == GOLDEN_START
    assert hashlib.sha256(record).hexdigest() == GOLDEN_SHA256


def test_a_page_is_a_pure_function_of_its_arguments() -> None:
    again = RecordFormat(sample_scope("golden").namespace, sample_geometry())
    assert again.header_page(ADDRESS, bytes(16)) == PAGE
    assert FORMAT.header_page(ADDRESS, b"\1" * 16) != PAGE
    assert FORMAT.header_page(sample_address(1), bytes(16)) != PAGE
    assert len(PAGE) == 4096


def test_the_stock_library_reads_a_record(tmp_path: Path) -> None:
    record = bytes(_sealed())
    tensors = safetensors.numpy.load(record)
    assert tensors["kv"].tobytes() == record[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
    assert not tensors["_pad"].any()
    path = tmp_path / "record.safetensors"
    path.write_bytes(record)
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata()["address"] == ADDRESS.hex()
        assert set(opened.keys()) == {"kv", "_pad"}


def test_a_payload_of_whole_pages_has_no_pad() -> None:
    scope = sample_scope("whole", sample_geometry(layers=2, content=64))
    assert scope.geometries[0].payload_bytes % 4096 == 0
    record = bytes(sealed_record(scope, ADDRESS, 1))
    assert set(safetensors.numpy.load(record)) == {"kv"}
    assert parse_header(record[:4096]).record_bytes == len(record)


def test_a_sealed_record_verifies_and_reads_back_by_its_fields() -> None:
    buffer = _sealed()
    assert FORMAT.verify(ADDRESS, buffer) == Outcome.HIT
    header = parse_header(bytes(buffer[:4096]))
    assert header.address == ADDRESS
    assert header.namespace == SCOPE.namespace.digest
    assert header.payload_bytes == PAYLOAD_BYTES
    assert header.record_bytes == len(buffer)
    assert header.fields["layer_bytes"] == f"3x{PAYLOAD_BYTES // 3}"


@pytest.mark.parametrize("layers", [1, 128, 400])
def test_a_page_fits_any_number_of_unlike_layers(layers: int) -> None:
    rows = tuple(
        LayerGeometry(f"model.layers.{i}.attn", "bf16", "HTC", (1, 16, i + 1), 32 * i + 32) for i in range(layers)
    )
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", 16, "HTC", rows), 256)
    page = RecordFormat(SCOPE.namespace, geometry).header_page(ADDRESS, bytes(16))
    assert len(page) == 4096
    parse_header(page)


def test_a_layout_name_that_leaves_no_room_is_refused() -> None:
    layer = LayerGeometry("a", "u1", "HTC", (1, 16, 1), 16)
    geometry = RecordGeometry(GroupGeometry(0, "mla", 16, "x" * 4096, (layer,)), 16)
    with pytest.raises(LayoutMismatch, match="too long"):
        RecordFormat(SCOPE.namespace, geometry)


def test_no_flipped_header_bit_is_a_hit() -> None:
    buffer = _sealed()
    for at in range(HEADER_BYTES):
        buffer[at] ^= 1 << at % 8
        assert FORMAT.verify(ADDRESS, buffer) != Outcome.HIT
        buffer[at] ^= 1 << at % 8
    assert FORMAT.verify(ADDRESS, buffer) == Outcome.HIT


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES // 2, HEADER_BYTES + PAYLOAD_BYTES - 1])
def test_a_flipped_payload_bit_is_damage_of_the_payload(at: int) -> None:
    buffer = _sealed()
    buffer[at] ^= 1
    assert FORMAT.fault(ADDRESS, buffer) == "checksum"
    assert FORMAT.verify(ADDRESS, buffer) == Outcome.DAMAGED


def test_a_pad_that_is_not_zero_is_damage() -> None:
    buffer = _sealed()
    buffer[-1] = 1
    assert FORMAT.fault(ADDRESS, buffer) == "pad"


def test_another_address_is_damage() -> None:
    assert FORMAT.fault(sample_address(1), _sealed()) == "address"
    assert FORMAT.verify(sample_address(1), _sealed()) == Outcome.DAMAGED


def test_another_namespace_is_a_miss() -> None:
    other = RecordFormat(Namespace({"model": "another"}), SCOPE.geometries[0])
    assert other.fault(ADDRESS, _sealed()) == "namespace"
    assert other.verify(ADDRESS, _sealed()) == Outcome.MISS


def test_another_format_version_is_a_miss() -> None:
    buffer = _sealed()
    buffer[:HEADER_BYTES] = _changed(format="2", something="new")
    assert FORMAT.fault(ADDRESS, buffer) == "version"
    assert FORMAT.verify(ADDRESS, buffer) == Outcome.MISS


def test_another_shard_of_the_same_size_is_damage() -> None:
    other = RecordFormat(SCOPE.namespace, sample_geometry(shard=Shard(1, 2)))
    assert other.fault(ADDRESS, _sealed()) == "geometry"


def test_another_codec_is_damage() -> None:
    assert FORMAT.classify(ADDRESS, _changed(codec="zstd")) == "codec"


def test_only_a_buffer_sealed_for_the_address_is_recognised() -> None:
    buffer = _sealed()
    assert FORMAT.is_sealed_for(ADDRESS, buffer)
    assert not FORMAT.is_sealed_for(sample_address(1), buffer)
    assert not FORMAT.is_sealed_for(ADDRESS, aligned_buffer(FORMAT.slot_bytes))
    assert not FORMAT.is_sealed_for(ADDRESS, buffer[:-4096])


MALFORMED = {
    "nothing": (b"", "short"),
    "one byte short": (PAGE[:-1], "short"),
    "another header length": (b"\xf7" + PAGE[1:], "header_length"),
    "a huge header length": (b"\xff" * 8 + PAGE[8:], "header_length"),
    "not ASCII": (_page('{"a":"é"}')[:4096], "encoding"),
    "not JSON": (_page("{"), "json"),
    "not an object": (_page("[]"), "json"),
    "nested too deep": (_page("[" * 4000), "json"),
    "NaN": (_page('{"a":NaN}'), "json"),
    "a key twice": (_page('{"a":1,"a":1}'), "json"),
    "no metadata": (_page("{}"), "metadata"),
    "metadata that are no strings": (_changed(group=0), "metadata"),
    "no version": (_changed(format=None), "metadata"),
    "another version": (_changed(format="2"), "version"),
    "a missing field": (_changed(codec=None), "metadata"),
    "an unknown field": (_changed(created="now"), "metadata"),
    "an address that is no digest": (_changed(address="00"), "field"),
    "a negative length": (_changed(payload_bytes="-1"), "field"),
    "a number with a leading zero": (_changed(chunk_tokens="032"), "field"),
    "a payload beyond all bounds": (_changed(payload_bytes="9" * 13), "field"),
    "tensors that do not fit the length": (_changed(payload_bytes="4096"), "tensors"),
    "no tensor": (_page(re.sub(r',"kv".*', "}", PAGE[8:].decode())), "tensors"),
    "another dtype": (PAGE.replace(b'"kv":{"dtype":"U8"', b'"kv":{"dtype":"I8"'), "not_canonical"),
    "overlapping tensors": (PAGE.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'), "not_canonical"),
    "spaces between": (_page(PAGE[8:].decode().rstrip().replace('"kv":', '"kv": ')), "not_canonical"),
    "something after the JSON": (PAGE[:-1] + b"\n", "not_canonical"),
    "a zero after the JSON": (PAGE[:-1] + b"\0", "json"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_page_is_refused_by_its_kind(name: str) -> None:
    page, kind = MALFORMED[name]
    assert _kind(page) == kind
    if len(page) == HEADER_BYTES:
        assert FORMAT.classify(ADDRESS, page) == kind


def test_a_name_that_grows_when_written_again_is_refused() -> None:
    text = PAGE[8:].decode().rstrip().replace('"layout":"HTC"', '"layout":"' + "\x7f" * 1500 + '"')
    assert _kind(_page(text)) == "not_canonical"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4088), st.booleans())
def test_random_bytes_raise_the_declared_error_only(content: bytes, is_framed: bool) -> None:
    page = (4088).to_bytes(8, "little") + content.ljust(4088) if is_framed else content
    with pytest.raises(RecordDamaged):
        parse_header(page)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(8, 1200), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_page_with_changed_bytes_is_refused_or_is_another_page(changes: list[tuple[int, int]]) -> None:
    page = bytearray(PAGE)
    for at, value in changes:
        page[at] = value
    try:
        header = parse_header(bytes(page))
    except RecordDamaged:
        return
    fields = dict(header.fields)
    assert bytes(page) == PAGE or fields != parse_header(PAGE).fields
