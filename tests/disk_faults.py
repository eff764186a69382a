"""A disk tier whose operating system and clock a test can turn against it."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers.base import Scope
from kvstore.tiers.disk import DiskConfig, DiskTier
from kvstore.tiers.os_calls import OsCalls
from kvstore.units import MIB, PAGE

Hook = Callable[[], None]

SCOPE = sample_scope()
SLOT = SCOPE.geometries[0].slot_bytes
NEVER = math.inf


class FaultyCalls(OsCalls):
    """The real calls, of which some fail or do less.

    Attributes:
        fail: what to raise by the name of the call; a number is an errno, raised for good until it is removed.
        before: called before a call of that name.
        write_limit: bytes after which every write of a file stays short, None for none.
        free: (total, free) bytes of the file system, None for the real ones.
        magic: kind of the file system, None for the real one.
        refuse_flags: open flags that this file system does not know (EINVAL for O_DIRECT, else EOPNOTSUPP).
    """

    def __init__(self) -> None:
        self.fail: dict[str, int | BaseException] = {}
        self.before: dict[str, Hook] = {}
        self.write_limit: int | None = None
        self.free: tuple[int, int] | None = None
        self.magic: int | None = None
        self.refuse_flags = 0
        self.utimes: list[str] = []

    def _check(self, call: str) -> None:
        if call in self.before:
            self.before[call]()
        fault = self.fail.get(call)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        if fault is not None:
            raise fault

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        self._check("open")
        if self.refuse_flags & os.O_DIRECT & flags:
            raise OSError(errno.EINVAL, "no direct I/O")
        if self.refuse_flags & flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return super().open(name, flags, mode, dir_fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._check("read")
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview | bytes, offset: int) -> int:
        # "note": what is smaller than a page is the store's own account.
        if len(buffer) < PAGE:
            self._check("note")
            return super().write(fd, buffer, offset)
        self._check("write")
        if self.write_limit is not None:
            buffer = buffer[: max(0, self.write_limit - offset)]
        return super().write(fd, buffer, offset) if buffer else 0

    def link(self, source: str | int, name: str, dir_fd: int) -> None:
        self._check("link")
        super().link(source, name, dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._check("unlink")
        super().unlink(name, dir_fd)

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        self._check("mkdir")
        super().mkdir(name, mode, dir_fd)

    def stat(self, target: str | int, dir_fd: int | None = None) -> os.stat_result:
        self._check("stat" if isinstance(target, str) else "fstat")
        return super().stat(target, dir_fd)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def utime(self, target: str | int, mtime_ns: int, dir_fd: int | None = None) -> None:
        self._check("utime")
        if isinstance(target, str):
            self.utimes.append(target)
        super().utime(target, mtime_ns, dir_fd)

    def lock(self, fd: int, *, free: bool = False) -> None:
        if not free:
            self._check("lock")
        super().lock(fd, free=free)

    def space(self, fd: int) -> tuple[int, int]:
        self._check("space")
        return self.free or super().space(fd)

    def file_system_magic(self, fd: int) -> int:
        return super().file_system_magic(fd) if self.magic is None else self.magic


@dataclass
class Bench:
    """A disk tier on a directory, with its clocks in the test's hands."""

    root: Path
    capacity: int = 64 * MIB
    min_free: float = 0.0
    sync: bool = False
    read_only: bool = False
    calls: FaultyCalls = field(default_factory=FaultyCalls)
    counters: Counters = field(default_factory=Counters)
    seconds: float = 0.0
    time_ns: int = 2_000_000_000 * 10**9
    tiers: list[DiskTier] = field(default_factory=list)

    def client(self, writer: bool = True) -> DiskTier:
        """A client that is not attached yet."""
        config = DiskConfig(
            path=self.root, capacity=self.capacity, min_free=self.min_free, sync=self.sync, read_only=self.read_only
        )
        tier = DiskTier(
            config, self.counters, writer, self.calls,
            clock=lambda: self.seconds, sleep=self._sleep, now_ns=lambda: self.time_ns,
        )  # fmt: skip
        self.tiers.append(tier)
        return tier

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.seconds += seconds

    def open(self, scope: Scope | None = None, writer: bool = True) -> DiskTier:
        """A client that is ready."""
        tier = self.client(writer)
        tier.attach(scope or sample_scope())
        tier.use_epoch(tier.published_epoch())
        return tier

    def close(self) -> None:
        """Closes every client."""
        for tier in self.tiers:
            tier.close()

    def records(self) -> list[Path]:
        """Every record below the root."""
        return sorted(self.root.rglob("*.safetensors"))

    def record(self, address: bytes) -> Path:
        """The one file of an address."""
        (path,) = self.root.rglob(f"{address.hex()}.safetensors")
        return path

    def used_bytes(self) -> int:
        """What the records take, counted by other means than the tier's; exact while nobody writes."""
        return sum(path.stat().st_blocks * 512 for path in self.records())

    def leftovers(self) -> list[str]:
        """Files below the root that have no business there."""
        known = {".kvstore", ".ledger", "namespace.json", "epoch"}
        files = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
        return [path.name for path in files if path.name not in known and not is_locked(path)]


def is_locked(path: Path) -> bool:
    """Whether somebody alive holds a lock on the file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def write(tier: DiskTier, numbers: Sequence[int], scope: Scope = SCOPE) -> list[Outcome]:
    addresses = [sample_address(n) for n in numbers]
    records = [sealed_record(scope, address, n) for n, address in zip(numbers, addresses, strict=True)]
    return tier.write(addresses, records, NEVER)


def read(tier: DiskTier, numbers: Sequence[int]) -> list[Outcome]:
    buffers = [aligned_buffer(SLOT) for _ in numbers]
    outcomes = tier.read([sample_address(n) for n in numbers], buffers, NEVER)
    for number, buffer, outcome in zip(numbers, buffers, outcomes, strict=True):
        if outcome == Outcome.HIT:
            assert bytes(buffer) == bytes(sealed_record(SCOPE, sample_address(number), number))
    return outcomes
