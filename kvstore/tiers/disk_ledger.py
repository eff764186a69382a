"""The account of a disk store that all its clients share: ``<root>/.ledger``.

Invariant: whenever nobody holds the lock and the ledger is not dirty, ``used`` is the allocated bytes of every record
under the root plus every claim of every client, to the byte. So under the lock:

1. names of records appear and vanish only there;
2. before a removal the ledger is marked dirty, after it the new totals are written without the mark;
3. a claim is in its client's own file before it is in the ledger, and leaves that file after it left the ledger.

Whoever is killed in between leaves a dirty ledger, or a file of a dead client with claims: either makes the next one
count the records anew. A ledger that is torn, damaged, of another boot (what the kernel had not yet written is lost)
or of another directory (a copy) counts as dirty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_draft import OPEN_FILE, Directory
from kvstore.tiers.disk_members import Member, read_exactly, with_checksum, without_checksum, write_exactly
from kvstore.tiers.disk_names import LEDGER_NAME
from kvstore.tiers.os_calls import OsCalls

_MAGIC = b"kvledg1\n"
_FIELDS = struct.Struct("<8s16sQ7Q")
_FILE_BYTES = _FIELDS.size + 16
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FIRST_WAIT = 50e-6
_LONGEST_WAIT = 1e-3
"""Seconds between two tries of the lock: flock(2) has no deadline, and a signal would need the main thread."""


class LedgerLocked(TimeoutError):
    """The lock of the ledger was not free in time: somebody counts a large store anew, or was stopped."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, "the lock of the ledger was not free in time")


@dataclass(slots=True)
class Totals:
    """The numbers of the ledger, in bytes where nothing else is said.

    Attributes:
        used: allocated bytes of all records, and all claims.
        claimed: of these, claims of files that have no name yet.
        records: number of records.
        added, removed: what was ever published and removed; only ever grow.
        removed_records: number of records that were ever removed.
        members: a random number that changes whenever a client comes or goes.
    """

    used: int = 0
    claimed: int = 0
    records: int = 0
    added: int = 0
    removed: int = 0
    removed_records: int = 0
    members: int = 0

    def remove(self, size: int, records: int) -> None:
        """Accounts for records that were removed."""
        self.used = max(self.claimed, self.used - size)
        self.records = max(0, self.records - records)
        self.removed += size
        self.removed_records += records


class Books:
    """The ledger while its lock is held: change ``totals`` freely; they are written when the lock is let go.

    Attributes:
        totals: meaningless while not ``is_exact``, but for ``members``.
        is_exact: whether they are what lies on the disk.
        is_foreign: whether they are whole, but of another boot or directory.
        removed: descriptors of removed files, closed when the lock is free again. Giving back a file's blocks takes
            up to 5 ms (ext4 with ``discard``), removing its name 30 us; the kernel does the former with the last
            descriptor, also of a process that was killed.
    """

    __slots__ = ("_calls", "_fd", "_is_clean", "_on_disk", "_place", "is_exact", "is_foreign", "removed", "totals")

    def __init__(self, calls: OsCalls, fd: int, place: bytes) -> None:
        self._calls = calls
        self._fd = fd
        self._place = place
        self.removed: list[int] = []
        self._on_disk = read_exactly(calls, fd, _FILE_BYTES)
        found = _parse(self._on_disk)
        self.totals, is_dirty, written_at = found or (Totals(), True, place)
        self.is_foreign = not is_dirty and written_at != place
        self.is_exact = self._is_clean = not is_dirty and not self.is_foreign

    def doubt(self) -> None:
        """Marks the ledger dirty before something that a kill could cut short.

        Raises:
            OSError: it could not be marked.
        """
        self.is_exact = False
        # What is torn, foreign or dirty already is counted anew without a mark; a full disk may not take one.
        if self._is_clean:
            self.write()

    def trust(self) -> None:
        """Says that the totals are what lies on the disk."""
        self.is_exact = True

    def write(self) -> None:
        """Writes the totals, and the mark unless they are exact.

        Raises:
            OSError: the ledger says what it said before.
        """
        t = self.totals
        fields = _FIELDS.pack(
            _MAGIC, self._place, not self.is_exact,
            t.used, t.claimed, t.records, t.added, t.removed, t.removed_records, t.members,
        )  # fmt: skip
        content = with_checksum(fields)
        if content != self._on_disk:
            write_exactly(self._calls, self._fd, content)
            self._on_disk, self._is_clean = content, self.is_exact


def _parse(content: bytes) -> tuple[Totals, bool, bytes] | None:
    """(totals, whether dirty, where it was written), None for what is no ledger."""
    fields = without_checksum(content) if len(content) == _FILE_BYTES else None
    if fields is None:
        return None
    magic, place, dirty, *numbers = _FIELDS.unpack(fields)
    return (Totals(*numbers), bool(dirty), place) if magic == _MAGIC else None


class Ledger:
    """The ledger of one root, for one client. Thread-safe; `member` is used under the lock only.

    Args:
        calls: the operating system.
        root: the root of the store.
        member: this client's own file.
        clock: monotonic seconds.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        calls: OsCalls,
        root: Directory,
        member: Member,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._calls = calls
        self._root: Directory | None = root
        self._member = member
        self._clock = clock
        self._sleep = sleep
        self._threads = threading.Lock()
        self._place = _place(calls, root)
        self._file: Directory | None = None
        self._has_failed = False

    @property
    def root(self) -> Directory:
        """The root of the store.

        Raises:
            OSError: EBADF after `close`.
        """
        root = self._root
        if root is None:
            raise OSError(errno.EBADF, "the store is closed")
        return root

    def close(self) -> None:
        """Lets go of the root; who uses it keeps it until the end."""
        self._root = self._file = None

    @contextlib.contextmanager
    def locked(self, until: float) -> Iterator[Books]:
        """Holds the lock; at its end the totals are written, then this client's own file.

        Args:
            until: moment of the clock after which the lock is not waited for.

        Raises:
            LedgerLocked: it was not free in time.
            OSError: the ledger could not be read or written; if the latter, the next one who locks it counts anew.
        """
        if not self._threads.acquire(timeout=max(0.0, min(until - self._clock(), threading.TIMEOUT_MAX))):
            raise LedgerLocked
        removed: list[int] = []
        try:
            file = self._lock_file(until)
            try:
                books = Books(self._calls, file.fd, self._place)
                removed = books.removed
                if self._has_failed:
                    books.doubt()
                try:
                    yield books
                finally:
                    self._has_failed = True
                    books.write()
                    self._member.note()
                    self._has_failed = False
            finally:
                # Said aloud: a descriptor that a fork took along would keep the lock beyond close(2).
                self._calls.lock(file.fd, free=True)
        finally:
            self._threads.release()
            for fd in removed:
                self._calls.close(fd)

    def _lock_file(self, until: float) -> Directory:
        while True:
            file = self._file or self._open_file()
            wait = _FIRST_WAIT
            while not self._try_lock(file.fd):
                if self._clock() >= until:
                    raise LedgerLocked
                self._sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            # A ledger that was removed meanwhile is nobody's any more.
            if self._calls.stat(file.fd).st_nlink:
                self._file = file
                return file
            self._file = None

    def _open_file(self) -> Directory:
        flags = os.O_CREAT | os.O_RDWR | os.O_NONBLOCK
        file = Directory(self._calls, self._calls.open(LEDGER_NAME, flags, 0o600, dir_fd=self.root.fd))
        status = self._calls.stat(file.fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "not a regular file of this user", LEDGER_NAME)
        return file

    def _try_lock(self, fd: int) -> bool:
        try:
            self._calls.lock(fd)
        except BlockingIOError:
            return False
        return True

    def peek(self) -> Totals | None:
        """The totals as they were a moment ago, without the lock; None if they are not known. 10 us."""
        try:
            fd = self._calls.open(LEDGER_NAME, OPEN_FILE, dir_fd=self.root.fd)
        except OSError:
            return None
        try:
            found = _parse(read_exactly(self._calls, fd, _FILE_BYTES))
        except OSError:
            return None
        finally:
            self._calls.close(fd)
        return found[0] if found is not None and not found[1] and found[2] == self._place else None


def _place(calls: OsCalls, root: Directory) -> bytes:
    """Digest of this boot and this directory, 16 bytes."""
    boot = b""
    with contextlib.suppress(OSError):
        fd = calls.open(_BOOT_ID, os.O_RDONLY)
        try:
            boot = read_exactly(calls, fd, 64)
        finally:
            calls.close(fd)
    try:
        status = calls.stat(root.fd)
    except OSError as error:
        raise TierUnavailable(f"the root of the store can not be looked at: {error.strerror}") from None
    return xxhash.xxh3_128_digest(b"%b %d %d" % (boot, status.st_dev, status.st_ino))


def error_name(error: OSError) -> str:
    """An operating system error as a label of counters: ``ENOSPC``, ``ledger_locked``."""
    return "ledger_locked" if isinstance(error, LedgerLocked) else errno.errorcode.get(error.errno or 0, "OSError")
