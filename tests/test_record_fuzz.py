"""Whatever bytes lie in a store, those who parse them raise the declared error, or nothing, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import RecordDamaged
from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers.disk_check import MAX_DEPTH, Expected, RecordChecker, parse_namespace
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.record import Header, RecordFormat, parse_header

SCOPE = sample_scope()
ADDRESS = sample_address(1)
RECORD = bytes(sealed_record(SCOPE, ADDRESS, 1))
FORMAT = RecordFormat(SCOPE.namespace, SCOPE.geometries[0])
FIELDS = parse_header(RECORD[:HEADER_BYTES]).fields
MEMORY_LIMIT = 1 << 20
QUICK = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


def framed(text: bytes) -> bytes:
    """A page whose length field is right."""
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8)


@st.composite
def spliced(draw: st.DrawFn, original: bytes) -> bytes:
    """``original`` with pieces cut out, doubled, or replaced by something else."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        end = min(len(content), start + draw(st.integers(0, 64)))
        piece = draw(st.binary(max_size=64) | st.just(bytes(content[start:end]) * 2) | st.sampled_from(TOKENS))
        content[start:end] = piece
    return bytes(content)


TOKENS = [
    b"{",
    b"}",
    b"[" * 200,
    b'"',
    b"\\ud800",
    b"\\u0000",
    b"9" * 60,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b'"kv":',
    b"\xff",
]


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """JSON with the keys of a header and anything as their values."""
    changes = draw(st.dictionaries(st.sampled_from([*FIELDS, "new"]), st.text(max_size=80) | json_values, max_size=4))
    whole = json.loads(RECORD[8:HEADER_BYTES])
    whole["__metadata__"] |= changes
    whole |= draw(st.dictionaries(st.sampled_from(["kv", "_pad", "__metadata__", "more"]), json_values, max_size=2))
    return framed(json.dumps(whole, separators=(",", ":"), ensure_ascii=draw(st.booleans())).encode("utf-8", "replace"))


pages = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(framed),
    json_values.map(lambda value: framed(json.dumps(value).encode())),
    spliced(RECORD[:HEADER_BYTES]),
    spliced(RECORD[8:HEADER_BYTES].rstrip()).map(framed),
    headers(),
)


def parsed(page: bytes) -> Header | None:
    """What the parser makes of a page; the memory that it takes is bounded."""
    tracemalloc.start()
    try:
        return parse_header(page)
    except RecordDamaged as error:
        assert error.kind
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT


@QUICK
@given(pages)
def test_a_page_is_parsed_or_damaged(page: bytes) -> None:
    header = parsed(page)
    if header is not None:
        assert len(header.address) == len(header.namespace) == 32
        assert header.record_bytes % 4096 == 0
        assert json.loads(page[8:])["__metadata__"] == header.fields


@pytest.mark.parametrize("text", [b"[" * 4088, b'{"a":' * 800, b"9" * 4088, b'"' + b"\\u0041" * 681, b" " * 4088])
def test_a_page_made_to_exhaust_the_parser_is_damaged(text: bytes) -> None:
    assert parsed(framed(text)) is None


@QUICK
@given(pages, st.integers(0, len(RECORD) - HEADER_BYTES))
def test_a_load_takes_only_the_record_itself(page: bytes, cut: int) -> None:
    content = (page + RECORD[HEADER_BYTES:])[: len(RECORD) - cut] if cut % 2 else page.ljust(len(RECORD), b"\0")
    buffer = aligned_buffer(len(RECORD))
    buffer[:] = content[: len(RECORD)].ljust(len(RECORD), b"\0")
    outcome = FORMAT.verify(ADDRESS, buffer)
    assert (outcome == Outcome.HIT) == (bytes(buffer) == RECORD)


@QUICK
@given(pages, st.binary(max_size=100), st.booleans())
def test_a_file_is_judged_whatever_is_in_it(tmp_path: Path, page: bytes, tail: bytes, is_whole: bool) -> None:
    path = tmp_path / "record"
    path.write_bytes(page + RECORD[HEADER_BYTES:] if is_whole else page + tail)
    fields = json.loads(SCOPE.namespace.canonical)
    expected = Expected(ADDRESS.hex(), SCOPE.namespace.digest.hex(), "s0of1", None, fields)
    checked = RecordChecker(OsCalls()).check(str(path), None, expected)
    assert (checked.kind == "") == (path.read_bytes() == RECORD)


@QUICK
@given(st.one_of(st.binary(max_size=100), json_values.map(lambda v: json.dumps(v).encode()), spliced(b'{"groups":[]}')))
def test_a_description_is_an_object_or_damaged(text: bytes) -> None:
    try:
        fields = parse_namespace(text, hashlib.sha256(text).hexdigest()[:16])
    except RecordDamaged as error:
        assert error.kind == "description"
        return
    assert json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() == text


@pytest.mark.parametrize(
    "text", [b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH, b"[" * 100_000, b'{"a":NaN}', b'{"a":1e999}']
)
def test_a_description_made_to_exhaust_whoever_walks_it_is_damaged(text: bytes) -> None:
    with pytest.raises(RecordDamaged):
        parse_namespace(text, hashlib.sha256(text).hexdigest())


@QUICK
@given(st.dictionaries(st.sampled_from(["groups", "model"]), json_values | st.lists(json_values, max_size=3)))
def test_a_record_is_judged_whatever_its_namespace_says(tmp_path: Path, fields: dict[str, object]) -> None:
    path = tmp_path / "record"
    path.write_bytes(RECORD)
    assert RecordChecker(OsCalls()).check(str(path), None, Expected(fields=fields)).kind in ("", "geometry")
