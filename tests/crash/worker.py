"""One of the processes that are killed: saves, loads, deletes and evicts in a few threads until it dies.

What it does is in a log that survives it: a line is one write(2) to a file opened with O_APPEND, so that the lines of
all processes have one order. ``L`` and ``U`` are written under the lock of the ledger, beside the call itself.

=======  ==================================================
line     meaning
=======  ==================================================
S name   the tier reported the record stored
L name   a record's name was linked
U name   a record's name is about to be removed
E name   the tier reported the record evicted
W name   a read delivered other bytes than were stored
X name   a verb raised, and which
H us..   how long the lock was held, microseconds
=======  ==================================================
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record, soon
from kvstore.tiers.disk import DiskConfig, DiskTier
from kvstore.tiers.os_calls import OsCalls

SCOPE = sample_scope("crash")
SLOT = SCOPE.geometries[0].slot_bytes
NUMBERS = 120
"""Different records; the capacity is a third of them."""
CAPACITY = 40 * SLOT
THREADS = 3
_SUFFIX = ".safetensors"


class Log:
    """Appends lines that outlive this process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, kind: str, text: object) -> None:
        os.write(self._fd, f"{kind} {text}\n".encode())


class LoggedCalls(OsCalls):
    """The real calls, with links and removals of records logged and the lock of the ledger timed."""

    def __init__(self, log: Log, is_named: bool) -> None:
        self._log = log
        self._is_named = is_named
        self._locked_at: dict[int, float] = {}
        self._holds: list[int] = []

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        if self._is_named and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return super().open(name, flags, mode, dir_fd)

    def link(self, source: str | int, name: str, dir_fd: int) -> None:
        super().link(source, name, dir_fd)
        if name.endswith(_SUFFIX):
            self._log("L", name)

    def unlink(self, name: str, dir_fd: int) -> None:
        if name.endswith(_SUFFIX):
            self._log("U", name)
        super().unlink(name, dir_fd)

    def lock(self, fd: int, *, free: bool = False) -> None:
        super().lock(fd, free=free)
        if not free:
            self._locked_at[fd] = time.perf_counter()
            return
        self._holds.append(round((time.perf_counter() - self._locked_at[fd]) * 1e6))
        if len(self._holds) >= 50:
            holds, self._holds = self._holds, []
            self._log("H", " ".join(map(str, holds)))


def opened(root: Path, calls: OsCalls) -> DiskTier:
    """A client on the directory that all of them share."""
    tier = DiskTier(DiskConfig(path=root, capacity=CAPACITY, min_free=0.0), Counters(), True, calls=calls)
    tier.attach(SCOPE)
    tier.use_epoch(tier.published_epoch())
    return tier


def record_of(number: int) -> tuple[bytes, memoryview]:
    """(address, record) of a number."""
    address = sample_address(number)
    return address, sealed_record(SCOPE, address, number)


def _work(tier: DiskTier, log: Log, seed: int) -> None:
    choose = random.Random(seed)
    records = [record_of(number) for number in range(NUMBERS)]
    target = aligned_buffer(SLOT)
    while True:
        number = choose.randrange(NUMBERS)
        address, record = records[number]
        act = choose.random()
        if act < 0.55:
            if tier.write([address], [record], soon()) == [Outcome.STORED]:
                log("S", address.hex() + _SUFFIX)
        elif act < 0.9:
            outcome = tier.read([address], [target], soon())[0]
            if outcome == Outcome.DAMAGED or (outcome == Outcome.HIT and target != record):
                log("W", address.hex() + _SUFFIX)
        elif act < 0.97:
            tier.touch([records[n][0] for n in range(number, min(number + 4, NUMBERS))])
        else:
            tier.delete([address])
        for _epoch, addresses in tier.take_evicted():
            for gone in addresses:
                log("E", gone.hex() + _SUFFIX)


def run(root: Path, log_path: Path, seed: int, is_named: bool) -> None:
    """Works until it is killed."""
    log = Log(log_path)
    tier = opened(root, LoggedCalls(log, is_named))

    def work(seed: int) -> None:
        try:
            _work(tier, log, seed)
        except BaseException as error:
            log("X", repr(error).replace("\n", " "))
            raise

    threads = [threading.Thread(target=work, args=(seed * THREADS + n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
