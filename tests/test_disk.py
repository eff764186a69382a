"""The disk tier: bits are kept, a killed writer leaves whole records, descriptors and modes are as they should be."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from disk_faults import NEVER, Bench, read, write

from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_geometry, sample_scope, sealed_record
from kvstore.tiers.disk_draft import PIECE_BYTES
from kvstore.tiers.record import RecordFormat, parse_header


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


FORMATS = [("float16", 2), ("bfloat16", 2), ("uint8", 1), ("fp8_e4m3", 1), ("fp8_e5m2", 1), ("float32", 4)]


@pytest.mark.parametrize(("dtype", "itemsize"), FORMATS)
def test_b37_bits_are_kept(bench: Bench, dtype: str, itemsize: int) -> None:
    count = 256 if itemsize == 1 else 65536
    patterns = np.arange(count, dtype=f"<u{min(itemsize, 2)}")
    if itemsize == 4:
        patterns = np.random.default_rng(37).integers(0, 2**32, count, dtype="<u4")
        patterns[:4] = (0x7FC00001, 0xFFFFFFFF, 0x80000000, 0x7F800001)  # NaN payloads, -0, a signalling NaN
    content = count // 32
    scope = sample_scope(f"b37-{dtype}", sample_geometry(layers=1, heads=1, content=content, dtype=dtype))
    geometry = scope.geometries[0]
    assert geometry.payload_bytes == patterns.nbytes
    buffer = aligned_buffer(geometry.slot_bytes)
    np.frombuffer(buffer, np.uint8)[HEADER_BYTES : HEADER_BYTES + patterns.nbytes] = patterns.view(np.uint8)
    RecordFormat(scope.namespace, geometry).seal(sample_address(0), buffer)
    assert bench.open(scope).write([sample_address(0)], [buffer], NEVER) == [Outcome.STORED]
    target = aligned_buffer(geometry.slot_bytes)
    assert bench.open(scope).read([sample_address(0)], [target], NEVER) == [Outcome.HIT]
    kept = np.frombuffer(target, patterns.dtype, count, HEADER_BYTES)
    assert np.array_equal(kept, patterns)


def test_without_direct_io_records_are_kept_and_the_status_says_so(bench: Bench) -> None:
    bench.calls.refuse_flags = os.O_DIRECT
    tier = bench.open()
    assert write(tier, [1, 2]) == [Outcome.STORED] * 2
    assert read(tier, [1, 2]) == [Outcome.HIT] * 2
    assert tier.status().notes == ("buffered",)


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_without_unnamed_files_records_are_kept_and_no_name_is_left(bench: Bench, direct: int) -> None:
    bench.calls.refuse_flags = os.O_TMPFILE | direct
    tier = bench.open()
    assert write(tier, [1, 2]) == [Outcome.STORED] * 2
    assert read(bench.open(), [1, 2]) == [Outcome.HIT] * 2
    assert "named temporary files" in tier.status().notes
    bench.calls.fail["write"] = errno.EIO
    assert write(tier, [3]) == [Outcome.UNAVAILABLE]
    assert bench.leftovers() == []


def test_a_draft_of_a_dead_writer_is_collected_and_a_living_ones_stays(bench: Bench) -> None:
    write(bench.open(), [1])
    place = bench.record(sample_address(1)).parent
    dead, living = place / f".tmp-{'0' * 16}", place / f".tmp-{'1' * 16}"
    dead.write_bytes(b"x")
    living.write_bytes(b"x")
    fd = os.open(living, os.O_RDWR)
    bench.calls.lock(fd)
    (bench.root / ".ledger").unlink()
    write(bench.open(), [2])
    os.close(fd)
    assert not dead.exists()
    assert living.exists()


def test_a_store_whose_directories_were_removed_starts_again(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    subprocess.run(["rm", "-rf", bench.record(sample_address(1)).parent.parent.parent], check=True)
    assert read(tier, [1]) == [Outcome.MISS]
    assert write(tier, [1]) == [Outcome.STORED]
    assert read(bench.open(), [1]) == [Outcome.HIT]


def test_closing_gives_every_descriptor_back(bench: Bench) -> None:
    before = open_descriptors()
    tier = bench.open()
    write(tier, range(20))
    read(tier, range(20))
    list(tier.scan())
    tier.use_epoch("f" * 16)
    assert open_descriptors() > before
    tier.close()
    assert open_descriptors() == before


def test_files_and_directories_are_for_their_owner_only(bench: Bench) -> None:
    old = os.umask(0)
    try:
        write(bench.open(), [1])
    finally:
        os.umask(old)
    for path in [bench.root, *bench.root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_passed_deadline_ends_a_large_read_and_write_between_pieces(bench: Bench) -> None:
    scope = sample_scope("large", sample_geometry(layers=8, heads=1, content=65536))
    size = scope.geometries[0].slot_bytes
    assert size > 2 * PIECE_BYTES
    bench.capacity = 4 * size
    tier = bench.open(scope)
    assert write(tier, [1], scope) == [Outcome.STORED]

    def tick() -> None:
        bench.seconds += 1

    bench.calls.before["read"] = bench.calls.before["write"] = tick
    start = bench.seconds
    assert tier.read([sample_address(1)], [aligned_buffer(size)], start + 1) == [Outcome.TIMEOUT]
    assert bench.seconds == start + 1
    record = sealed_record(scope, sample_address(2), 2)
    assert tier.write([sample_address(2)], [record], bench.seconds + 1) == [Outcome.TIMEOUT]
    assert len(bench.records()) == 1
    assert tier.status().used_bytes == bench.used_bytes()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from disk_faults import Bench
from disk_faults import write
bench = Bench(Path({root!r}))
if {named}:
    import os
    bench.calls.refuse_flags = os.O_TMPFILE
tier = bench.open()
print("ready", flush=True)
number = 0
while True:
    write(tier, [number])
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_killed_writer_leaves_whole_records_and_everything_it_reported(bench: Bench, named: bool) -> None:
    text = WRITER.format(tests=str(Path(__file__).parent), root=str(bench.root), named=named)
    for wanted in (3, 17, 40):
        writer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        reported = -1
        for line in writer.stdout:
            reported = reported if line == "ready\n" else int(line)
            if reported >= wanted:
                break
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait()
        reported = int(lines[-1]) if lines else reported
        tier = bench.open()
        assert read(tier, range(reported + 1)) == [Outcome.HIT] * (reported + 1)
        for path in bench.records():
            assert parse_header(path.read_bytes()[:HEADER_BYTES]).record_bytes == path.stat().st_size
        assert write(tier, [10_000 + wanted]) == [Outcome.STORED]
        assert bench.leftovers() == []
        assert tier.status().used_bytes == bench.used_bytes()
