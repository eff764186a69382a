"""Acceptance cases of the disk tier's capacity and of directories that processes share, named after them."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from disk_faults import NEVER, SLOT, Bench, read, write
from disk_processes import bench_at, share, write_slowly, write_until_killed

from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address
from kvstore.tiers.disk_pause import RETRY_SECONDS
from kvstore.tiers.record import parse_header
from kvstore.units import GIB, MIB
from tests.crash import judge

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 60.0


def started(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process of its own and the pipe to it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def received(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE), "the other process is silent"
    return pipe.recv()


def test_b54_storing_a_resident_record_again_changes_nothing(bench: Bench) -> None:
    bench.capacity = 8 * SLOT
    tier = bench.open()
    assert write(tier, range(8)) == [Outcome.STORED] * 8
    before = bench.record(sample_address(3)).stat()
    for _ in range(100):
        assert write(tier, [3]) == [Outcome.STORED]
    after = bench.record(sample_address(3)).stat()
    assert tier.status().used_bytes == 8 * SLOT == bench.used_bytes()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert bench.counters.value("evicted_chunks_total") == 0
    assert read(tier, range(8)) == [Outcome.HIT] * 8


@pytest.mark.parametrize("clients", [1, 2])
def test_b54_two_who_store_the_same_record_at_once_store_it_once(bench: Bench, clients: int) -> None:
    tiers = [bench.open() for _ in range(clients)]
    meeting = threading.Barrier(2)
    outcomes: list[Outcome] = []

    def both_are_writing() -> None:
        if threading.current_thread() is not threading.main_thread():
            meeting.wait(PATIENCE)

    def store(number: int) -> None:
        outcomes.extend(write(tiers[number % clients], [1]))

    if clients == 2:
        bench.calls.before["write"] = both_are_writing
    threads = [threading.Thread(target=store, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Outcome.STORED in outcomes
    assert set(outcomes) <= {Outcome.STORED, Outcome.SKIPPED}
    assert len(bench.records()) == 1
    assert tiers[0].status().used_bytes == SLOT == bench.used_bytes()
    assert tiers[0].status().records == 1


def test_b75_a_full_device_stops_writing_and_the_retry_makes_room(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = bench.open()
    assert write(tier, range(4)) == [Outcome.STORED] * 4
    writes: list[int] = []
    bench.calls.before["write"] = lambda: writes.append(1)
    bench.calls.fail["write"] = errno.ENOSPC
    with caplog.at_level(logging.INFO):
        assert write(tier, [4, 5, 6]) == [Outcome.FULL, Outcome.SKIPPED, Outcome.SKIPPED]
        bench.seconds += RETRY_SECONDS - 1
        assert write(tier, [7]) == [Outcome.SKIPPED]
    assert len(writes) == 1
    assert len(caplog.records) == 1
    assert bench.counters.value("tier_errors_total", tier="disk", reason="ENOSPC") == 1
    assert bench.leftovers() == []
    assert read(tier, range(4)) == [Outcome.HIT] * 4
    bench.seconds += 1
    assert write(tier, [4]) == [Outcome.FULL]
    # It was refused twice though the file system promised room: what was written is all that fits.
    bench.calls.fail.clear()
    bench.seconds += RETRY_SECONDS
    assert write(tier, [4, 5]) == [Outcome.STORED] * 2
    assert len(bench.records()) == 4
    assert tier.status().used_bytes == bench.used_bytes()
    bench.seconds += 60
    assert write(tier, [6, 7]) == [Outcome.STORED] * 2
    assert len(bench.records()) == 6


def test_b75_the_effective_capacity_is_read_anew_and_evicted_down_to(bench: Bench) -> None:
    bench.min_free = 0.05
    bench.calls.free = (1000 * SLOT, 60 * SLOT)
    tier = bench.open()
    assert write(tier, range(8)) == [Outcome.STORED] * 8
    bench.calls.free = (1000 * SLOT, 46 * SLOT)  # somebody else filled the device: 4 below what has to stay free
    assert write(tier, [8]) == [Outcome.STORED]
    assert len(bench.records()) == 4


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "device"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", place], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting is not allowed")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_b75_on_a_real_small_device_room_is_made_before_it_is_full(small_device: Path) -> None:
    bench = Bench(small_device / "store", capacity=GIB, min_free=0.05)
    tier = bench.open()
    assert write(tier, range(600)) == [Outcome.STORED] * 600
    assert bench.counters.value("tier_errors_total") == 0
    assert 600 * SLOT > 4 * MIB > bench.used_bytes() > 3 * MIB
    assert tier.status().used_bytes == bench.used_bytes()
    bench.close()


def test_b77_the_limit_is_real(bench: Bench) -> None:
    bench.capacity = 8 * SLOT
    tier = bench.open()
    evicted = 0
    for number in range(100):
        bench.time_ns += 10**9
        address = sample_address(number)
        assert write(tier, [number]) == [Outcome.STORED]
        os.utime(bench.record(address), ns=(bench.time_ns, bench.time_ns))
        assert bench.used_bytes() <= bench.capacity
        evicted += sum(len(addresses) for _epoch, addresses in tier.take_evicted())
    left = [n for n in range(100) if read(tier, [n]) == [Outcome.HIT]]
    assert left == list(range(100 - len(left), 100))
    assert 4 <= len(left) <= 8
    assert evicted == 100 - len(left)


@pytest.mark.parametrize("refuse_flags", [0, os.O_TMPFILE], ids=["unnamed", "named"])
def test_b79_killed_writers_leave_whole_records_and_nothing_else(bench: Bench, refuse_flags: int) -> None:
    for life in range(10):
        process, pipe = started(write_until_killed, bench.root, bench.capacity, 1000 * life, refuse_flags)
        last = received(pipe)
        while last < 1000 * life + 3 * life:
            last = received(pipe)
        process.kill()
        process.join()
        while pipe.poll():
            try:
                last = pipe.recv()
            except EOFError:
                break
        tier = bench.open()
        tier.measure()
        assert bench.leftovers() == []
        reported = range(1000 * life, last + 1)
        assert read(tier, reported) == [Outcome.HIT] * len(reported)
        for path in bench.records():
            assert parse_header(path.read_bytes()[:HEADER_BYTES]).record_bytes == path.stat().st_size
        assert tier.status().used_bytes == bench.used_bytes()
        tier.close()


def test_b79_the_draft_of_a_live_process_is_kept_however_old_it_looks(bench: Bench) -> None:
    bench.open().close()
    process, pipe = started(write_slowly, bench.root, bench.capacity, 1)
    assert received(pipe) == "in mid-write"
    (draft,) = bench.root.rglob(".tmp-*")
    os.utime(draft, (time.time() - 600, time.time() - 600))
    (bench.root / ".ledger").unlink()
    tier = bench.open()
    tier.measure()  # counts all, and collects what the dead left
    assert draft.exists()
    pipe.send("go on")
    assert received(pipe) == [Outcome.STORED]
    assert read(tier, [1]) == [Outcome.HIT]
    assert tier.status().used_bytes == bench.used_bytes()
    pipe.send("end")
    process.join(PATIENCE)
    bench.close()
    assert bench.leftovers() == []


@pytest.mark.parametrize("refuse_flags", [0, os.O_TMPFILE], ids=["unnamed", "named"])
def test_b79_a_failed_write_of_a_live_process_leaves_nothing_at_once(bench: Bench, refuse_flags: int) -> None:
    bench.calls.refuse_flags = refuse_flags
    tier = bench.open()
    for call in ("write", "link"):
        bench.calls.fail[call] = errno.EIO
        assert write(tier, [1]) == [Outcome.UNAVAILABLE]
        assert bench.records() == []
        assert list(bench.root.rglob(".tmp-*")) == []
        assert tier.status().used_bytes == 0
        bench.calls.fail.clear()
        bench.seconds += RETRY_SECONDS


def test_b84_processes_share_a_directory(bench: Bench) -> None:
    bench.capacity = 16 * SLOT
    bench.open().close()
    workers = [started(share, bench.root, bench.capacity, seed, 60, 400) for seed in range(2)]
    verdicts = judge.Verdicts()
    while any(process.is_alive() for process, _pipe in workers):
        judge.sample(bench.root, bench.capacity, verdicts)
        time.sleep(0.002)
    for process, pipe in workers:
        stored, hits = received(pipe)
        assert stored > 0
        assert hits > 0
        process.join(PATIENCE)
    assert verdicts.violations == []
    assert verdicts.samples > 10
    tier = bench.open()
    tier.measure()
    assert tier.status().used_bytes == bench.used_bytes() <= bench.capacity


def test_b84_what_one_process_stored_hits_in_another_without_a_new_listing(bench: Bench) -> None:
    tier = bench.open()
    assert list(tier.scan()) == []
    process, pipe = started(write_until_killed, bench.root, bench.capacity, 0, 0)
    while received(pipe) < 5:
        pass
    process.kill()
    process.join()
    bench.calls.scandir = None  # type: ignore[assignment, method-assign]
    assert tier.contains([sample_address(n) for n in range(6)], NEVER) == [Outcome.HIT] * 6
    assert read(tier, range(6)) == [Outcome.HIT] * 6
    del bench.calls.scandir


def test_b84_what_one_process_evicted_is_a_miss_in_another(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    one = bench.open()
    write(one, range(4))
    other = bench_at(bench.root, bench.capacity)
    bench.time_ns = other.time_ns = time.time_ns() + 10**9
    assert write(other.open(), range(10, 14)) == [Outcome.STORED] * 4
    assert read(one, range(4)) == [Outcome.MISS] * 4
    assert one.take_evicted() == []
    assert bench.counters.value("missed_records_total", reason="absent") == 4
    other.close()
