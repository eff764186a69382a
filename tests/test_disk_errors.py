"""Every error at every call, short reads and writes: no exception, nothing wrong, nothing left, and it goes on."""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path

import pytest
from disk_memory import Host, leftovers, nothing, used_bytes

from kvstore.errors import KVStoreError
from kvstore.messages import Outcome
from kvstore.testing.faults import ERRORS, FailOnce
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.tier_suite import sample_address
from kvstore.tiers import os_calls
from kvstore.tiers.disk_pause import RETRY_SECONDS

CALLS = ("open", "read", "write", "link", "unlink", "mkdir", "scandir", "stat", "sync", "utime", "space")
LATER = 3600.0
"""Seconds after which every consequence of an error is over."""
HARMLESS = {Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.FULL, Outcome.UNAVAILABLE, Outcome.SKIPPED}


def _use(host: Host) -> None:
    """Every verb; none raises, and nothing is damaged."""
    outcomes = host.write([1, 2, 3])
    outcomes += host.tier.contains([sample_address(n) for n in (1, 2, 3, 9)], float("inf"))
    outcomes += host.read([1, 2, 3, 9])
    host.tier.touch([sample_address(1)])
    removed = host.tier.delete([sample_address(2)])
    host.tier.measure()
    host.tier.status()
    host.tier.take_evicted()
    with contextlib.suppress(OSError):  # a listing says so, and its caller tries again
        list(host.tier.scan())
    assert set(outcomes) | set(removed) <= HARMLESS


def _recovers(root: Path, disk: MemoryDisk, host: Host | None) -> None:
    """Without the fault, by the same process and by the next."""
    if host is not None:
        host.calls.before = nothing
        host.seconds += LATER
        assert host.write([1, 2, 3]) == [Outcome.STORED] * 3
        assert host.read([1, 2, 3]) == [Outcome.HIT] * 3
        # One error where the way of writing is found out leaves the other way, which is as good.
        assert set(host.tier.status().notes) <= {"named temporary files"}
        assert host.tier.status().used_bytes == used_bytes(disk)
        host.tier.close()
        assert host.calls.open_count == 0
    after = Host(root, disk)
    assert after.write([1, 2, 3, 4]) == [Outcome.STORED] * 4
    assert after.read([1, 2, 3, 4]) == [Outcome.HIT] * 4
    after.tier.close()
    assert leftovers(disk) == []


def _one(root: Path, at: int, error: str, *, sync: bool) -> list[str]:
    """One life with one failing call; the names of the calls it made."""
    disk, fault, host = MemoryDisk(), FailOnce(at, error), None
    try:
        host = Host(root, disk, sync=sync, before=fault)
    except KVStoreError:
        pass
    else:
        _use(host)
    _recovers(root, disk, host)
    return fault.calls


@pytest.mark.parametrize("sync", [False, True])
def test_any_call_may_fail_once(tmp_path: Path, sync: bool) -> None:
    count = len(_one(tmp_path / "store", -1, "EIO", sync=sync))
    assert count > 50
    for at in range(count):
        # Another error at each call, and every error at every kind of call below.
        _one(tmp_path / "store", at, ERRORS[at % len(ERRORS)], sync=sync)


@pytest.mark.parametrize("error", ERRORS)
def test_every_kind_of_call_may_fail_in_every_way_at_its_first_and_last_use(tmp_path: Path, error: str) -> None:
    made = _one(tmp_path / "store", -1, error, sync=True)
    assert set(made) >= set(CALLS)
    for call in CALLS:
        first, last = made.index(call), len(made) - 1 - made[::-1].index(call)
        for at in (first, (first + last) // 2, last):
            _one(tmp_path / "store", at, error, sync=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_that_stays_is_said_once_until_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, error: str
) -> None:
    disk = MemoryDisk()
    host = Host(tmp_path / "store", disk, sync=True)
    assert host.write([1]) == [Outcome.STORED]
    number = getattr(errno, error)

    def fail(name: str) -> None:
        if name == call:
            raise OSError(number, error)

    host.calls.before = fail
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            outcomes = [*host.write([2, 3]), *host.read([1, 2])]
            assert set(outcomes) <= HARMLESS
            host.seconds += RETRY_SECONDS
        lines = [r.message.split(" reason")[0] for r in caplog.records]
        assert lines in ([], ["disk writing stopped"])
        _recovers(tmp_path / "store", disk, host)
        lines += [r.message.split(" path")[0] for r in caplog.records[len(lines) :]]
        assert lines in ([], ["disk writing stopped", "disk writing again"])


@pytest.mark.parametrize("most", [4096, 5000, 8191])
def test_short_reads_and_writes_are_continued(tmp_path: Path, most: int) -> None:
    host = Host(tmp_path / "store", MemoryDisk(), most=most)
    assert host.write([1, 2]) == [Outcome.STORED] * 2
    assert host.read([1, 2]) == [Outcome.HIT] * 2


def test_reads_and_writes_that_stay_short_are_errors_and_leave_nothing(tmp_path: Path) -> None:
    disk = MemoryDisk()
    host = Host(tmp_path / "store", disk)
    assert host.write([1]) == [Outcome.STORED]
    host.calls.most = 100
    assert host.write([2]) == [Outcome.UNAVAILABLE]
    assert host.read([1, 2]) == [Outcome.UNAVAILABLE, Outcome.MISS]
    host.calls.most = 1 << 30
    _recovers(tmp_path / "store", disk, host)


class InterruptedOnce:
    """A C library whose ``fstatfs`` is interrupted by a signal at first."""

    def __init__(self, real: object) -> None:
        self._real = real
        self.calls = 0

    def fstatfs(self, fd: int, buffer: object) -> int:
        self.calls += 1
        if self.calls == 1:
            os_calls.ctypes.set_errno(errno.EINTR)
            return -1
        return int(self._real.fstatfs(fd, buffer))  # type: ignore[attr-defined]


def test_a_call_that_python_does_not_retry_after_a_signal_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = os_calls.OsCalls()
    library = InterruptedOnce(os_calls._LIBC)
    fd = calls.open(str(tmp_path), 0)
    expected = calls.file_system_magic(fd)
    monkeypatch.setattr(os_calls, "_LIBC", library)
    assert calls.file_system_magic(fd) == expected
    assert library.calls == 2
    calls.close(fd)
