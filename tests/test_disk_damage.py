"""What is not exactly the record asked for is never served by the disk tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disk_faults import NEVER, SCOPE, SLOT, Bench, read, write

from kvstore.errors import ContractError
from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record


def _truncate(path: Path) -> None:
    os.truncate(path, SLOT - 4096)


def _flip_payload(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 5] ^= 1
    path.write_bytes(content)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(SLOT))


def _swap(path: Path) -> None:
    path.write_bytes(bytes(sealed_record(SCOPE, sample_address(2), 2)))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


BROKEN = {
    "checksum": _flip_payload,
    "size": _truncate,
    "header_length": _zero,
    "address": _swap,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_record_is_no_hit_counted_by_kind_and_dropped(bench: Bench, kind: str) -> None:
    tier = bench.open()
    write(tier, [1, 2])
    BROKEN[kind](bench.record(sample_address(1)))
    assert read(tier, [1]) == [Outcome.DAMAGED]
    assert bench.counters.value("missed_records_total", tier="disk", reason=kind) == 1
    assert read(tier, [1, 2]) == [Outcome.MISS, Outcome.HIT]
    assert bench.used_bytes() <= tier.status().used_bytes < 2 * SLOT
    assert write(tier, [1]) == [Outcome.STORED]
    assert read(tier, [1]) == [Outcome.HIT]


def test_an_empty_file_is_damage(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    _empty(bench.record(sample_address(1)))
    assert tier.contains([sample_address(1)], NEVER) == [Outcome.MISS]
    assert read(tier, [1]) == [Outcome.DAMAGED]


def test_another_namespaces_record_is_a_miss_and_stays(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    path = bench.record(sample_address(1))
    path.write_bytes(bytes(sealed_record(sample_scope("another"), sample_address(1), 1)))
    assert read(tier, [1]) == [Outcome.MISS]
    assert bench.counters.value("missed_records_total", reason="namespace") == 1
    assert path.exists()
    assert write(tier, [1]) == [Outcome.STORED]
    assert read(tier, [1]) == [Outcome.HIT]


def test_a_client_that_may_not_write_drops_nothing(bench: Bench) -> None:
    write(bench.open(), [1])
    _zero(bench.record(sample_address(1)))
    assert read(bench.open(writer=False), [1]) == [Outcome.DAMAGED]
    assert len(bench.records()) == 1


def test_a_damaged_record_that_was_replaced_meanwhile_stays(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    path = bench.record(sample_address(1))
    whole = path.read_bytes()
    _zero(path)

    def replace() -> None:
        bench.calls.before.clear()
        path.with_suffix(".new").write_bytes(whole)
        path.with_suffix(".new").rename(path)

    bench.calls.before["read"] = replace
    assert read(tier, [1]) == [Outcome.DAMAGED]
    assert read(tier, [1]) == [Outcome.HIT]


def _symlink(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


STRANGE = {"symlink": _symlink, "fifo": _fifo, "directory": _directory, "owner": _foreign}


@pytest.mark.parametrize("thing", STRANGE)
@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_what_is_no_file_of_ours_is_never_served_and_a_write_replaces_it(bench: Bench, thing: str, flags: int) -> None:
    if thing == "owner" and os.geteuid():
        pytest.skip("giving a file away needs root")
    bench.calls.refuse_flags = flags
    tier = bench.open()
    write(tier, [1])
    path = bench.record(sample_address(1))
    STRANGE[thing](path)
    kind = {"fifo": "not_a_file", "directory": "not_a_file"}.get(thing, thing)
    assert tier.contains([sample_address(1)], NEVER) == [Outcome.MISS]
    assert bench.counters.value("missed_records_total", reason=kind) == 1
    assert read(tier, [1]) == [Outcome.DAMAGED]
    assert bench.counters.value("missed_records_total", reason=kind) == 2
    assert path.is_symlink() or path.exists()
    assert write(tier, [1]) == [Outcome.STORED]
    assert read(tier, [1]) == [Outcome.HIT]


def test_an_unsealed_buffer_is_refused(bench: Bench) -> None:
    tier = bench.open()
    with pytest.raises(ContractError, match="not sealed"):
        tier.write([sample_address(1)], [sealed_record(SCOPE, sample_address(2), 2)], NEVER)
    with pytest.raises(ContractError, match="not sealed"):
        tier.write([sample_address(1)], [aligned_buffer(SLOT)], NEVER)
