"""Whole files under a directory descriptor: written by way of a draft, read into a given buffer.

Invariant: what is read is a regular file of ours that was never reached through a link, of exactly the length asked
for; what is removed is removed by name, and only while the name leads to what was looked at. Direct I/O and files
without a name are used until the file system refuses them once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from dataclasses import dataclass

from kvstore.tiers.disk_draft import OPEN_FILE, PIECE_BYTES, Directory, Draft, Expired
from kvstore.tiers.os_calls import OsCalls
from kvstore.units import PAGE

log = logging.getLogger(__name__)

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class Found:
    """What a name led to when it was read: ``kind`` of trouble (``""`` for none), and the file for `Files.drop`.

    Kinds: ``absent``, ``late`` (the deadline passed), ``symlink``, ``not_a_file``, ``owner``,
    ``mode`` (not readable for its owner), ``size``.
    """

    kind: str
    status: os.stat_result | None = None


class Files:
    """Reads and writes files in the way that the file system turned out to support.

    Thread-safe: its two flags only ever fall.

    Attributes:
        is_direct: whether ``O_DIRECT`` works here (so far).
        is_unnamed: whether ``O_TMPFILE`` and linking from ``/proc/self/fd`` work here (so far).
    """

    __slots__ = ("_calls", "is_direct", "is_unnamed")

    def __init__(self, calls: OsCalls) -> None:
        self._calls = calls
        self.is_direct = True
        try:
            calls.stat("/proc/self/fd")
            self.is_unnamed = True
        except OSError:
            self.is_unnamed = False

    @property
    def notes(self) -> list[str]:
        """What of this did not work here, for people."""
        return [*([] if self.is_direct else ["buffered"]), *([] if self.is_unnamed else ["named temporary files"])]

    def draft(self, directory: Directory, direct: bool = True) -> Draft:
        """Opens a new file without a name in ``directory``; ``direct`` False for small ones."""
        while True:
            use_direct = direct and self.is_direct
            flag = os.O_DIRECT if use_direct else 0
            if not self.is_unnamed:
                return self._named_draft(directory, use_direct)
            try:
                fd = self._calls.open(".", os.O_TMPFILE | os.O_RDWR | flag, 0o600, dir_fd=directory.fd)
                return Draft(self._calls, directory, fd, "", use_direct)
            except OSError as error:
                if use_direct and error.errno == errno.EINVAL:
                    self._stop_direct()
                elif error.errno in _NO_TMPFILE:
                    self.is_unnamed = False
                else:
                    raise

    def _named_draft(self, directory: Directory, use_direct: bool) -> Draft:
        name = f".tmp-{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        try:
            fd = self._calls.open(name, flags | (os.O_DIRECT if use_direct else 0), 0o600, dir_fd=directory.fd)
        except OSError as error:
            if not use_direct or error.errno != errno.EINVAL:
                raise
            use_direct = False
            self._stop_direct()
            self._forget(directory, name)  # some kernels make the file and refuse the flag only then
            fd = self._calls.open(name, flags, 0o600, dir_fd=directory.fd)
        draft = Draft(self._calls, directory, fd, name, use_direct)
        try:
            self._calls.lock(fd)
            if self._calls.stat(fd).st_nlink:
                return draft
        except BlockingIOError:
            pass
        except OSError:
            draft.close()
            raise
        # Somebody who collects what the dead left was faster than our lock.
        draft.close()
        return self._named_draft(directory, use_direct)

    def _stop_direct(self) -> None:
        if self.is_direct:
            self.is_direct = False
            log.warning("disk buffered: this file system refuses direct I/O, so records go through the page cache")

    def _forget(self, directory: Directory, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(name, directory.fd)

    def fill(self, directory: Directory, content: memoryview, expired: Expired) -> Draft | None:
        """A draft with ``content``, or None if ``expired`` said so. Falls back to buffered writes, once.

        Raises:
            OSError: nothing is left behind.
        """
        while True:
            draft = self.draft(directory)
            try:
                if draft.fill(content, expired):
                    return draft
                draft.close()
                return None
            except OSError as error:
                draft.close()
                if not (draft.is_direct and error.errno == errno.EINVAL):
                    raise
                self._stop_direct()
            except BaseException:
                draft.close()
                raise

    def publish(self, directory: Directory, name: str, content: bytes, sync: bool = True) -> bool:
        """Writes a small file under ``name``; False if the name is taken (by then complete)."""
        draft = self.draft(directory, direct=False)
        try:
            draft.fill(memoryview(content), lambda: False)
            if sync:
                draft.sync()
            try:
                draft.link(name)
            except FileExistsError:
                return False
            if sync:
                self._calls.sync(directory.fd)
            return True
        finally:
            draft.close()

    def small(self, directory: Directory, name: str, limit: int) -> bytes | None:
        """Up to ``limit`` + 1 bytes of a small regular file of ours, None if there is none.

        Raises:
            OSError: as open(2) and read(2); EPERM for what is not a regular file of ours.
        """
        try:
            fd = self._calls.open(name, OPEN_FILE, dir_fd=directory.fd)
        except FileNotFoundError:
            return None
        try:
            status = self._calls.stat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "not a regular file of this user", name)
            content = memoryview(bytearray(min(limit + 1, status.st_size)))
            at = 0
            while at < len(content) and (count := self._calls.read(fd, content[at:], at)):
                at += count
            return bytes(content[:at])
        finally:
            self._calls.close(fd)

    def is_same(self, directory: Directory, name: str, page: bytes, size: int) -> bool:
        """Whether ``name`` is a regular file of ours of ``size`` bytes that starts with ``page``."""
        try:
            status = self._calls.stat(name, directory.fd)
            if trouble(status) or status.st_size != size:
                return False
            return self.small(directory, name, len(page) - 1) == page
        except (FileNotFoundError, PermissionError):
            return False

    def make_durable(self, directory: Directory, name: str) -> bool:
        """Waits until ``name`` and its bytes are on stable storage; False if there is no such file.

        Raises:
            OSError: as open(2) and fsync(2).
        """
        try:
            fd = self._calls.open(name, OPEN_FILE, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        try:
            self._calls.sync(fd)
        finally:
            self._calls.close(fd)
        self._calls.sync(directory.fd)
        return True

    def load(self, directory: Directory, name: str, buffer: memoryview, expired: Expired) -> Found:
        """Reads the whole of ``name`` into ``buffer``, whose length the file must have exactly.

        Raises:
            OSError: a failure that says nothing about the file.
        """
        try:
            fd, use_direct = self._open_record(directory, name)
        except FileNotFoundError:
            return Found("absent")
        except OSError:
            kind = trouble(self._calls.stat(name, directory.fd))
            if not kind:
                raise
            return Found(kind)
        try:
            status = self._calls.stat(fd)
            kind = trouble(status)
            if not kind and status.st_size != len(buffer):
                kind = "size"
            if kind:
                return Found(kind, status)
            kind = self._read_all(fd, buffer, expired)
        except OSError as error:
            if not (use_direct and error.errno == errno.EINVAL):
                raise
            self._stop_direct()
            return self.load(directory, name, buffer, expired)
        finally:
            self._calls.close(fd)
        return Found(kind, status)

    def _open_record(self, directory: Directory, name: str) -> tuple[int, bool]:
        if self.is_direct:
            try:
                return self._calls.open(name, OPEN_FILE | os.O_DIRECT, dir_fd=directory.fd), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if not trouble(self._calls.stat(name, directory.fd)):
                    self._stop_direct()
        return self._calls.open(name, OPEN_FILE, dir_fd=directory.fd), False

    def _read_all(self, fd: int, buffer: memoryview, expired: Expired) -> str:
        at, size = 0, len(buffer)
        while at < size:
            if expired():
                return "late"
            count = self._calls.read(fd, buffer[at : at + PIECE_BYTES], at)
            reached = (at + count) // PAGE * PAGE
            if reached <= at:
                if self._calls.stat(fd).st_size != size:
                    return "size"
                raise OSError(errno.EIO, f"a read of {size} bytes stays at {at + count}")
            at = reached
        return ""

    def drop(self, directory: Directory, name: str, status: os.stat_result) -> tuple[int, int]:
        """Removes ``name`` if it still leads to the file that ``status`` describes; (bytes, records) that went."""
        try:
            now = self._calls.stat(name, directory.fd)
            if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
                return 0, 0
            self._calls.unlink(name, directory.fd)
        except FileNotFoundError:
            return 0, 0
        return status.st_blocks * 512, 1

    def remove(self, directory: Directory, name: str) -> tuple[int, int]:
        """Removes whatever has ``name``, a directory only if it is empty; (bytes, records) that went."""
        try:
            status = self._calls.stat(name, directory.fd)
            if stat.S_ISDIR(status.st_mode):
                self._calls.rmdir(name, directory.fd)
                return 0, 0
            self._calls.unlink(name, directory.fd)
        except FileNotFoundError:
            return 0, 0
        return (status.st_blocks * 512, 1) if stat.S_ISREG(status.st_mode) else (0, 0)


def trouble(status: os.stat_result) -> str:
    """Kind of what is not a regular file of ours that we may read, ``""`` for one that is."""
    if stat.S_ISLNK(status.st_mode):
        return "symlink"
    if not stat.S_ISREG(status.st_mode):
        return "not_a_file"
    if status.st_uid != os.geteuid():
        return "owner"
    # Looked at here too for root, who could read it.
    return "" if status.st_mode & stat.S_IRUSR else "mode"
