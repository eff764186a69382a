"""Making room under the lock of the ledger: who is there, how much may be used, what goes.

Invariant: what is evicted was the oldest record of all namespaces when the victims were searched, and has not been used
since; and no more goes than the effective capacity asks for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable

from kvstore.tiers.disk_ledger import Books, Ledger, Totals
from kvstore.tiers.disk_members import Member, take_census
from kvstore.tiers.disk_names import Above
from kvstore.tiers.disk_victims import Victim, Victims
from kvstore.tiers.disk_walk import walk
from kvstore.tiers.os_calls import OsCalls

CENSUS_INTERVAL = 1.0
"""Seconds between two looks for dead clients while there is no room."""
SEARCH_INTERVAL = 600.0
"""Seconds after which victims are searched anew, so that what vanished behind our back is noticed."""
HINT_INTERVAL = 60.0
"""The same where reads missed more records than were removed."""
QUOTA_SECONDS = 60.0
"""How long what was written before an unforeseen "no space" counts as all that fits."""
MOST_EVICTED = 32
HOLD_SECONDS = 0.002
"""Records that are evicted under one hold of the lock, and about how long it may be held for them."""

TOO_LARGE = "too_large"
MIN_FREE = "min_free"
SEARCH = "search"
AGAIN = "again"


class Room:
    """Part of one `Space`: used under the lock of the ledger, but for `search`, `missed` and `refused`.

    Args:
        calls: the operating system.
        ledger: of the root.
        member: this client's own file.
        min_free: fraction of the file system that stays free.
        clock: monotonic seconds.
        now_ns: time of day in nanoseconds.
        on_evicted: called with the place and name of every record that was evicted.
    """

    def __init__(
        self,
        calls: OsCalls,
        ledger: Ledger,
        member: Member,
        min_free: float,
        clock: Callable[[], float],
        now_ns: Callable[[], int],
        on_evicted: Callable[[Above, str], None],
    ) -> None:
        self._calls = calls
        self._ledger = ledger
        self._member = member
        self._min_free = min_free
        self._clock = clock
        self._on_evicted = on_evicted
        self._victims = Victims(calls, clock, now_ns)
        self._searching = threading.Lock()
        # What the last census found.
        self._capacity = member.capacity
        self._others_claimed = 0
        self._members_seen = -1
        self._census_at = float("-inf")
        # What was removed when victims were last searched; since then removed by us, found gone, missed by reads.
        self._removals_seen = self._own_removals = self._gone = self._misses = 0
        self._is_suspect = False
        self._refusals, self._ceiling, self._ceiling_until = 0, 0, 0.0

    # -- who is there, and how much there is ------------------------------------------------------------------------

    def join(self, books: Books) -> None:
        """Makes this client known to the others on the root, if it is not."""
        if not self._member.has_joined:
            self._member.join(self._ledger.root)
            books.totals.members = self._members_seen = secrets.randbits(63)

    def enter(self, books: Books) -> None:
        """Learns who came and went."""
        if books.is_foreign or not books.is_exact or books.totals.members != self._members_seen:
            self._take_census(books)

    def _take_census(self, books: Books) -> None:
        root = self._ledger.root
        self._member.look()
        census = take_census(self._calls, root, self._member.name)
        if books.is_foreign and census.alive:
            # Nobody lives through a reboot: containers that see different boot ids share this kernel.
            books.trust()
        if census.owes:
            books.doubt()
        for name in census.dead:
            with contextlib.suppress(FileNotFoundError):
                self._calls.unlink(name, root.fd)
        if census.dead:
            books.totals.members = secrets.randbits(63)
        own = self._member.capacity
        self._capacity = own if census.capacity is None else min(own, census.capacity)
        self._others_claimed = census.claimed
        self._members_seen = books.totals.members
        self._census_at = self._clock()

    def count(self, books: Books) -> None:
        """Counts the store anew: 4 us a record, during which everybody else waits."""
        books.doubt()
        self._take_census(books)
        used = records = 0
        for _directory, _above, _name, status in walk(self._calls, self._ledger.root):
            used += status.st_blocks * 512
            records += 1
        totals = books.totals
        totals.claimed = self._others_claimed + self._member.claimed
        totals.used = used + totals.claimed
        totals.records = records
        self._gone, self._own_removals, self._removals_seen = 0, 0, totals.removed_records
        self._is_suspect = False
        books.trust()

    # -- making room ------------------------------------------------------------------------------------------------

    def make(self, books: Books, size: int) -> str:
        """Makes room for ``size`` more bytes.

        Returns:
            ``""``; `TOO_LARGE`, `MIN_FREE`: it can not be; `SEARCH`: let go of the lock, find victims, come back;
            `AGAIN`: let go of the lock for the others, and come back.

        Raises:
            OSError: nothing that was not accounted for has changed.
        """
        begun = self._clock()
        self.enter(books)
        if not books.is_exact or self._is_suspect:
            self.count(books)
        totals = books.totals
        # Evicting moves bytes from used to free and leaves their sum alone, so that the limit is taken once: a file
        # system that reports freed blocks late would otherwise empty the store.
        limit, reason = self._limit(totals)
        if totals.used + size > limit and begun >= self._census_at + CENSUS_INTERVAL:
            self._take_census(books)
            if not books.is_exact:
                self.count(books)
            limit, reason = self._limit(totals)
        if size > limit:
            return reason
        for _ in range(MOST_EVICTED):
            if totals.used + size <= limit:
                return ""
            if not self._victims or self._is_stale(totals):
                return SEARCH
            self._evict_oldest(books)
            if not books.is_exact:
                self.count(books)
            if self._clock() >= begun + HOLD_SECONDS:
                break
        return "" if totals.used + size <= limit else AGAIN

    def _limit(self, totals: Totals) -> tuple[int, str]:
        """(most bytes that may be used, why a record that is larger than it does not fit)."""
        total, free = self._calls.space(self._ledger.root.fd)
        on_device = totals.used - totals.claimed + free - int(self._min_free * total)
        if self._clock() < self._ceiling_until:
            on_device = min(on_device, self._ceiling)
        return (on_device, MIN_FREE) if on_device < self._capacity else (self._capacity, TOO_LARGE)

    def _is_stale(self, totals: Totals) -> bool:
        victims = self._victims
        age = self._clock() - victims.searched_at
        is_missing = self._misses > totals.removed_records - self._removals_seen and age > HINT_INTERVAL
        if not is_missing and age <= max(SEARCH_INTERVAL, 50 * victims.search_seconds):
            return False
        victims.forget()
        return True

    def _evict_oldest(self, books: Books) -> None:
        found = self._victims.take(self._ledger.root)
        if found is None:
            return
        totals = books.totals
        if isinstance(found, Victim):
            # Either another client removed it and accounted for it, or nobody did.
            self._gone += 1
            if self._gone > totals.removed_records - self._removals_seen - self._own_removals:
                books.doubt()
            return
        directory, victim, status = found
        books.doubt()
        try:
            books.removed.append(self._calls.open(victim.name, os.O_PATH, dir_fd=directory.fd))
            self._calls.unlink(victim.name, directory.fd)
        except FileNotFoundError:
            return  # removed outside at this moment: it is counted anew
        except OSError:
            books.trust()
            raise
        totals.remove(status.st_blocks * 512, 1)
        books.trust()
        self._own_removals += 1
        self._on_evicted(victim.above, victim.name)

    # -- beside the lock --------------------------------------------------------------------------------------------

    def missed(self) -> None:
        """A record was not there that somebody had reason to expect: a sign that records were removed outside."""
        self._misses += 1

    def refused(self, is_refused: bool, totals: Totals | None) -> None:
        """Whether the file system had no room for what was claimed: a quota, or somebody else writes as well."""
        self._refusals = self._refusals + 1 if is_refused else 0
        # The second time in a row: what fits is less than the file system says.
        if self._refusals > 1 and totals is not None:
            self._ceiling, self._ceiling_until = totals.used - totals.claimed, self._clock() + QUOTA_SECONDS

    def search(self, deadline: float) -> bool | None:
        """Finds victims, unless another thread just did; whether it is worth to come back.

        None if the deadline passed while the other one searched.

        Raises:
            OSError: the store could not be listed.
        """
        if not self._searching.acquire(timeout=max(0.0, min(deadline - self._clock(), threading.TIMEOUT_MAX))):
            return None
        try:
            if self._victims:
                return True
            before = self._ledger.peek()
            found = self._victims.search(self._ledger.root, 0 if before is None else before.records)
            after = self._ledger.peek()
            self._misses = self._gone = self._own_removals = 0
            self._removals_seen = 0 if before is None else before.removed_records
            if before is not None and after is not None:
                records = before.used - before.claimed
                least = records - (after.removed - before.removed)
                most = records + (after.added - before.added)
                # More or less than what everybody did meanwhile explains: something was done behind our back.
                self._is_suspect = not least <= found <= most
            return bool(self._victims) or self._is_suspect
        finally:
            self._searching.release()
