"""Whether one file is the record that its place says it is, found out by parsing: for tools, not for loads.

Invariant: memory is one piece (`PIECE_BYTES`), whatever a file claims; nothing is read beyond a file whose header
is not in order; and what was read is what the device has where direct I/O works, not what the page cache has.

A load knows its geometry and compares one page. A tool has only what lies around the record: the name, the shard's
directory, and ``namespace.json``, whose entry for the group gives the digest of the geometry. Every byte of the header
is covered by these, by the payload's checksum, or by the page being the one that its own fields make.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvstore.errors import RecordDamaged
from kvstore.layout import HEADER_BYTES
from kvstore.tiers.disk_draft import OPEN_FILE
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.record import CHECKSUM, CODEC, FOREIGN_KINDS, Header, parse_header
from kvstore.tiers.record_key import KEYED_CHECKSUM
from kvstore.tiers.tools import Verdict
from kvstore.units import MIB, PAGE

PIECE_BYTES = 4 * MIB
MAX_DEPTH = 32
"""Levels of a namespace's description, so that whoever walks it needs no limit of its own."""
_LAYERS = re.compile(r"[0-9]{1,9}x[0-9]{1,13}(,[0-9]{1,9}x[0-9]{1,13})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the place of a record says about it; ``""`` and an empty mapping where it says nothing.

    Attributes:
        address: 64 hex digits.
        namespace: what the digest's hex digits begin with.
        shard: name of the shard.
        owner: user id, None for any.
        fields: the namespace's description.
    """

    address: str = ""
    namespace: str = ""
    shard: str = ""
    owner: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome: ``kind`` is ``""`` for a record that is whole and where it belongs.

    ``header`` is None where the page can not be parsed, ``checksum`` (hex) is ``""`` where the payload was not read,
    ``status`` is that of the open file.
    """

    kind: str
    detail: str
    status: os.stat_result
    header: Header | None = None
    checksum: str = ""

    @property
    def verdict(self) -> Verdict:
        """OK, FOREIGN or DAMAGED."""
        if not self.kind:
            return Verdict.OK
        return Verdict.FOREIGN if self.kind in FOREIGN_KINDS else Verdict.DAMAGED


class RecordChecker:
    """Checks one file after the other. One thread; blocks for its I/O: about 2 GB/s where the device allows."""

    __slots__ = ("_calls", "_is_direct", "_piece")

    def __init__(self, calls: OsCalls) -> None:
        self._calls = calls
        self._is_direct = True
        self._piece = memoryview(mmap.mmap(-1, PIECE_BYTES))

    def check(self, name: str, dir_fd: int | None, expected: Expected) -> Checked:
        """Reads the file ``name`` (of a directory, or a path) as far as it is in order, and judges it.

        Raises:
            OSError: it could not be opened or read, which says nothing about the record.
        """
        flags = OPEN_FILE | (os.O_DIRECT if self._is_direct else 0)
        try:
            fd = self._calls.open(name, flags, dir_fd=dir_fd)
            try:
                return self._check_open(fd, expected)
            finally:
                self._calls.close(fd)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
        self._is_direct = False
        return self.check(name, dir_fd, expected)

    def _check_open(self, fd: int, expected: Expected) -> Checked:
        status = self._calls.stat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Checked("not_a_file", "not a regular file", status)
        if expected.owner is not None and status.st_uid != expected.owner:
            return Checked("owner", f"belongs to user {status.st_uid}, the store to {expected.owner}", status)
        try:
            header = parse_header(bytes(self._piece[: self._read(fd, HEADER_BYTES, 0)]))
        except RecordDamaged as error:
            return Checked(error.kind, str(error).removeprefix(f"{error.kind}: "), status)
        kind, detail = _header_fault(header, expected)
        if not kind and status.st_size != header.record_bytes:
            kind, detail = "size", f"{status.st_size} bytes, not {header.record_bytes}"
        if kind:
            return Checked(kind, detail, status, header)
        return self._check_payload(fd, status, header)

    def _check_payload(self, fd: int, status: os.stat_result, header: Header) -> Checked:
        digest = xxhash.xxh3_128()
        is_padded = True
        end = HEADER_BYTES + header.payload_bytes
        at = HEADER_BYTES
        while at < header.record_bytes:
            length = min(PIECE_BYTES, header.record_bytes - at)
            if self._read(fd, length, at) < length:
                return Checked("size", f"it became shorter than {header.record_bytes} bytes", status, header)
            payload = max(0, min(length, end - at))
            digest.update(self._piece[:payload])
            is_padded = is_padded and not any(self._piece[payload:length])
            at += length
        found, said = digest.hexdigest(), header.fields["checksum"]
        is_keyed = header.fields["checksum_algorithm"] == KEYED_CHECKSUM
        if is_keyed:
            found = ""  # only who has the key can tell
        elif found != said:
            return Checked("checksum", f"the header says {said}, the payload has {found}", status, header, found)
        if not is_padded:
            return Checked("pad", "the bytes after the payload are not zeros", status, header, found)
        detail = "authenticated: the payload was not checked, which needs the key" if is_keyed else ""
        return Checked("", detail, status, header, found)

    def _read(self, fd: int, length: int, offset: int) -> int:
        """Reads up to ``length`` bytes into the piece; fewer only at the end of the file."""
        at = 0
        while at < length:
            count = self._calls.read(fd, self._piece[at:length], offset + at)
            reached = (at + count) // PAGE * PAGE  # direct I/O goes on at a page only
            if reached <= at:
                at += count
                break
            at = reached
        if at < length and offset + at < self._calls.stat(fd).st_size:
            # Not the end: calling a whole record damaged could cost it its life.
            raise OSError(errno.EIO, f"a read of {length} bytes stays at {at}")
        return at


def _header_fault(header: Header, expected: Expected) -> tuple[str, str]:
    """Kind and detail of what a well-formed header has against its place."""
    found = header.fields
    if not found["namespace"].startswith(expected.namespace):
        return "namespace", f"a record of namespace {found['namespace'][:16]}"
    if expected.address and found["address"] != expected.address:
        return "address", f"the record of {found['address']}"
    if found["codec"] != CODEC or found["checksum_algorithm"] not in (CHECKSUM, KEYED_CHECKSUM):
        return "codec", f"codec {found['codec']}, checksum {found['checksum_algorithm']}"
    if expected.shard and found["shard"] != expected.shard:
        return "geometry", f"a record of shard {found['shard']}"
    layers = found["layer_bytes"]
    if layers and not (_LAYERS.fullmatch(layers) and _layer_sum(layers) == header.payload_bytes):
        return "geometry", f"layers of {layers} bytes in a payload of {header.payload_bytes}"
    if wrong := _differing_geometry(found, expected.fields):
        return "geometry", f"{wrong} differs from the namespace's"
    return "", ""


def _layer_sum(layers: str) -> int:
    return sum(int(count) * int(size) for count, size in (run.split("x") for run in layers.split(",")))


def group_fields(fields: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """The description of a group in a namespace's, empty if there is none."""
    groups = fields.get("groups")
    if not isinstance(groups, list) or not int(group) < len(groups):
        return {}
    found = groups[int(group)]
    return found if isinstance(found, dict) else {}


def _differing_geometry(found: Mapping[str, str], fields: Mapping[str, Any]) -> str:
    """Name of the first header field that is not what the namespace's description makes; ``""`` for none."""
    if not fields.get("groups"):
        return ""
    group = group_fields(fields, found["group"])
    if not group:
        return "group"
    for key in ("block_tokens", "layout"):
        if found[key] != str(group.get(key)):
            return key
    whole = {"group": group, "chunk_tokens": int(found["chunk_tokens"]), "shard": found["shard"]}
    return "" if hashlib.sha256(_canonical(whole)).hexdigest() == found["geometry"] else "geometry"


def parse_namespace(text: bytes, digits: str) -> Mapping[str, Any]:
    """The description in a ``namespace.json``.

    Args:
        text: its bytes.
        digits: the first hex digits of its SHA-256, which is the namespace's digest.

    Raises:
        RecordDamaged: it is not the description of that namespace.
    """
    digest = hashlib.sha256(text).hexdigest()
    if not digest.startswith(digits):
        raise RecordDamaged("description", f"describes namespace {digest[: len(digits)]}, or is damaged")
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or _is_deeper(fields, MAX_DEPTH) or _canonical(fields) != text:
            raise ValueError("not the canonical JSON of an object")
    except (ValueError, RecursionError) as error:
        raise RecordDamaged("description", str(error)) from None
    return fields


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
