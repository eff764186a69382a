"""Errors of the operating system under the disk tier: nothing is left behind, and the answers are honest."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import pytest
from disk_faults import NEVER, SCOPE, SLOT, Bench, read, write

from kvstore.keys import Addresser, chunk_hashes
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sealed_record
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_pause import RETRY_SECONDS


def _prefix_tokens(tier: DiskTier, addresses: Sequence[bytes]) -> int:
    """Tokens of the leading chunks that the tier has, 16 a chunk."""
    outcomes = tier.contains(addresses, NEVER)
    return 16 * next((i for i, outcome in enumerate(outcomes) if outcome != Outcome.HIT), len(outcomes))


class Injected(Exception):
    """Not an operating system error: nothing in the tier expects it."""


@pytest.mark.parametrize("fault", ["exception", "short write", "unavailable", "link", "status"])
def test_b42_a_failed_write_leaves_no_address(bench: Bench, fault: str) -> None:
    hashes = chunk_hashes(SCOPE.namespace.digest, list(range(80)), 16)
    addresses = Addresser(SCOPE.namespace.digest).addresses(hashes)
    records = [sealed_record(SCOPE, address, n) for n, address in enumerate(addresses)]
    tier = bench.open()
    assert tier.write(addresses[:2], records[:2], NEVER) == [Outcome.STORED] * 2
    if fault == "exception":
        bench.calls.fail["write"] = Injected()
        with pytest.raises(Injected):
            tier.write(addresses[2:], records[2:], NEVER)
    else:
        if fault == "short write":
            bench.calls.write_limit = SLOT - 4096
        else:
            call = {"unavailable": "write", "link": "link", "status": "fstat"}[fault]
            bench.calls.fail[call] = errno.EIO
        outcomes = tier.write(addresses[2:], records[2:], NEVER)
        assert outcomes == [Outcome.UNAVAILABLE, Outcome.SKIPPED, Outcome.SKIPPED]
        assert bench.counters.value("tier_errors_total", tier="disk", reason="EIO") == 1
    bench.calls.fail.clear()
    bench.calls.write_limit = None
    assert _prefix_tokens(tier, addresses) == 32
    assert _prefix_tokens(bench.open(), addresses) == 32
    assert len(bench.records()) == 2
    assert bench.leftovers() == []
    assert tier.status().used_bytes == bench.used_bytes()
    bench.seconds += RETRY_SECONDS
    assert tier.write(addresses, records, NEVER) == [Outcome.STORED] * 5
    assert _prefix_tokens(tier, addresses) == 80


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.ENOSPC, Outcome.FULL),
        (errno.EDQUOT, Outcome.FULL),
        (errno.EIO, Outcome.UNAVAILABLE),
        (errno.EROFS, Outcome.UNAVAILABLE),
        (errno.EACCES, Outcome.UNAVAILABLE),
        (errno.EMFILE, Outcome.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "link", "mkdir", "space", "note", "lock"])
def test_an_error_stops_writing_says_so_once_and_serving_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, call: str, code: int, outcome: Outcome
) -> None:
    tier = bench.open()
    assert write(tier, [1]) == [Outcome.STORED]
    bench.calls.fail[call] = code
    with caplog.at_level(logging.INFO):
        assert write(tier, [2, 3, 4]) == [outcome, Outcome.SKIPPED, Outcome.SKIPPED]
        bench.seconds += RETRY_SECONDS
        assert write(tier, [5, 6]) == [outcome, Outcome.SKIPPED]
        assert [r.message.split(" reason")[0] for r in caplog.records] == ["disk writing stopped"]
        assert tier.status().notes == (f"not writing: {errno.errorcode[code]}",)
        if call != "open":
            assert read(tier, [1]) == [Outcome.HIT]
        bench.calls.fail.clear()
        bench.seconds += RETRY_SECONDS
        assert write(tier, [2, 3, 4]) == [Outcome.STORED] * 3
        assert [r.message.split(" path")[0] for r in caplog.records[1:]] == ["disk writing again"]
    assert tier.status().notes == ()
    assert bench.leftovers() == []
    assert tier.status().used_bytes == bench.used_bytes()


def test_a_short_write_is_continued(bench: Bench) -> None:
    real = bench.calls.write
    bench.calls.write = lambda fd, buffer, offset: real(fd, buffer[:4096], offset)  # type: ignore[method-assign]
    tier = bench.open()
    assert write(tier, [1]) == [Outcome.STORED]
    assert read(tier, [1]) == [Outcome.HIT]


def test_a_short_read_is_continued(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    real = bench.calls.read
    bench.calls.read = lambda fd, buffer, offset: real(fd, buffer[:5000], offset)  # type: ignore[method-assign]
    assert read(tier, [1]) == [Outcome.HIT]


def test_a_read_that_stays_short_is_no_damage(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    real = bench.calls.read
    bench.calls.read = lambda fd, buffer, offset: 0  # type: ignore[method-assign]
    assert read(tier, [1]) == [Outcome.UNAVAILABLE]
    bench.calls.read = real  # type: ignore[method-assign]
    assert read(tier, [1]) == [Outcome.HIT]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_an_error_while_reading_is_not_a_miss_and_drops_nothing(bench: Bench, code: int) -> None:
    tier = bench.open()
    write(tier, [1])
    bench.calls.fail["read"] = code
    assert read(tier, [1]) == [Outcome.UNAVAILABLE]
    reason = errno.errorcode[code]
    assert bench.counters.value("tier_errors_total", tier="disk", reason=reason) == 1
    assert bench.counters.value("missed_records_total", tier="disk", reason=reason) == 1
    bench.calls.fail.clear()
    assert read(tier, [1]) == [Outcome.HIT]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_sync_discards_the_record(bench: Bench, failing: int) -> None:
    bench.sync = True
    tier = bench.open()
    write(tier, [1])
    tier.delete([sample_address(1)])
    calls = iter(range(1, 9))

    def count() -> None:
        if next(calls) == failing:
            raise OSError(errno.EIO, "sync")

    bench.calls.before["sync"] = count
    assert write(tier, [1]) == [Outcome.UNAVAILABLE]
    assert bench.records() == []
    assert tier.status().used_bytes == 0
