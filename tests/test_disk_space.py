"""The disk tier stays below its capacity and gives up what was used longest ago."""

from __future__ import annotations

import os
import threading

from disk_faults import NEVER, SLOT, Bench, read, write

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sample_geometry, sample_scope

MINUTE_NS = 60 * 10**9


def test_a_full_store_evicts_the_oldest_and_never_passes_its_capacity(bench: Bench) -> None:
    bench.capacity = 8 * SLOT
    tier = bench.open()
    highest = 0

    def watch() -> None:
        nonlocal highest
        highest = max(highest, bench.used_bytes() + SLOT)  # a link is about to add one

    bench.calls.before["link"] = watch
    evicted: list[bytes] = []
    for number in range(30):
        assert write(tier, [number]) == [Outcome.STORED]
        assert tier.status().used_bytes == bench.used_bytes() <= bench.capacity
        os.utime(bench.record(sample_address(number)), ns=(number, number + 10**18))
        for epoch, addresses in tier.take_evicted():
            assert epoch == tier.published_epoch()
            evicted += addresses
    assert highest <= bench.capacity
    assert evicted == [sample_address(n) for n in range(22)]
    assert read(tier, range(30)) == [Outcome.MISS] * 22 + [Outcome.HIT] * 8
    assert bench.counters.value("evicted_chunks_total", tier="disk") == 22


def test_capacity_is_shared_by_all_namespaces_and_others_evictions_are_not_reported(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    other = sample_scope("older")
    write(bench.open(other), range(3), other)
    for path in bench.records():
        os.utime(path, (1, 1))
    tier = bench.open()
    assert write(tier, range(10, 14)) == [Outcome.STORED] * 4
    assert tier.take_evicted() == []
    assert tier.contains([sample_address(n) for n in range(10, 14)], NEVER) == [Outcome.HIT] * 4
    assert bench.counters.value("evicted_chunks_total", tier="disk") == 3


def test_what_an_earlier_life_left_is_counted(bench: Bench) -> None:
    write(bench.open(), range(6))
    bench.capacity = 4 * SLOT
    tier = bench.open()
    assert write(tier, [10]) == [Outcome.STORED]
    assert tier.status().used_bytes == bench.used_bytes() == 4 * SLOT
    assert tier.status().records == 4


def test_a_record_larger_than_the_capacity_is_refused_and_evicts_nothing(bench: Bench) -> None:
    bench.capacity = SLOT
    tier = bench.open()
    write(tier, [1])
    large = sample_scope("large", sample_geometry(layers=9))
    assert write(bench.open(large), [2], large) == [Outcome.FULL]
    assert read(tier, [1]) == [Outcome.HIT]
    assert bench.counters.value("tier_errors_total", reason="too_large") == 1


def test_min_free_of_the_file_system_stays_free(bench: Bench) -> None:
    bench.min_free = 0.05
    total = 1000 * SLOT
    bench.calls.free = (total, 52 * SLOT)
    tier = bench.open()
    assert write(tier, [1, 2]) == [Outcome.STORED] * 2
    bench.calls.free = (total, 50 * SLOT)
    assert write(tier, [3]) == [Outcome.STORED]
    assert len(bench.records()) == 2
    bench.calls.free = (total, 10 * SLOT)
    assert write(tier, [4]) == [Outcome.FULL]
    assert tier.status().notes == ("not writing: min_free",)


def test_a_record_used_since_the_scan_is_not_the_victim(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    tier = bench.open()
    write(tier, range(4))
    for number in range(4):
        os.utime(bench.record(sample_address(number)), (number + 1, number + 1))
    assert write(tier, [4]) == [Outcome.STORED]
    tier.touch([sample_address(1)])
    assert write(tier, [5]) == [Outcome.STORED]
    assert tier.contains([sample_address(n) for n in range(4)], NEVER) == [
        Outcome.MISS,
        Outcome.HIT,
        Outcome.MISS,
        Outcome.HIT,
    ]


def test_only_names_of_the_exact_pattern_are_removed(bench: Bench) -> None:
    bench.capacity = 2 * SLOT
    tier = bench.open()
    write(tier, [1])
    shard = bench.record(sample_address(1)).parent.parent
    keep = [
        shard / "00" / "note.txt",
        shard / "00" / ("ff" * 32 + ".safetensors"),
        shard / "00" / ("00" * 32 + ".safetensors.bak"),
        shard / "zz" / ("00" * 32 + ".safetensors"),
        bench.root / "photos" / "00" / ("00" * 32 + ".safetensors"),
    ]
    for path in keep:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SLOT))
    write(tier, range(10))
    assert all(path.exists() for path in keep)


def test_outside_deletion_gives_room_again(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    tier = bench.open()
    write(tier, range(4))
    for path in bench.records():
        path.unlink()
    assert write(tier, range(10, 14)) == [Outcome.STORED] * 4
    assert tier.take_evicted() == []
    assert read(tier, range(10, 14)) == [Outcome.HIT] * 4


def test_many_threads_stay_below_the_capacity(bench: Bench) -> None:
    bench.capacity = 10 * SLOT
    tier = bench.open()
    over: list[int] = []

    def watch() -> None:
        # Every file that has a name now, and this one, was claimed before.
        if tier.status().used_bytes > bench.capacity:
            over.append(tier.status().used_bytes)

    bench.calls.before["link"] = watch

    def burst(start: int) -> None:
        for number in range(start, start + 40):
            assert write(tier, [number]) == [Outcome.STORED]

    threads = [threading.Thread(target=burst, args=(n * 100,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    assert tier.status().used_bytes == bench.used_bytes()
    assert tier.status().records == len(bench.records()) == 10


def test_a_touched_chain_is_newer_at_its_head_and_once_in_ten_minutes(bench: Bench) -> None:
    tier = bench.open()
    write(tier, range(4))
    chain = [sample_address(n) for n in range(4)]
    for address in chain:
        os.utime(bench.record(address), (1, 1))

    def times() -> list[int]:
        return [bench.record(address).stat().st_mtime_ns for address in chain]

    tier.touch(chain)
    assert times() == [bench.time_ns - n for n in range(4)]
    bench.time_ns += 9 * MINUTE_NS
    tier.touch(chain)
    assert len(bench.calls.utimes) == 4
    bench.time_ns += 2 * MINUTE_NS
    tier.touch(chain)
    assert times() == [bench.time_ns - n for n in range(4)]


def test_a_fresh_tail_becomes_older_than_its_head(bench: Bench) -> None:
    tier = bench.open()
    bench.time_ns = 10**18
    write(tier, [1])
    bench.time_ns += 1
    write(tier, [2])
    head, tail = sample_address(1), sample_address(2)
    bench.time_ns = bench.record(tail).stat().st_mtime_ns + 10**6
    tier.touch([head, tail])
    assert bench.record(head).stat().st_mtime_ns > bench.record(tail).stat().st_mtime_ns


def test_a_time_in_the_future_is_set_back(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    os.utime(bench.record(sample_address(1)), ns=(0, bench.time_ns + 10**15))
    tier.touch([sample_address(1)])
    assert bench.record(sample_address(1)).stat().st_mtime_ns == bench.time_ns
