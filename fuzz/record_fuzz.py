"""Feeds made-up bytes to everything that parses what lies in a store, guided by coverage (atheris).

Any exception but the declared one, any input that takes more than 5 seconds and any growth beyond 1 GiB ends the run
with a failure and writes the input to a file. Arguments go to libFuzzer: ``-max_total_time=120`` (the default here),
``-runs=N``, or the file of a failure to repeat it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvstore.tiers.record", "kvstore.tiers.disk_check"]):
    from kvstore.tiers.disk_check import Expected, RecordChecker, parse_namespace
    from kvstore.tiers.record import RecordFormat, parse_header

from kvstore.errors import RecordDamaged
from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers.os_calls import OsCalls

SCOPE = sample_scope()
ADDRESS = sample_address(1)
RECORD = bytes(sealed_record(SCOPE, ADDRESS, 1))
FORMAT = RecordFormat(SCOPE.namespace, SCOPE.geometries[0])
EXPECTED = Expected(ADDRESS.hex(), SCOPE.namespace.digest.hex(), "s0of1", None, json.loads(SCOPE.namespace.canonical))
DEFAULTS = {"-max_total_time": "120", "-timeout": "5", "-rss_limit_mb": "1024", "-max_len": "5000"}

_buffer = aligned_buffer(len(RECORD))
_checker = RecordChecker(OsCalls())
_file = Path(tempfile.mkdtemp(prefix="record-fuzz-")) / "record"


def parse(page: bytes) -> None:
    """The header parser of the tools."""
    try:
        header = parse_header(page)
    except RecordDamaged as error:
        assert error.kind
        return
    assert header.record_bytes % 4096 == 0
    assert len(header.address) == len(header.namespace) == 32


def load(content: bytes) -> None:
    """The comparison on the load path: a hit is the record, byte for byte."""
    _buffer[:] = (content + RECORD[len(content) :])[: len(RECORD)]
    assert (FORMAT.verify(ADDRESS, _buffer) == Outcome.HIT) == (bytes(_buffer) == RECORD)


def check(content: bytes) -> None:
    """The check of a file by the tools."""
    whole = content + RECORD[len(content) :] if len(content) % 2 else content
    _file.write_bytes(whole)
    assert (_checker.check(str(_file), None, EXPECTED).kind == "") == (whole == RECORD)


def describe(text: bytes) -> None:
    """The parser of a namespace's description, and the check of a record against it."""
    try:
        fields = parse_namespace(text, hashlib.sha256(text).hexdigest())
    except RecordDamaged:
        return
    _file.write_bytes(RECORD)
    assert _checker.check(str(_file), None, Expected(fields=fields)).kind in ("", "geometry")


TARGETS = (parse, load, check, describe)


def one_input(content: bytes) -> None:
    """The first byte chooses the target, a set high bit frames the rest as a page."""
    if not content:
        return
    rest = content[1:]
    if content[0] & 128:
        rest = (HEADER_BYTES - 8).to_bytes(8, "little") + rest[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8)
    TARGETS[content[0] % len(TARGETS)](rest)


def main() -> None:
    """Runs libFuzzer with a corpus made of a whole record, its header and its namespace."""
    given = sys.argv[1:]
    options = [f"{name}={value}" for name, value in DEFAULTS.items() if not any(a.startswith(name) for a in given)]
    corpus = []
    if all(argument.startswith("-") for argument in given):
        folder = Path(tempfile.mkdtemp(prefix="record-fuzz-corpus-"))
        text = RECORD[8:HEADER_BYTES].rstrip()
        seeds = [bytes([number]) + RECORD[:HEADER_BYTES] for number in range(3)]
        seeds += [bytes([number + 128]) + text for number in range(3)]
        seeds += [b"\x03" + SCOPE.namespace.canonical, b"\x03{}"]
        for number, seed in enumerate(seeds):
            (folder / str(number)).write_bytes(seed)
        corpus.append(str(folder))
    atheris.Setup([sys.argv[0], *options, *given, *corpus], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
