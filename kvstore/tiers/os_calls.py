"""The operating system calls of the disk tier, behind one small class so that tests can inject faults.

Invariant: no other module of the disk tier calls ``os`` for I/O. Every call may raise OSError; EINTR never (Python
retries it, PEP 475). Names are relative to a directory's descriptor and are never followed when they are links.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_STATFS_BYTES = 512
"""More than any architecture's ``struct statfs``."""


class OsCalls:
    """The real calls. Blocking; they release the GIL. Thread-safe."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        """A descriptor, closed on exec, that never followed a link in its last component."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Closes a descriptor. Never fails: it is released whatever close(2) says, and who must know syncs first."""
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads into ``buffer``; fewer bytes than asked are possible, 0 is the end."""
        return os.preadv(fd, [buffer], offset)

    def write(self, fd: int, buffer: memoryview | bytes, offset: int) -> int:
        """Writes ``buffer``; fewer bytes than asked are possible."""
        return os.pwrite(fd, buffer, offset)

    def link(self, source: str | int, name: str, dir_fd: int) -> None:
        """Gives a file another name, never replacing one: a name of the same directory, or an open O_TMPFILE file."""
        if isinstance(source, int):
            # Without dst_dir_fd Python calls link(2), which does not follow the magic link and fails with EXDEV.
            os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=dir_fd, follow_symlinks=True)
        else:
            os.link(source, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Removes a name that is not a directory."""
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Removes an empty directory."""
        os.rmdir(name, dir_fd=dir_fd)

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        """Makes a directory."""
        os.mkdir(name, mode, dir_fd=dir_fd)

    def scandir(self, fd: int) -> Iterator[os.DirEntry[Any]]:
        """Entries of a directory. The descriptor's position is used up: give it one of its own."""
        with os.scandir(fd) as entries:
            yield from entries

    def stat(self, target: str | int, dir_fd: int | None = None) -> os.stat_result:
        """Status of an open file, or of a name; of a link itself where it is one."""
        return os.fstat(target) if isinstance(target, int) else os.stat(target, dir_fd=dir_fd, follow_symlinks=False)

    def sync(self, fd: int) -> None:
        """Waits until a file's bytes, or a directory's names, are on stable storage."""
        os.fsync(fd)

    def utime(self, target: str | int, mtime_ns: int, dir_fd: int | None = None) -> None:
        """Sets access and modification time of an open file, or of a name."""
        if isinstance(target, int):
            os.utime(target, ns=(mtime_ns, mtime_ns))
        else:
            os.utime(target, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)

    def space(self, fd: int) -> tuple[int, int]:
        """(bytes in all, bytes that we may still use) of the file system."""
        found = os.fstatvfs(fd)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def lock(self, fd: int, *, free: bool = False) -> None:
        """Takes an exclusive ``flock`` or raises BlockingIOError at once; the kernel frees it with the process.

        With ``free`` it frees the lock, also for descriptors that share it.
        """
        fcntl.flock(fd, fcntl.LOCK_UN if free else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def file_system_magic(self, fd: int) -> int:
        """``f_type`` of ``fstatfs(2)``: which kind of file system this is."""
        # statfs and not /proc/self/mountinfo: it answers for the directory that is open, whatever is mounted where.
        found = ctypes.create_string_buffer(_STATFS_BYTES)
        while _LIBC.fstatfs(fd, found):
            number = ctypes.get_errno()
            if number != errno.EINTR:  # which Python retries for its own calls only
                raise OSError(number, os.strerror(number))
        return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF
