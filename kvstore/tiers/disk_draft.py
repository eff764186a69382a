"""Directories by descriptor, and files that have no name until they are complete.

Invariant: a name appears only on a file that is complete. The protocol of a write:

1. open a file without a name (``O_TMPFILE``) in the directory that will have it;
2. write all of it, past the page cache where the file system can (``O_DIRECT``);
3. ``fsync``, where asked for; a failure discards the file;
4. link the name, which never replaces one.

A process that dies before 4 leaves nothing. Where ``O_TMPFILE`` is refused the file has a temporary name and its
writer holds a ``flock`` on it, which the kernel drops with the process, so that `collect_draft` can tell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable

from kvstore.tiers.os_calls import OsCalls
from kvstore.units import MIB, PAGE

PIECE_BYTES = 8 * MIB
"""Bytes of one read or write: between two, the deadline is looked at."""

DRAFT_NAME = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK
"""O_NONBLOCK: a FIFO under a record's name must not hang the reader; regular files ignore it."""

Expired = Callable[[], bool]


class Directory:
    """An open directory. Closed with its last user, so that a running verb never loses it."""

    __slots__ = ("_os", "fd")

    def __init__(self, calls: OsCalls, fd: int) -> None:
        self._os = calls
        self.fd = fd

    def __del__(self) -> None:
        self._os.close(self.fd)


def open_directory(calls: OsCalls, name: str, parent: Directory | None = None) -> Directory:
    """Opens a directory, of a parent or by its path.

    Raises:
        OSError: ENOENT, ENOTDIR (also for a link, ELOOP) and the rest of open(2).
    """
    fd = calls.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=None if parent is None else parent.fd)
    return Directory(calls, fd)


def make_directory(calls: OsCalls, name: str, parent: Directory, sync: bool = False) -> Directory:
    """Opens a directory that is made (0700) if it is not there; any number of processes may do so at once.

    With ``sync`` its name is on stable storage then: also where it was there, since who made it may not have asked for
    that, or not have come so far.
    """
    try:
        directory = open_directory(calls, name, parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            calls.mkdir(name, 0o700, dir_fd=parent.fd)
        directory = open_directory(calls, name, parent)
    if sync:
        calls.sync(parent.fd)
    return directory


class Draft:
    """A file that is being written and has no name yet."""

    __slots__ = ("_calls", "_directory", "_fd", "_temporary", "is_direct")

    def __init__(self, calls: OsCalls, directory: Directory, fd: int, temporary: str, is_direct: bool) -> None:
        self._calls = calls
        self._directory = directory
        self._fd = fd
        self._temporary = temporary
        self.is_direct = is_direct

    def fill(self, content: memoryview, expired: Expired) -> bool:
        """Writes all of ``content``; False if ``expired`` said so between two pieces.

        Raises:
            OSError: as write(2); EIO for a write that stays short.
        """
        at = 0
        while at < len(content):
            if expired():
                return False
            count = self._calls.write(self._fd, content[at : at + PIECE_BYTES], at)
            reached = at + count if at + count == len(content) else (at + count) // PAGE * PAGE
            if reached <= at:
                raise OSError(errno.EIO, f"a write of {len(content)} bytes stays at {at + count}")
            at = reached
        return True

    def allocated_bytes(self) -> int:
        """What the file takes on the device now."""
        return self._calls.stat(self._fd).st_blocks * 512

    def sync(self) -> None:
        """Waits until the bytes are on stable storage."""
        self._calls.sync(self._fd)

    def mark_used(self, used_ns: int) -> None:
        """Sets the time of last use, nanoseconds since 1970."""
        self._calls.utime(self._fd, used_ns)

    def link(self, name: str) -> None:
        """Gives the file its name.

        Raises:
            FileExistsError: the name is taken.
        """
        self._calls.link(self._temporary or self._fd, name, self._directory.fd)
        if self._temporary:
            # Now, not when it is closed: a second name would keep the bytes when the first one is evicted.
            temporary, self._temporary = self._temporary, ""
            self._calls.unlink(temporary, self._directory.fd)

    def close(self) -> None:
        """Lets go of the file; without a name it is gone. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self._temporary:
                with contextlib.suppress(FileNotFoundError):
                    self._calls.unlink(self._temporary, self._directory.fd)
        finally:
            self._calls.close(fd)


def collect_draft(calls: OsCalls, directory: Directory, name: str) -> bool:
    """Removes the named draft of a dead writer; False if it lives (its lock is held) or is gone already."""
    try:
        fd = calls.open(name, OPEN_FILE, dir_fd=directory.fd)
    except OSError:
        return False
    try:
        calls.lock(fd)
        calls.unlink(name, directory.fd)
    except OSError:
        return False
    finally:
        calls.close(fd)
    return True
