"""Much damage in a short time is the disk's fault: dropping stops, the tier answers nothing, and is tried again."""

from __future__ import annotations

import logging

import pytest
from disk_faults import SLOT, Bench, read, write

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_breaker import DROPS, RETRY_SECONDS, WINDOW_SECONDS, DropBreaker

COUNT = 20
NOTE = f"breaker open: more than {DROPS} damaged records a minute"


def _damaged(bench: Bench) -> DiskTier:
    """A tier whose records but the last are all damaged."""
    tier = bench.open()
    write(tier, range(COUNT))
    for number in range(COUNT - 1):
        bench.record(sample_address(number)).write_bytes(bytes(SLOT))
    return tier


def test_more_damage_than_is_dropped_a_minute_opens_the_breaker(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    tier = _damaged(bench)
    with caplog.at_level(logging.INFO):
        outcomes = read(tier, range(COUNT))
    assert outcomes == [Outcome.DAMAGED] * (DROPS + 1) + [Outcome.UNAVAILABLE] * (COUNT - DROPS - 1)
    assert len(bench.records()) == COUNT - DROPS
    assert write(tier, [100]) == [Outcome.SKIPPED]
    assert read(tier, [COUNT - 1]) == [Outcome.UNAVAILABLE]
    assert tier.status().notes == (NOTE,)
    assert bench.counters.value("missed_records_total", tier="disk", reason="breaker_open") == COUNT - DROPS
    assert [r.message.split(" kind")[0] for r in caplog.records] == ["disk breaker open"]


def test_an_open_breaker_reads_nothing(bench: Bench) -> None:
    tier = _damaged(bench)
    read(tier, range(COUNT))
    bench.calls.before["open"] = bench.calls.before["stat"] = lambda: pytest.fail("the disk was used")
    assert read(tier, [COUNT - 1]) == [Outcome.UNAVAILABLE]
    assert write(tier, [100]) == [Outcome.SKIPPED]
    bench.calls.before.clear()


@pytest.mark.parametrize("verb", [read, write])
def test_one_attempt_in_ten_seconds_closes_it_when_it_succeeds(
    bench: Bench, caplog: pytest.LogCaptureFixture, verb: object
) -> None:
    tier = _damaged(bench)
    read(tier, range(COUNT))
    bench.seconds += RETRY_SECONDS - 0.1
    assert read(tier, [COUNT - 1]) == [Outcome.UNAVAILABLE]
    bench.seconds += 0.1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        if verb is read:
            assert read(tier, [COUNT - 1]) == [Outcome.HIT]
        else:
            assert write(tier, [100]) == [Outcome.STORED]
        assert read(tier, [COUNT - 1]) == [Outcome.HIT]
    assert tier.status().notes == ()
    assert [r.message.split(" path")[0] for r in caplog.records] == ["disk breaker closed"]


def test_an_attempt_that_finds_damage_drops_nothing_and_is_the_only_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _damaged(bench)
    read(tier, range(COUNT))
    left = len(bench.records())
    bench.seconds += RETRY_SECONDS
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert read(tier, [COUNT - 2, COUNT - 1]) == [Outcome.DAMAGED, Outcome.UNAVAILABLE]
    assert len(bench.records()) == left
    assert caplog.records == []


def test_while_an_attempt_runs_nobody_else_makes_one() -> None:
    seconds = 0.0
    breaker = DropBreaker(lambda: seconds, "store")
    for _ in range(DROPS + 1):
        breaker.may_drop("checksum")
    seconds = RETRY_SECONDS
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.undecided()
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.succeeded()
    assert [breaker.allows(), breaker.allows()] == [True, True]


def test_dropping_goes_on_a_minute_later_and_the_store_heals(bench: Bench) -> None:
    tier = _damaged(bench)
    read(tier, range(COUNT))
    for _ in range(COUNT):
        bench.seconds += WINDOW_SECONDS
        read(tier, range(COUNT))
    assert read(tier, [*range(COUNT)]) == [Outcome.MISS] * (COUNT - 1) + [Outcome.HIT]
    assert write(tier, range(COUNT)) == [Outcome.STORED] * COUNT
    assert read(tier, range(COUNT)) == [Outcome.HIT] * COUNT


def test_damage_that_is_spread_over_time_is_dropped_record_by_record(bench: Bench) -> None:
    tier = _damaged(bench)
    for number in range(COUNT - 1):
        assert read(tier, [number]) == [Outcome.DAMAGED]
        bench.seconds += WINDOW_SECONDS / DROPS
    assert len(bench.records()) == 1
    assert tier.status().notes == ()


def test_what_is_no_record_of_ours_is_not_held_against_the_disk(bench: Bench) -> None:
    tier = bench.open()
    write(tier, range(COUNT))
    for number in range(COUNT):
        path = bench.record(sample_address(number))
        path.unlink()
        path.symlink_to("nowhere")
    assert read(tier, range(COUNT)) == [Outcome.DAMAGED] * COUNT
    assert tier.status().notes == ()
    assert write(tier, range(COUNT)) == [Outcome.STORED] * COUNT
