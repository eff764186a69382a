"""How much the store takes, for any number of processes on one root: claims before writing, and what they become.

Invariant: ``used`` (the allocated bytes of every record under the root, of all namespaces, and of every write in
flight of every process) never passes the effective capacity, which is the least of the configured one of every live
client and of what leaves ``min_free`` of the file system. Room is claimed before a byte is written.

What is guaranteed: exact to the byte for everything that the store's own clients do, SIGKILL included. What is removed
behind their back is noticed when a victim is gone that no client removed, and else by the next search for victims;
until then the store counts too much and evicts too early, and is never over. What is put there behind their back is
noticed by the next search too. A client learns from `take_evicted` what it evicted itself; what another process
evicted is a read that misses.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.tiers.disk_draft import Directory
from kvstore.tiers.disk_ledger import Books, Ledger, Totals
from kvstore.tiers.disk_members import Member
from kvstore.tiers.disk_names import FAN_NAME, NAMESPACE_NAME, RECORD_NAME, SHARD_NAME, Above, Path, record_name
from kvstore.tiers.disk_room import AGAIN, HOLD_SECONDS, SEARCH, TOO_LARGE, Room
from kvstore.tiers.disk_walk import walk
from kvstore.tiers.os_calls import OsCalls

__all__ = ["FAN_NAME", "NAMESPACE_NAME", "RECORD_NAME", "SHARD_NAME", "TOO_LARGE", "Path", "Space", "record_name"]

LOCK_WAIT = 2.0
"""Seconds to wait for the lock of the ledger: it is held for less than a millisecond, but while a store is counted."""
SHORT_WAIT = 0.2
"""The same where the caller can do without: giving back a claim (done later then), dropping a damaged record."""

NO_ROOM = "no_room"
IN_FLIGHT = "in_flight"
LATE = "late"


@dataclass(slots=True)
class _Claim:
    """Bytes that were claimed for a write, 0 until they were."""

    size: int = 0


class Space:
    """Claims and frees room under one root, for one client. Thread-safe; waits at most `LOCK_WAIT` for the lock.

    Cost: a write locks the ledger twice, 60 us each. A search for victims reads the whole store without the lock,
    once in many evictions; so does counting it anew after a kill, with the lock.

    Args:
        calls: the operating system.
        root: the root of the store.
        capacity: the most bytes that records may take.
        min_free: fraction of the file system that stays free.
        is_member: whether this client may write: nobody else looks at the ledger.
        clock: monotonic seconds.
        sleep: waits so many seconds.
        now_ns: time of day in nanoseconds.
        on_evicted: called with a number of records, under the lock.
    """

    def __init__(
        self,
        calls: OsCalls,
        root: Directory,
        capacity: int,
        min_free: float,
        is_member: bool,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        now_ns: Callable[[], int],
        on_evicted: Callable[[int], None],
    ) -> None:
        self._calls = calls
        self._is_member = is_member
        self._clock = clock
        self._sleep = sleep
        self._on_evicted = on_evicted
        self._member = Member(calls, capacity, lambda: secrets.token_hex(8))
        self._ledger = Ledger(calls, root, self._member, clock, sleep)
        self._room = Room(calls, self._ledger, self._member, min_free, clock, now_ns, self._evict)
        self._claims: dict[Path, _Claim] = {}
        self._owed: deque[int] = deque()
        self._own: tuple[str, str] = ("", "")
        self._evicted: deque[tuple[str, bytes]] = deque()
        self._is_closing = False
        self._has_left = False
        self._last: Totals | None = None

    # -- what others ask --------------------------------------------------------------------------------------------

    def report_for(self, namespace: str, shard: str) -> None:
        """Names the namespace directory and shard whose evictions `take_evicted` gives."""
        self._own = (namespace, shard)

    def take_evicted(self) -> list[tuple[str, tuple[bytes, ...]]]:
        """(epoch, addresses) of the named namespace and shard that this client evicted since the last call."""
        found: dict[str, list[bytes]] = {}
        with contextlib.suppress(IndexError):
            while True:
                epoch, address = self._evicted.popleft()
                found.setdefault(epoch, []).append(address)
        return [(epoch, tuple(addresses)) for epoch, addresses in found.items()]

    def _evict(self, above: Above, name: str) -> None:
        self._on_evicted(1)
        namespace, epoch, shard, _fan = above
        if (namespace, shard) == self._own:
            self._evicted.append((epoch, bytes.fromhex(name[:64])))

    def totals(self) -> Totals | None:
        """What is used now, None if nobody has counted it. Does not wait for the lock."""
        if self._is_member and (found := self._ledger.peek()) is not None:
            self._last = found
        return self._last

    def missed(self) -> None:
        """A record was not there that somebody had reason to expect."""
        self._room.missed()

    def refused(self, is_refused: bool) -> None:
        """Whether the file system had no room for what was claimed."""
        self._room.refused(is_refused, self.totals() if is_refused else None)

    # -- a write ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Makes this client known to the others on the root: from now on its capacity holds for them too.

        Raises:
            LedgerLocked, OSError: it is tried again by the first claim.
        """
        with self._ledger.locked(self._clock() + LOCK_WAIT) as books:
            self._room.enter(books)
            self._room.join(books)

    def claim(self, path: Path, size: int, deadline: float) -> str:
        """Claims ``size`` bytes for a record, evicting for it.

        Returns:
            ``""``, or why there is no room: `TOO_LARGE` for the capacity, `MIN_FREE` of the file system is not
            free, `NO_ROOM` where nothing is left to evict, `LATE`; `IN_FLIGHT`: another write of this record is
            running.

        Raises:
            LedgerLocked: the lock of the ledger was not free in time.
            OSError: the ledger could not be used, the store not be searched, or a victim not removed.
        """
        if self._is_closing:
            raise OSError(errno.EBADF, "the store is closed")
        claim = _Claim()
        if self._claims.setdefault(path, claim) is not claim:
            return IN_FLIGHT

        def take(books: Books) -> None:
            self._room.join(books)
            self._member.claimed += size
            try:
                self._member.note()
            except BaseException:
                self._member.claimed -= size
                raise
            claim.size = size
            books.totals.used += size
            books.totals.claimed += size

        reason = LATE
        try:
            reason = self._with_room(size, take, deadline)
        finally:
            if reason:
                self.release(path)
        return reason

    def publish(self, path: Path, actual: int, link: Callable[[], None], deadline: float) -> str:
        """Gives a claimed file that takes ``actual`` bytes its name; reasons as `claim`. Ends the claim if it did.

        Raises:
            FileExistsError: from ``link``.
            LedgerLocked, OSError: nothing is published.
        """
        claim = self._claims[path]

        def name(books: Books) -> None:
            was_exact, books.is_exact = books.is_exact, False
            try:
                link()
            except OSError:
                books.is_exact = was_exact
                raise
            self._give_back(books, claim.size)
            claim.size = 0
            totals = books.totals
            totals.used += actual
            totals.added += actual
            totals.records += 1
            books.is_exact = was_exact

        more = actual - claim.size
        return self._with_room(more if more > 0 else None, name, deadline)

    def release(self, path: Path) -> None:
        """Ends a write; what it claimed is free again if the file got no name."""
        claim = self._claims[path]
        try:
            if claim.size:
                with self._ledger.locked(self._clock() + SHORT_WAIT) as books:
                    self._give_back(books, claim.size)
                    claim.size = 0
        except OSError:
            # The next one of us who locks the ledger gives it back; where it was written in part, all is counted.
            if claim.size:
                self._owed.append(claim.size)
        finally:
            del self._claims[path]
            self._leave_if_closing()

    def remove(self, action: Callable[[], tuple[int, int]], wait: float = LOCK_WAIT) -> int:
        """Runs what removes records and returns the (bytes, records) that went; the number of records.

        Raises:
            LedgerLocked: nothing was removed.
            OSError: from the ledger or ``action``.
        """
        with self._ledger.locked(self._clock() + wait) as books:
            was_exact = books.is_exact
            books.doubt()
            size, records = action()
            books.totals.remove(size, records)
            books.is_exact = was_exact
        return records

    def measure(self) -> None:
        """Finds out what is used, if that is not known, and shrinks the store to its capacity. Blocks for that long.

        Raises:
            LedgerLocked, OSError: as `claim`.
        """
        if self._is_member:
            self._with_room(0, self._room.join, float("inf"))
            return
        found = Totals()
        for _directory, _above, _name, status in walk(self._calls, self._ledger.root):
            found.used += status.st_blocks * 512
            found.records += 1
        self._last = found

    def close(self) -> None:
        """Leaves the store; writes that are running end first. A claim that comes later fails with EBADF."""
        self._is_closing = True
        self._leave_if_closing()

    def _leave_if_closing(self) -> None:
        if not self._is_closing or self._claims or self._has_left:
            return
        self._has_left = True
        try:
            if self._is_member and self._member.name:
                with self._ledger.locked(self._clock() + SHORT_WAIT) as books:
                    self._pay(books)
                    self._member.leave(self._ledger.root)
                    books.totals.members = secrets.randbits(63)
        except OSError:
            pass  # the others collect the file
        finally:
            self._member.let_go()
            self._ledger.close()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _with_room(self, more: int | None, action: Callable[[Books], None], deadline: float) -> str:
        """Does ``action`` under the lock, where ``more`` bytes fit; makes room first, in several holds of the lock."""
        while True:
            with self._ledger.locked(min(deadline, self._clock() + LOCK_WAIT)) as books:
                self._pay(books)
                reason = "" if more is None else self._room.make(books, more)
                if not reason:
                    action(books)
                    return ""
            if reason == SEARCH:
                # What was found may be gone before we are back: others make room as well.
                if not (is_found := self._room.search(deadline)):
                    return LATE if is_found is None else NO_ROOM
            elif reason == AGAIN:
                self._sleep(HOLD_SECONDS)  # the others' turn
            else:
                return reason
            if self._clock() >= deadline:
                return LATE

    def _pay(self, books: Books) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._give_back(books, self._owed.popleft())

    def _give_back(self, books: Books, size: int) -> None:
        totals = books.totals
        totals.used = max(0, totals.used - size)
        totals.claimed = max(0, totals.claimed - size)
        self._member.claimed -= size
