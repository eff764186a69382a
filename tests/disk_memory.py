"""Disk tiers on a `MemoryDisk`: processes that are killed, and machines that lose power."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.testing.faults import MemoryCalls
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers.base import Scope
from kvstore.tiers.disk import DiskConfig, DiskTier
from kvstore.units import MIB

SCOPE = sample_scope()
NEVER = math.inf
KNOWN = {".kvstore", ".ledger", "namespace.json", "epoch"}


class Stopped(BaseException):
    """The process or the machine has ended: no call is made any more."""


class StopAt:
    """Ends everything at the call of a given number, and from then on."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, call: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise Stopped


def nothing(call: str) -> None:
    """Lets every call pass."""


_RECORDS: dict[tuple[int, bytes], memoryview] = {}


def record(number: int, scope: Scope = SCOPE) -> memoryview:
    """The sealed record of an address; never changed, so that it is made only once."""
    key = number, scope.namespace.digest
    if key not in _RECORDS:
        _RECORDS[key] = sealed_record(scope, sample_address(number), number)
    return _RECORDS[key]


class Host:
    """One process with a disk tier on a memory disk, and its clock."""

    def __init__(
        self,
        root: Path,
        disk: MemoryDisk,
        *,
        sync: bool = False,
        scope: Scope = SCOPE,
        before: Callable[[str], object] = nothing,
        most: int = 1 << 30,
        capacity: int = 64 * MIB,
    ) -> None:
        self.scope = scope
        self.seconds = 0.0
        self.counters = Counters()
        self.calls = MemoryCalls(disk, before, most)
        config = DiskConfig(path=root, capacity=capacity, min_free=0.0, sync=sync)
        try:
            self.tier = DiskTier(
                config,
                self.counters,
                True,
                self.calls,
                clock=lambda: self.seconds,
                sleep=self._sleep,
                now_ns=lambda: 2 * 10**18,
            )
            self.tier.attach(scope)
            self.tier.use_epoch(self.tier.published_epoch())
        except Stopped:
            self.calls.die()
            raise

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def write(self, numbers: Sequence[int]) -> list[Outcome]:
        """Stores records."""
        addresses = [sample_address(n) for n in numbers]
        return self.tier.write(addresses, [record(n, self.scope) for n in numbers], NEVER)

    def read(self, numbers: Sequence[int]) -> list[Outcome]:
        """Reads records; what is a hit has exactly the stored bytes."""
        buffers = [aligned_buffer(len(record(n, self.scope))) for n in numbers]
        outcomes = self.tier.read([sample_address(n) for n in numbers], buffers, NEVER)
        for number, buffer, outcome in zip(numbers, buffers, outcomes, strict=True):
            assert outcome != Outcome.HIT or buffer == record(number, self.scope), f"wrong bytes of {number}"
        return outcomes


def leftovers(disk: MemoryDisk) -> list[str]:
    """Files that have no business in a store that nobody uses; a lock says that somebody does."""
    names = {path: node for path, node in disk.files().items() if not path.endswith(".safetensors")}
    return [path for path, node in names.items() if path.rsplit("/", 1)[-1] not in KNOWN and node.holder is None]


def used_bytes(disk: MemoryDisk) -> int:
    """What the records take."""
    sizes = (len(node.content) for path, node in disk.files().items() if path.endswith(".safetensors"))
    return sum(-(-size // 4096) * 4096 for size in sizes)
