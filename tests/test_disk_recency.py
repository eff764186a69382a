"""What goes first: the tail of what was used longest ago, whatever the clock does."""

from __future__ import annotations

import os
from collections.abc import Sequence

from disk_faults import NEVER, SCOPE, SLOT, Bench, read, write

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sealed_record
from kvstore.tiers.disk import DiskTier

YEAR_NS = 365 * 86400 * 10**9


def left(tier: DiskTier, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if tier.contains([sample_address(n)], NEVER) == [Outcome.HIT]]


def mtime(bench: Bench, number: int) -> int:
    return bench.record(sample_address(number)).stat().st_mtime_ns


def store(tier: DiskTier, number: int, used_ns: int) -> None:
    address = sample_address(number)
    assert tier.write([address], [sealed_record(SCOPE, address, number)], NEVER, [used_ns]) == [Outcome.STORED]


def test_a_chain_that_was_stored_in_one_batch_is_evicted_from_its_tail(bench: Bench) -> None:
    bench.capacity = 6 * SLOT
    tier = bench.open()
    write(tier, range(6))
    bench.time_ns += 10**9
    write(tier, [10, 11])
    assert left(tier, range(6)) == [0, 1, 2, 3]


def test_a_chain_that_was_stored_piece_by_piece_is_evicted_from_its_tail(bench: Bench) -> None:
    bench.capacity = 6 * SLOT
    tier = bench.open()
    began = bench.time_ns
    for position in range(6):
        bench.time_ns += 3 * 10**9  # prefill of the next chunk takes a while
        store(tier, position, began - position)
    assert [mtime(bench, n) for n in range(6)] == [began - n for n in range(6)]
    for number in (10, 11, 12):
        store(tier, number, bench.time_ns)
    assert left(tier, range(6)) == [0, 1, 2]


def test_a_use_in_the_future_counts_as_now(bench: Bench) -> None:
    tier = bench.open()
    store(tier, 1, bench.time_ns + YEAR_NS)
    assert mtime(bench, 1) == bench.time_ns


def test_storing_again_leaves_the_time_of_last_use(bench: Bench) -> None:
    tier = bench.open()
    store(tier, 1, 10**18)
    store(tier, 1, 2 * 10**18 - 1)
    assert mtime(bench, 1) == 10**18


def test_the_probers_client_marks_uses_though_it_writes_nothing(bench: Bench) -> None:
    writer = bench.open()
    store(writer, 1, 10**18)
    bench.open(writer=False).touch([sample_address(1)])
    assert mtime(bench, 1) == bench.time_ns


def test_a_clock_that_was_set_back_keeps_no_record_for_ever(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    tier = bench.open()
    bench.time_ns += YEAR_NS
    store(tier, 1, bench.time_ns - 5)
    store(tier, 2, bench.time_ns)
    bench.time_ns -= YEAR_NS  # now both are of next year
    store(tier, 3, bench.time_ns - 10)
    store(tier, 4, bench.time_ns - 9)
    store(tier, 5, bench.time_ns)  # searches: they count as used now, the later one as the later one
    assert left(tier, range(1, 6)) == [1, 2, 4, 5]
    assert mtime(bench, 1) < mtime(bench, 2) <= bench.time_ns
    for number in (6, 7, 8, 9):
        bench.time_ns += 10**9
        store(tier, number, bench.time_ns)
    assert left(tier, range(1, 10)) == [6, 7, 8, 9]


def test_a_victim_that_was_used_since_the_search_is_none(bench: Bench) -> None:
    bench.capacity = 4 * SLOT
    tier = bench.open()
    for number in range(4):
        store(tier, number, 10**18 + number)
    store(tier, 4, bench.time_ns)
    assert left(tier, range(5)) == [1, 2, 3, 4]
    bench.open(writer=False).touch([sample_address(1)])
    store(tier, 5, bench.time_ns)
    assert left(tier, range(6)) == [1, 3, 4, 5]


def test_reading_alone_changes_no_time(bench: Bench) -> None:
    tier = bench.open()
    store(tier, 1, 10**18)
    assert read(tier, [1]) == [Outcome.HIT]
    status = os.stat(bench.record(sample_address(1)))  # noqa: PTH116
    assert status.st_mtime_ns == 10**18
