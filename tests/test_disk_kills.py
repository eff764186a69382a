"""A process that dies at any call leaves an account that the next one makes exact."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disk_faults import SLOT, Bench, FaultyCalls, read, write

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sample_scope, sealed_record
from kvstore.tiers.disk import DiskTier


class Dead(BaseException):
    """Nothing runs after a SIGKILL: no handler of any error sees it, and no call of a ``finally`` has an effect."""


class MortalCalls(FaultyCalls):
    """Calls of a process that dies before its call number ``dies_at``, whose descriptors the kernel then closes."""

    def __init__(self) -> None:
        super().__init__()
        self.dies_at = -1
        self.count = 0
        self.is_dead = False
        self._fds: set[int] = set()

    def _live(self) -> None:
        if self.count == self.dies_at:
            self.is_dead = True
        self.count += 1
        if self.is_dead:
            raise Dead

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        self._live()
        fd = super().open(name, flags, mode, dir_fd)
        self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if not self.is_dead:
            self._fds.discard(fd)
            super().close(fd)

    def sync(self, fd: int) -> None:
        self._live()  # a SIGKILL asks for no more

    def bury(self) -> None:
        """What the kernel does for the dead."""
        self.is_dead = True
        for fd in self._fds:
            os.close(fd)


def _mortal(name: str) -> Callable[..., Any]:
    def call(self: MortalCalls, *args: Any, **named: Any) -> Any:
        self._live()
        return getattr(FaultyCalls, name)(self, *args, **named)

    return call


for _name in ("read", "write", "link", "unlink", "rmdir", "mkdir", "scandir", "stat", "utime", "lock"):
    setattr(MortalCalls, _name, _mortal(_name))


def _write(tier: DiskTier, bench: Bench) -> None:
    write(tier, [9])


def _replace(tier: DiskTier, bench: Bench) -> None:
    stranger = sealed_record(sample_scope("another"), sample_address(1), 1)
    bench.record(sample_address(1)).write_bytes(bytes(stranger))
    write(tier, [1])


def _delete(tier: DiskTier, bench: Bench) -> None:
    tier.delete([sample_address(1)])


def _drop(tier: DiskTier, bench: Bench) -> None:
    bench.record(sample_address(1)).write_bytes(bytes(SLOT))
    read(tier, [1])


def _close(tier: DiskTier, bench: Bench) -> None:
    tier.close()


VERBS = {"write": _write, "replace": _replace, "delete": _delete, "drop": _drop, "close": _close}


def _lives(place: Path, verb: str, refuse_flags: int) -> Iterator[tuple[Bench, bool]]:
    """The same work in new directories, of a process that lives one call longer each time; whether it died."""
    for dies_at in range(400):
        calls = MortalCalls()
        calls.refuse_flags = refuse_flags
        bench = Bench(place / str(dies_at), capacity=4 * SLOT, calls=calls)
        tier = bench.open()
        write(tier, range(4))
        calls.dies_at = calls.count + dies_at
        with suppress(Dead):
            VERBS[verb](tier, bench)
        died = calls.is_dead
        calls.bury()
        bench.calls = FaultyCalls()
        yield bench, died
        if not died:
            return
    raise AssertionError("the work never ends")


@pytest.mark.parametrize("refuse_flags", [0, os.O_TMPFILE], ids=["unnamed", "named"])
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_call_a_process_dies_at_the_next_one_finds_an_exact_account(
    tmp_path: Path, verb: str, refuse_flags: int
) -> None:
    deaths = 0
    for bench, died in _lives(tmp_path, verb, refuse_flags):
        deaths += died
        seen = bench.used_bytes()
        assert seen <= bench.capacity
        tier = bench.open()
        tier.measure()
        status = tier.status()
        assert (status.used_bytes, status.records) == (bench.used_bytes(), len(bench.records()))
        assert status.used_bytes == seen
        assert bench.leftovers() == []
        ledger = (bench.root / ".ledger").read_bytes()
        assert write(tier, [20, 21]) == [Outcome.STORED] * 2
        assert tier.status().used_bytes == bench.used_bytes() <= bench.capacity
        tier.close()
        assert ledger != (bench.root / ".ledger").read_bytes()
        assert [p.name for p in bench.root.iterdir() if re.match(r"\.inflight", p.name)] == []
    assert deaths > 5
