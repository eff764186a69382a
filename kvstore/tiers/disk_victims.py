"""Which records go when there is no room: those that were used longest ago, of all namespaces.

Invariant: a record is a victim only as long as its time of last use is the one that was looked at. The search runs
beside everybody else's work, without the lock of the ledger; what it found is looked at again under it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.tiers.disk_draft import Directory
from kvstore.tiers.disk_names import Above
from kvstore.tiers.disk_walk import open_below, walk
from kvstore.tiers.os_calls import OsCalls

LEAST_FOUND = 1024
MOST_FOUND = 65536
"""Victims found by one search: an eighth of the records, within these bounds (30 MB of memory)."""


class Victim(NamedTuple):
    """A record by its last use (nanoseconds, not later than when it was looked at) and its place."""

    used_ns: int
    mtime_ns: int
    above: Above
    name: str


class Victims:
    """The oldest records, oldest first. `search` from any thread; the rest under the lock of the ledger.

    Attributes:
        searched_at: moment of the clock when the last search began.
        search_seconds: what it took.
    """

    __slots__ = ("_calls", "_clock", "_heap", "_now_ns", "search_seconds", "searched_at")

    def __init__(self, calls: OsCalls, clock: Callable[[], float], now_ns: Callable[[], int]) -> None:
        self._calls = calls
        self._clock = clock
        self._now_ns = now_ns
        self._heap: list[Victim] = []
        self.searched_at = float("-inf")
        self.search_seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def forget(self) -> None:
        """Forgets what was found, so that it is searched anew."""
        self._heap = []

    def search(self, root: Directory, records: int) -> int:
        """Finds the oldest of about ``records`` records; the allocated bytes of all. Blocks, 5 us a record.

        A time in the future (of a clock that was set back) would keep its record for ever; it is set to now.

        Raises:
            OSError: the store could not be listed.
        """
        begun, now = self._clock(), self._now_ns()
        used = 0
        future: list[Victim] = []

        def candidates() -> Iterator[Victim]:
            nonlocal used
            for _directory, above, name, status in walk(self._calls, root):
                used += status.st_blocks * 512
                victim = Victim(min(status.st_mtime_ns, now), status.st_mtime_ns, above, name)
                if victim.mtime_ns > now:
                    future.append(victim)
                else:
                    yield victim

        wanted = min(max(LEAST_FOUND, records // 8), MOST_FOUND)
        found = heapq.nsmallest(wanted, candidates())
        for rank, victim in enumerate(sorted(future, key=lambda v: v.mtime_ns, reverse=True)):
            directory = open_below(self._calls, root, victim.above)
            with contextlib.suppress(OSError):
                if directory is not None:
                    self._calls.utime(victim.name, now - rank, directory.fd)
        if len(found) < wanted:
            found += future
            heapq.heapify(found)
        self._heap = found
        self.searched_at, self.search_seconds = begun, self._clock() - begun
        return used

    def take(self, root: Directory) -> tuple[Directory, Victim, os.stat_result] | Victim | None:
        """The oldest victim with its directory and status; the victim alone if it is gone; None if none is left.

        Raises:
            OSError: it could not be looked at; it stays a victim.
        """
        while self._heap:
            victim = self._heap[0]
            directory = open_below(self._calls, root, victim.above)
            try:
                status = None if directory is None else self._calls.stat(victim.name, directory.fd)
            except FileNotFoundError:
                status = None
            heapq.heappop(self._heap)
            if directory is None or status is None:
                return victim
            if status.st_mtime_ns == victim.mtime_ns:
                return directory, victim, status
            used_ns = min(status.st_mtime_ns, self._now_ns())
            heapq.heappush(self._heap, Victim(used_ns, status.st_mtime_ns, victim.above, victim.name))
        return None
