"""The disk tier's calls on a disk in memory: they fail on demand, do less than asked, and can die as a process does.

Invariant: what a call answers is what Linux answers on a local file system, as far as the disk tier can tell.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, cast

from kvstore.testing.memory_disk import Entry, MemoryDisk, Node
from kvstore.tiers.os_calls import OsCalls
from kvstore.units import GIB, align_up

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EMFILE", "ESTALE", "EINTR", "ENFILE", "ENOENT")
"""Names of what a call may fail with."""

_MAGIC_EXT4 = 0xEF53
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_VIRTUAL = "/proc/"
_SPACE = (64 * GIB, 32 * GIB)


class _Descriptors(OsCalls):
    """The calls on what is open."""

    def __init__(
        self, disk: MemoryDisk, before: Callable[[str], object] = lambda call: None, most: int = 1 << 30
    ) -> None:
        self.disk = disk
        self.before = before
        self.most = most
        self._open: dict[int, Node] = {}
        self._is_dead = False

    def close(self, fd: int) -> None:
        if self._is_dead:
            return
        node = self._open.pop(fd)
        if node.holder == fd:
            node.holder = None

    def die(self) -> None:
        """What the kernel does for a process that was killed: lets go of every descriptor and lock."""
        for fd in list(self._open):
            self.close(fd)
        self._is_dead = True

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.before("read")
        content = self._node(fd).content[offset : offset + min(len(buffer), self.most)]
        buffer[: len(content)] = content
        return len(content)

    def write(self, fd: int, buffer: memoryview | bytes, offset: int) -> int:
        self.before("write")
        content, node = bytes(buffer)[: self.most], self._node(fd)
        node.content.extend(bytes(max(0, offset - len(node.content))))
        node.content[offset : offset + len(content)] = content
        return len(content)

    def scandir(self, fd: int) -> Iterator[os.DirEntry[Any]]:
        self.before("scandir")
        for name, node in list(self._node(fd).names.items()):
            yield cast("os.DirEntry[Any]", Entry(name, node))

    def sync(self, fd: int) -> None:
        self.before("sync")
        node = self._node(fd)
        node.synced = bytes(node.content)
        node.synced_names = dict(node.names)

    def space(self, fd: int) -> tuple[int, int]:
        self.before("space")
        return _SPACE

    def lock(self, fd: int, *, free: bool = False) -> None:
        if free:
            self._free(fd)
            return
        self.before("lock")
        node = self._node(fd)
        if node.holder not in (None, fd):
            raise BlockingIOError(errno.EAGAIN, "somebody else has the lock")
        node.holder = fd

    def _free(self, fd: int) -> None:
        self.before("unlock")
        if self._node(fd).holder == fd:
            self._node(fd).holder = None

    def file_system_magic(self, fd: int) -> int:
        self.before("file_system_magic")
        return _MAGIC_EXT4

    def _descriptor(self, node: Node) -> int:
        fd = next(self.disk.descriptors)
        self._open[fd] = node
        return fd

    def _node(self, fd: int) -> Node:
        if fd not in self._open:
            raise _error(errno.EBADF, str(fd))
        return self._open[fd]


class MemoryCalls(_Descriptors):
    """One process's calls on a `MemoryDisk`. Not thread-safe.

    Args:
        disk: shared by the processes of one machine.
        before: called with the name of each call before it is made (but ``close``); what it raises, the call raises.
        most: bytes that one read or write moves at most.
    """

    @property
    def open_count(self) -> int:
        """Descriptors that are open."""
        return len(self._open)

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        self.before("open")
        directory = self._directory(dir_fd)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return self._descriptor(self.disk.make(stat.S_IFREG | mode))
        node = self._find(name, directory)
        if node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, name)
            node = self.disk.make(stat.S_IFREG | mode)
            self._add(directory, name, node)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, name)
        if flags & os.O_DIRECTORY and not node.is_directory:
            raise _error(errno.ENOTDIR, name)
        return self._descriptor(node)

    def link(self, source: str | int, name: str, dir_fd: int) -> None:
        self.before("link")
        directory = self._directory(dir_fd)
        node = self._node(source) if isinstance(source, int) else self._named(source, directory)
        if name in directory.names:
            raise _error(errno.EEXIST, name)
        self._add(directory, name, node)

    def unlink(self, name: str, dir_fd: int) -> None:
        self.before("unlink")
        directory = self._directory(dir_fd)
        if self._named(name, directory).is_directory:
            raise _error(errno.EISDIR, name)
        directory.names.pop(name).links -= 1

    def rmdir(self, name: str, dir_fd: int) -> None:
        self.before("rmdir")
        directory = self._directory(dir_fd)
        node = self._named(name, directory)
        if node.names or not node.is_directory:
            raise _error(errno.ENOTEMPTY if node.names else errno.ENOTDIR, name)
        directory.names.pop(name).links -= 1

    def mkdir(self, name: str, mode: int, dir_fd: int | None = None) -> None:
        self.before("mkdir")
        directory = self._directory(dir_fd)
        if name in directory.names:
            raise _error(errno.EEXIST, name)
        self._add(directory, name, self.disk.make(stat.S_IFDIR | mode))

    def stat(self, target: str | int, dir_fd: int | None = None) -> os.stat_result:
        self.before("stat")
        if isinstance(target, str) and target.startswith(_VIRTUAL):
            return _status(self.disk.top)
        return _status(self._node(target) if isinstance(target, int) else self._named(target, self._directory(dir_fd)))

    def utime(self, target: str | int, mtime_ns: int, dir_fd: int | None = None) -> None:
        self.before("utime")
        node = self._node(target) if isinstance(target, int) else self._named(target, self._directory(dir_fd))
        node.mtime_ns = mtime_ns

    def _directory(self, dir_fd: int | None) -> Node:
        return self.disk.top if dir_fd is None else self._node(dir_fd)

    def _find(self, name: str, directory: Node) -> Node | None:
        if name == "." or name.endswith("/."):
            return directory
        if name == _BOOT_ID:
            return Node(0, stat.S_IFREG | 0o444, bytearray(b"boot %d\n" % self.disk.boots))
        return directory.names.get(name)

    def _named(self, name: str, directory: Node) -> Node:
        node = self._find(name, directory)
        if node is None:
            raise _error(errno.ENOENT, name)
        return node

    def _add(self, directory: Node, name: str, node: Node) -> None:
        directory.names[name] = node
        node.links += 1


def _error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


def _status(node: Node) -> os.stat_result:
    size = len(node.content)
    links = node.links + node.is_directory
    ten = (node.mode, node.number, 1, links, os.geteuid(), os.getegid(), size, 0, node.mtime_ns // 10**9, 0)
    return os.stat_result(ten, {"st_mtime_ns": node.mtime_ns, "st_blocks": align_up(size) // 512})


class FailOnce:
    """Fails the call of a given number, for `MemoryCalls.before`; with ``at`` < 0 it only counts.

    Attributes:
        calls: names of the calls so far.
    """

    def __init__(self, at: int = -1, error: str = "EIO") -> None:
        self._at = at
        self._number = getattr(errno, error)
        self.calls: list[str] = []

    def __call__(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) - 1 == self._at:
            raise OSError(self._number, os.strerror(self._number))
