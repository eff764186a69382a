"""How much the store takes, and what goes when there is no room.

Invariant: ``used`` (the allocated bytes of every record under the root, of all namespaces, and of every write in
flight) never passes the effective capacity, which is the least of the configured one and of what leaves ``min_free``
of the file system. Room is claimed before a byte is written.

One process counts for itself: what it found when it first wrote, and what it wrote and removed since.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator

from kvstore.tiers.disk_draft import DRAFT_NAME, Directory, collect_draft, open_directory
from kvstore.tiers.disk_root import EPOCH_NAME
from kvstore.tiers.os_calls import OsCalls

NAMESPACE_NAME = re.compile(r"[a-z0-9._-]{1,40}-[0-9a-f]{16}", re.ASCII)
SHARD_NAME = re.compile(r"s[0-9]{1,6}of[0-9]{1,6}", re.ASCII)
FAN_NAME = re.compile(r"[0-9a-f]{2}", re.ASCII)
RECORD_NAME = re.compile(r"([0-9a-f]{64})\.safetensors", re.ASCII)
_LEVELS = (NAMESPACE_NAME, EPOCH_NAME, SHARD_NAME, FAN_NAME)

LEAST_VICTIMS = 1024
"""Victims found by one scan of the store, or an eighth of its records where that is more."""

TOO_LARGE = "too_large"
MIN_FREE = "min_free"
NO_ROOM = "no_room"
IN_FLIGHT = "in_flight"

Path = tuple[str, str, str, str, str]
"""A record's (namespace directory, epoch, shard, fan-out, name) below the root."""


def record_name(address: bytes) -> tuple[str, str]:
    """(fan-out, name) of the file of an address."""
    text = address.hex()
    return text[:2], f"{text}.safetensors"


def _subdirectories(calls: OsCalls, directory: Directory, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the directories of records below ``directory``. What vanishes meanwhile is skipped."""
    if len(path) == len(_LEVELS):
        yield path
        return
    pattern = _LEVELS[len(path)]
    names = [entry.name for entry in calls.scandir(directory.fd) if pattern.fullmatch(entry.name)]
    for name in names:
        try:
            below = open_directory(calls, name, directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield from _subdirectories(calls, below, (*path, name))


class Space:
    """Claims and frees room under one root. Thread-safe; a claim that must evict blocks the others meanwhile.

    Cost: a claim is one ``statvfs`` (2 us); the first one and one in every few thousand evictions scan the store
    (about 0.6 s for 100,000 records).
    """

    def __init__(
        self,
        calls: OsCalls,
        root: Directory,
        capacity: int,
        min_free: float,
        now_ns: Callable[[], int],
        on_evicted: Callable[[int], None],
    ) -> None:
        self._calls = calls
        self._root: Directory | None = root
        self._capacity = capacity
        self._min_free = min_free
        self._now_ns = now_ns
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self.is_counted = False
        self._claims: dict[Path, int] = {}
        self._victims: list[tuple[int, Path, int]] = []
        self._own: tuple[str, str] = ("", "")
        self._evicted: dict[str, list[bytes]] = {}
        self.used_bytes = 0
        self.records = 0

    def report_for(self, namespace: str, shard: str) -> None:
        """Names the namespace directory and shard whose evictions `take_evicted` gives."""
        self._own = (namespace, shard)

    def claim(self, path: Path, size: int) -> str:
        """Claims ``size`` bytes for a record, evicting for it.

        Returns:
            ``""``, or why there is no room: `TOO_LARGE` for the capacity, `MIN_FREE` of the file system is not
            free, `NO_ROOM` where nothing is left to evict; `IN_FLIGHT`: another write of this record is running.

        Raises:
            OSError: the store could not be scanned, or a victim not removed.
        """
        if size > self._capacity:
            return TOO_LARGE
        with self._lock:
            if path in self._claims:
                return IN_FLIGHT
            self._count()
            reason = self._make_room(size)
            if not reason:
                self._claims[path] = size
                self.used_bytes += size
            return reason

    def measure(self) -> None:
        """Finds out what is used, if that is not known. Blocks for one scan of the store; claims wait meanwhile.

        Raises:
            OSError: the store could not be scanned.
        """
        with self._lock:
            self._count()

    def _count(self) -> None:
        if not self.is_counted:
            self._scan(victims=False)
            self.is_counted = True

    def settle(self, path: Path, actual: int) -> str:
        """Corrects a claim to what the file really takes; reasons as `claim`."""
        with self._lock:
            more = actual - self._claims[path]
            reason = self._make_room(more) if more > 0 else ""
            if not reason:
                self._claims[path] = actual
                self.used_bytes += more
            return reason

    def release(self, path: Path, is_stored: bool) -> None:
        """Ends a claim: the record is there now, or nothing is."""
        with self._lock:
            size = self._claims.pop(path)
            if is_stored:
                self.records += 1
            else:
                self.used_bytes -= size

    def freed(self, size: int, records: int = 1) -> None:
        """Says that files were removed."""
        with self._lock:
            if self.is_counted:
                self.used_bytes = max(sum(self._claims.values()), self.used_bytes - size)
                self.records = max(0, self.records - records)

    def take_evicted(self) -> list[tuple[str, tuple[bytes, ...]]]:
        """(epoch, addresses) of the named namespace and shard that were evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, {}
        return [(epoch, tuple(addresses)) for epoch, addresses in evicted.items()]

    def close(self) -> None:
        """Lets go of the root; a claim that comes later fails with EBADF."""
        self._root = None

    def _open_root(self) -> Directory:
        root = self._root
        if root is None:
            raise OSError(errno.EBADF, "the store is closed")
        return root

    def _make_room(self, size: int) -> str:
        total, free = self._calls.space(self._open_root().fd)
        written = self.used_bytes - sum(self._claims.values())
        # Evicting moves bytes from used to free and leaves this sum alone, so that it is taken once: a file system
        # that reports freed blocks late would otherwise empty the store.
        limit = min(self._capacity, written + free - int(self._min_free * total))
        if size > limit:
            return MIN_FREE
        is_fresh = False
        while self.used_bytes + size > limit:
            if not self._victims:
                if is_fresh:
                    return NO_ROOM
                self._scan(victims=True)
                is_fresh = True
                continue
            self._evict_oldest()
        return ""

    def _scan(self, victims: bool) -> None:
        """Counts the store, and finds the oldest records of all namespaces."""
        now = self._now_ns()
        used, found = 0, []
        for path, status in self._walk():
            if path in self._claims:
                continue
            used += status.st_blocks * 512
            # A time in the future (a clock that was set back) would keep a record for ever.
            found.append((min(status.st_mtime_ns, now), path, status.st_blocks * 512))
        self.records = len(found)
        self.used_bytes = used + sum(self._claims.values())
        if victims:
            self._victims = heapq.nsmallest(max(LEAST_VICTIMS, len(found) // 8), found)

    def _walk(self) -> Iterator[tuple[Path, os.stat_result]]:
        top = open_directory(self._calls, ".", self._open_root())
        for namespace, epoch, shard, fan in _subdirectories(self._calls, top, ()):
            directory = self._open((namespace, epoch, shard, fan))
            if directory is None:
                continue
            for name in [entry.name for entry in self._calls.scandir(directory.fd)]:
                match = RECORD_NAME.fullmatch(name)
                if match is None or not name.startswith(fan):
                    if DRAFT_NAME.fullmatch(name):
                        collect_draft(self._calls, directory, name)
                    continue
                try:
                    status = self._calls.stat(name, directory.fd)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield (namespace, epoch, shard, fan, name), status

    def _open(self, path: tuple[str, ...]) -> Directory | None:
        directory = self._open_root()
        try:
            for name in path:
                directory = open_directory(self._calls, name, directory)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return directory

    def _evict_oldest(self) -> None:
        mtime, path, size = heapq.heappop(self._victims)
        *above, name = path
        directory = self._open(tuple(above))
        try:
            status = None if directory is None else self._calls.stat(name, directory.fd)
        except FileNotFoundError:
            status = None
        if directory is None or status is None:
            self._gone(size)  # somebody else removed it
            return
        used_at = min(status.st_mtime_ns, self._now_ns())
        if used_at > mtime:
            heapq.heappush(self._victims, (used_at, path, status.st_blocks * 512))
            return
        self._calls.unlink(name, directory.fd)
        self._gone(size)
        self._on_evicted(1)
        namespace, epoch, shard = path[:3]
        if (namespace, shard) == self._own:
            self._evicted.setdefault(epoch, []).append(bytes.fromhex(name[:64]))

    def _gone(self, size: int) -> None:
        self.used_bytes -= size
        self.records -= 1
