"""The record: one chunk of one group on one shard as bytes that are also a valid safetensors file.

Invariant: the header page is a pure function of (format, namespace, geometry, address, checksum). Equal content is
equal bytes, so a reader builds the page that it expects, with the checksum of the payload it got, and compares 4096
bytes: nothing is parsed on the load path. With a key the checksum is a keyed one over page and payload.

::

    0      8 bytes   4088, little-endian: length of the JSON
    8      4088      JSON, padded with spaces
    4096   payload   tensor "kv": the layers one after the other, in each the blocks of the chunk
    ...    pad       tensor "_pad", zeros up to a multiple of 4096; absent where there is nothing to pad

Kinds of difference (`RecordFormat.fault`, ``RecordDamaged.kind``): ``short``, ``header_length``, ``encoding``,
``json``, ``tensors``, ``metadata``, ``field``, ``not_canonical`` (a page that is malformed); ``version``,
``namespace`` (another store's record: a miss, not damage); ``address``, ``geometry``, ``codec`` (not the record asked
for), ``checksum`` (the payload is not what the page says) and ``pad``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

import xxhash

from kvstore.codecs.raw import Raw
from kvstore.errors import LayoutMismatch, RecordDamaged
from kvstore.keys import FORMAT_VERSION, Namespace
from kvstore.layout import HEADER_BYTES, RecordGeometry
from kvstore.messages import Outcome
from kvstore.tiers.record_key import KEYED_CHECKSUM, KEYED_CHECKSUM_BYTES, RecordKey
from kvstore.units import align_up

JSON_BYTES = HEADER_BYTES - 8
CHECKSUM = "xxh3-128"
CODEC = Raw.name

CHECKSUM_BYTES = {CHECKSUM: 16, KEYED_CHECKSUM: KEYED_CHECKSUM_BYTES}
"""Length of the checksum by the name of its algorithm."""

FOREIGN_KINDS = frozenset({"version", "namespace"})
"""Differences that make a record a miss: it may be whole and somebody else's, so it is not dropped."""

MAX_PAYLOAD_BYTES = 1 << 40
_LENGTH = struct.pack("<Q", JSON_BYTES)
_METADATA_KEYS = (
    "format",
    "namespace",
    "group",
    "shard",
    "chunk_tokens",
    "block_tokens",
    "layout",
    "layer_bytes",
    "geometry",
    "codec",
    "payload_bytes",
    "checksum_algorithm",
    "address",
    "checksum",
)
_PATTERNS = {
    "namespace": re.compile(r"[0-9a-f]{64}", re.ASCII),
    "geometry": re.compile(r"[0-9a-f]{64}", re.ASCII),
    "address": re.compile(r"[0-9a-f]{64}", re.ASCII),
    "checksum": re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}", re.ASCII),
    "group": re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII),
    "chunk_tokens": re.compile(r"[1-9][0-9]{0,8}", re.ASCII),
    "block_tokens": re.compile(r"[1-9][0-9]{0,8}", re.ASCII),
    "payload_bytes": re.compile(r"0|[1-9][0-9]{0,12}", re.ASCII),
}


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header page, for tools.

    ``fields`` has every metadata string by name; ``payload_bytes`` is the length of the KV without the pad.
    """

    fields: Mapping[str, str]
    payload_bytes: int

    @property
    def address(self) -> bytes:
        """The record's address, 32 bytes."""
        return bytes.fromhex(self.fields["address"])

    @property
    def namespace(self) -> bytes:
        """The namespace's digest, 32 bytes."""
        return bytes.fromhex(self.fields["namespace"])

    @property
    def checksum(self) -> bytes:
        """The payload's checksum as the page says it."""
        return bytes.fromhex(self.fields["checksum"])

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, which is the size of its file."""
        return HEADER_BYTES + align_up(self.payload_bytes)


def payload_checksum(payload: memoryview) -> bytes:
    """XXH3-128 of a payload, 16 bytes. Releases the GIL; about 10 GB/s."""
    return xxhash.xxh3_128_digest(payload)


def geometry_digest(geometry: RecordGeometry) -> str:
    """SHA-256 of the canonical JSON of everything that says what the payload's bytes mean, in hex."""
    whole = {
        "group": geometry.group.identity(),
        "chunk_tokens": geometry.chunk_tokens,
        "shard": geometry.shard.name,
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _layer_table(geometry: RecordGeometry) -> str:
    """Bytes of each layer in the payload, in order, runs folded: ``3x8192,1x4096``. Offsets are their sums.

    The layers' names, dtypes and shapes are in the namespace JSON and, as a digest, in ``geometry``: in full they do
    not fit a page at 128 layers. Runs of equal layers make this table a few bytes for real models.
    """
    sizes = (layer.page_bytes * geometry.blocks for layer in geometry.group.layers)
    return ",".join(f"{sum(1 for _ in run)}x{size}" for size, run in groupby(sizes))


def _page_parts(fields: Mapping[str, str], payload_bytes: int) -> tuple[bytes, bytes, bytes]:
    """What stands before the address, between address and checksum, and after the checksum."""
    tensors: dict[str, Any] = {"kv": {"dtype": "U8", "shape": [payload_bytes], "data_offsets": [0, payload_bytes]}}
    padded = align_up(payload_bytes)
    if padded > payload_bytes:
        pad_bytes = padded - payload_bytes
        tensors["_pad"] = {"dtype": "U8", "shape": [pad_bytes], "data_offsets": [payload_bytes, padded]}
    metadata = {key: fields[key] for key in _METADATA_KEYS[:-2]} | {"address": "", "checksum": ""}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":"), ensure_ascii=True).encode()
    mark = b'"address":"'
    before, after = text.split(mark, 1)
    between = b'","checksum":"'
    after = after[len(between) :]
    # An algorithm that is not known here may have any length: `parse_header` compares the whole page.
    spaces = JSON_BYTES - len(text) - 64 - 2 * CHECKSUM_BYTES.get(fields["checksum_algorithm"], 16)
    if spaces < 0:
        raise LayoutMismatch(f"the names of layout and shard are {-spaces} bytes too long for a record's header page")
    return _LENGTH + before + mark, between, after + b" " * spaces


class RecordFormat:
    """Makes and checks the records of one namespace and geometry. Immutable; any thread.

    Cost: about 1 us a header page; `seal` and `verify` read the payload once (about 10 GB/s, with a key 5 GB/s,
    without the GIL).

    Args:
        namespace: whose records; with a key it has the key's id.
        geometry: of a record.
        key: authenticates the records; None for a checksum that finds accidents only.
    """

    __slots__ = ("_after", "_before", "_between", "_fields", "_key", "_zeros", "payload_bytes", "slot_bytes")

    def __init__(self, namespace: Namespace, geometry: RecordGeometry, key: RecordKey | None = None) -> None:
        self._key = key
        self.payload_bytes = geometry.payload_bytes
        self.slot_bytes = geometry.slot_bytes
        layer_bytes = _layer_table(geometry)
        if len(layer_bytes) > 2048:
            # A model of hundreds of layers, no two neighbours alike: the digest still tells records apart.
            layer_bytes = ""
        self._fields: Mapping[str, str] = {
            "format": str(FORMAT_VERSION),
            "namespace": namespace.digest.hex(),
            "group": str(geometry.group.group_id),
            "shard": geometry.shard.name,
            "chunk_tokens": str(geometry.chunk_tokens),
            "block_tokens": str(geometry.group.block_tokens),
            "layout": geometry.group.layout,
            "layer_bytes": layer_bytes,
            "geometry": geometry_digest(geometry),
            "codec": CODEC,
            "payload_bytes": str(geometry.payload_bytes),
            "checksum_algorithm": CHECKSUM if key is None else KEYED_CHECKSUM,
        }
        self._before, self._between, self._after = _page_parts(self._fields, self.payload_bytes)
        self._zeros = bytes(self.slot_bytes - HEADER_BYTES - self.payload_bytes)

    def header_page(self, address: bytes, checksum: bytes) -> bytes:
        """The 4096 bytes of the header: a pure function of its arguments."""
        return b"".join((self._before, address.hex().encode(), self._between, checksum.hex().encode(), self._after))

    def _checksum(self, address: bytes, payload: memoryview) -> bytes:
        if self._key is None:
            return payload_checksum(payload)
        return self._key.checksum(self._before + address.hex().encode() + self._between, self._after, payload)

    def seal(self, address: bytes, buffer: memoryview) -> None:
        """Makes a whole record of a slot whose payload is in place: writes header page and zero pad.

        Args:
            address: 32 bytes.
            buffer: ``slot_bytes`` writable bytes, payload at 4096.
        """
        end = HEADER_BYTES + self.payload_bytes
        buffer[:HEADER_BYTES] = self.header_page(address, self._checksum(address, buffer[HEADER_BYTES:end]))
        buffer[end:] = self._zeros

    def is_sealed_for(self, address: bytes, buffer: memoryview) -> bool:
        """Whether the header page in ``buffer`` names this format and ``address``; does not read the payload."""
        start = self._before + address.hex().encode() + self._between
        return len(buffer) == self.slot_bytes and bytes(buffer[: len(start)]) == start

    def fault(self, address: bytes, buffer: memoryview) -> str:
        """Kind of difference between ``buffer`` and the record that belongs under ``address``; ``""`` for none.

        Args:
            address: 32 bytes.
            buffer: ``slot_bytes`` bytes as they were read.
        """
        end = HEADER_BYTES + self.payload_bytes
        checksum = self._checksum(address, buffer[HEADER_BYTES:end])
        page = bytes(buffer[:HEADER_BYTES])
        # In constant time: how long a comparison takes must not tell a forger how much of a checksum is right.
        if not hmac.compare_digest(page, self.header_page(address, checksum)):
            return self.classify(address, page)
        if bytes(buffer[end:]) != self._zeros:
            return "pad"
        return ""

    def verify(self, address: bytes, buffer: memoryview) -> Outcome:
        """HIT if ``buffer`` is exactly the record of ``address``, MISS if it is another store's, else DAMAGED."""
        kind = self.fault(address, buffer)
        if not kind:
            return Outcome.HIT
        return Outcome.MISS if kind in FOREIGN_KINDS else Outcome.DAMAGED

    def classify(self, address: bytes, page: bytes) -> str:
        """Kind of difference of a header page that is not the expected one; ``checksum`` if only that differs."""
        try:
            header = parse_header(page)
        except RecordDamaged as error:
            return error.kind
        found = header.fields
        if found["namespace"] != self._fields["namespace"]:
            return "namespace"
        if found["address"] != address.hex():
            return "address"
        if any(found[key] != self._fields[key] for key in ("codec", "checksum_algorithm")):
            return "codec"
        if any(found[key] != expected for key, expected in self._fields.items()):
            return "geometry"
        return "checksum"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _load_json(page: bytes) -> dict[str, Any]:
    if len(page) < HEADER_BYTES:
        raise RecordDamaged("short", f"{len(page)} bytes")
    if page[:8] != _LENGTH:
        raise RecordDamaged("header_length", page[:8].hex())
    try:
        text = page[8:HEADER_BYTES].decode("ascii")
    except UnicodeDecodeError as error:
        raise RecordDamaged("encoding", str(error)) from None
    try:
        whole = json.loads(text.rstrip(" "), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordDamaged("json", str(error)) from None
    if not isinstance(whole, dict):
        raise RecordDamaged("json", "not an object")
    return whole


def parse_header(page: bytes) -> Header:
    """Parses the first 4096 bytes of a file, for tools. Trusts nothing; memory is bounded by the page.

    Raises:
        RecordDamaged: the page is not one that this version writes; ``kind`` as in the module's docstring.
    """
    whole = _load_json(page)
    metadata = whole.get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RecordDamaged("metadata", "absent or not strings")
    if metadata.get("format") != str(FORMAT_VERSION):
        kind = "version" if "format" in metadata else "metadata"
        raise RecordDamaged(kind, f"format {metadata.get('format')!r}")
    if metadata.keys() != set(_METADATA_KEYS):
        raise RecordDamaged("metadata", f"keys {sorted(metadata.keys() ^ set(_METADATA_KEYS))}")
    for key, pattern in _PATTERNS.items():
        if pattern.fullmatch(metadata[key]) is None:
            raise RecordDamaged("field", f"{key} {metadata[key]!r}")
    payload_bytes = int(metadata["payload_bytes"])
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise RecordDamaged("field", f"payload_bytes {payload_bytes}")
    expected = {"__metadata__", "kv", "_pad"} if payload_bytes % HEADER_BYTES else {"__metadata__", "kv"}
    if whole.keys() != expected:
        raise RecordDamaged("tensors", f"names {sorted(whole.keys() ^ expected)}")
    try:
        before, between, after = _page_parts(metadata, payload_bytes)
    except LayoutMismatch as error:
        raise RecordDamaged("not_canonical", str(error)) from None
    same = before + metadata["address"].encode() + between + metadata["checksum"].encode() + after
    if same != page[:HEADER_BYTES]:
        raise RecordDamaged("not_canonical", "the page is not the one that its own fields make")
    return Header(dict(metadata), payload_bytes)
