"""Who uses a disk store now, and what each of them has in flight.

Invariant: every client that may write has a file ``<root>/.inflight-<random>`` that it holds a ``flock`` on. The
kernel drops the lock with the process, so a file that can be locked is of a dead client. It says the client's
capacity and the bytes that it has claimed and not yet published or given back; it is written, read and removed only
under the lock of the ledger, and never says less than the ledger holds for its client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from kvstore.tiers.disk_draft import DRAFT_NAME, OPEN_FILE, Directory, collect_draft, open_directory
from kvstore.tiers.disk_names import MEMBER_NAME
from kvstore.tiers.os_calls import OsCalls

_MAGIC = b"kvmemb1\n"
_FIELDS = struct.Struct("<8sQQ")
_CHECKSUM_BYTES = 16
_FILE_BYTES = _FIELDS.size + _CHECKSUM_BYTES


def with_checksum(fields: bytes) -> bytes:
    """``fields`` and their XXH3-128."""
    return fields + xxhash.xxh3_128_digest(fields)


def without_checksum(content: bytes) -> bytes | None:
    """The fields of `with_checksum`; None if the checksum is not theirs."""
    fields, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return fields if fields and xxhash.xxh3_128_digest(fields) == checksum else None


def read_exactly(calls: OsCalls, fd: int, size: int) -> bytes:
    """Up to ``size`` bytes of the beginning of a small file, by one read."""
    buffer = memoryview(bytearray(size))
    return bytes(buffer[: calls.read(fd, buffer, 0)])


def write_exactly(calls: OsCalls, fd: int, content: bytes) -> None:
    """Writes the whole of a small file by one write, so that a kill leaves the old or the new content.

    Raises:
        OSError: as write(2); EIO for a write that stays short.
    """
    if calls.write(fd, content, 0) != len(content):
        raise OSError(errno.EIO, "a small write stays short")


class Member:
    """This client's own file. Not thread-safe: used under the lock of the ledger.

    Attributes:
        capacity: the capacity that this client was configured with.
        claimed: bytes that it has claimed and not yet published or given back.
        name: of the file, ``""`` before `join`.
    """

    __slots__ = ("_calls", "_fd", "_new_name", "_written", "capacity", "claimed", "name")

    def __init__(self, calls: OsCalls, capacity: int, new_name: Callable[[], str]) -> None:
        self._calls = calls
        self._new_name = new_name
        self._fd = -1
        self._written = -1
        self.capacity = capacity
        self.claimed = 0
        self.name = ""

    @property
    def has_joined(self) -> bool:
        """Whether the file is there; looked at by `look`."""
        return self._fd >= 0

    def look(self) -> None:
        """Notices a file that was removed behind our back.

        Raises:
            OSError: as stat(2).
        """
        if self._fd >= 0 and not self._calls.stat(self._fd).st_nlink:
            self.let_go()

    def join(self, root: Directory) -> None:
        """Makes the file.

        Raises:
            OSError: it can not be made; then there is none.
        """
        self.let_go()
        name = f".inflight-{self._new_name()}"
        self._fd = self._calls.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, dir_fd=root.fd)
        self.name = name
        try:
            self._calls.lock(self._fd)
            self.note()
        except BaseException:
            self.leave(root)
            raise

    def note(self) -> None:
        """Writes what is claimed, if that is not what the file says.

        Raises:
            OSError: the file says what it said before.
        """
        if self._fd >= 0 and self._written != self.claimed:
            fields = _FIELDS.pack(_MAGIC, min(self.capacity, (1 << 63) - 1), self.claimed)
            write_exactly(self._calls, self._fd, with_checksum(fields))
            self._written = self.claimed

    def leave(self, root: Directory) -> None:
        """Removes the file. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._calls.unlink(self.name, root.fd)
        self.let_go()

    def let_go(self) -> None:
        """Lets go of the file, which the others collect where it still has its name. Idempotent."""
        if self._fd >= 0:
            fd, self._fd, self._written, self.name = self._fd, -1, -1, ""
            self._calls.close(fd)


@dataclass(frozen=True, slots=True)
class Census:
    """Everyone else who has a file.

    Attributes:
        alive: their number.
        capacity: the smallest of their capacities, None if nobody is there.
        claimed: bytes that they have claimed.
        dead: names of files whose client is gone.
        owes: whether one of the dead had claimed bytes: what it did with them is not known.
    """

    alive: int
    capacity: int | None
    claimed: int
    dead: tuple[str, ...]
    owes: bool


def take_census(calls: OsCalls, root: Directory, own: str) -> Census:
    """Looks at every client's file but ``own``. Under the lock of the ledger; 15 us a client.

    Raises:
        OSError: the root could not be listed, or a file not be opened.
    """
    alive, claimed, owes = 0, 0, False
    capacities: list[int] = []
    dead: list[str] = []
    listing = open_directory(calls, ".", root)
    for name in [entry.name for entry in calls.scandir(listing.fd)]:
        if DRAFT_NAME.fullmatch(name):
            collect_draft(calls, root, name)
        if name == own or MEMBER_NAME.fullmatch(name) is None:
            continue
        try:
            fd = calls.open(name, OPEN_FILE, dir_fd=root.fd)
        except FileNotFoundError:
            continue
        try:
            status = calls.stat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                continue
            found = _parse(read_exactly(calls, fd, _FILE_BYTES))
            try:
                calls.lock(fd)
            except BlockingIOError:
                alive += 1
                if found is not None:
                    capacities.append(found[0])
                    claimed += found[1]
                continue
            dead.append(name)
            # An empty file is of a client that died before it could claim.
            owes = owes or (found is None and status.st_size > 0) or (found is not None and found[1] > 0)
        finally:
            calls.close(fd)
    return Census(alive, min(capacities, default=None), claimed, tuple(dead), owes)


def _parse(content: bytes) -> tuple[int, int] | None:
    fields = without_checksum(content) if len(content) == _FILE_BYTES else None
    if fields is None:
        return None
    magic, capacity, claimed = _FIELDS.unpack(fields)
    return (capacity, claimed) if magic == _MAGIC else None
