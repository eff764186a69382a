"""Walking below the root of a disk store, without an engine and beside running ones.

Invariant: nothing is written, created, locked or touched, and everything is reached by descriptors that follow no
link. What can not be a record is a `Finding`; what vanishes meanwhile is nothing.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_draft import OPEN_FILE, Directory, open_directory
from kvstore.tiers.disk_names import FAN_NAME, NAMESPACE_NAME, RECORD_NAME, SHARD_NAME
from kvstore.tiers.disk_root import EPOCH_FILE, EPOCH_NAME, MARKER, MARKER_TEXT, NAMESPACE_FILE
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.tools import Finding, StoredRecord, Verdict

_LEVELS = (NAMESPACE_NAME, EPOCH_NAME, SHARD_NAME, FAN_NAME)
_OF_A_STORE: tuple[frozenset[str], ...] = (
    frozenset({"lost+found"}),
    frozenset({NAMESPACE_FILE, EPOCH_FILE}),
    frozenset(),
    frozenset(),
)
"""Names that belong to each level besides those of its pattern. What begins with a dot is the tier's own business."""

NOT_THERE = (FileNotFoundError, NotADirectoryError)

Wanted = Callable[[tuple[str, ...]], bool]
"""Whether to go into the directory with these names below the root."""


class StoreWalk:
    """The directories of one store. One thread; blocks for its I/O.

    Cost: 5 us a record with a warm cache. Memory: the names in one directory.

    Args:
        path: the root.
        calls: the operating system.
        now: Unix seconds; uses in the future count as now.

    Attributes:
        owner: user id of who owns the root.

    Raises:
        TierUnavailable: no store is there, or it can not be opened.
    """

    __slots__ = ("_calls", "_last", "_now", "owner", "root")

    def __init__(self, path: Path, calls: OsCalls, now: Callable[[], float]) -> None:
        self._calls = calls
        self._now = now
        self.root = self._open_root(path)
        self.owner = calls.stat(self.root.fd).st_uid
        self._last: tuple[tuple[str, ...], Directory] = ((), self.root)

    def _open_root(self, path: Path) -> Directory:
        try:
            root = open_directory(self._calls, str(path))
            marker = self.small(root, MARKER, len(MARKER_TEXT) + 1)
        except FileNotFoundError:
            raise TierUnavailable(f"{path}: there is no such directory; name the path of a disk tier") from None
        except OSError as error:
            is_link = path.is_symlink()  # open(2) says ENOTDIR or ELOOP
            what = "a symbolic link; name the directory that it leads to" if is_link else error.strerror
            raise TierUnavailable(f"{path}: {what}") from None
        if marker is None:
            raise TierUnavailable(f"{path}: not a store (it has no {MARKER}); name the path of a disk tier")
        if marker != MARKER_TEXT:
            raise TierUnavailable(f"{path}: a store of another format")
        return root

    def everything(self, wanted: Wanted = lambda _path: True) -> Iterator[StoredRecord | Finding]:
        """Every record in the directories that are wanted, and a finding for whatever else is in them; sorted."""
        yield from self._walk(self.root, (), wanted)

    def _walk(self, parent: Directory, path: tuple[str, ...], wanted: Wanted) -> Iterator[StoredRecord | Finding]:
        """What is below a directory on level ``len(path)``."""
        level = len(path)
        try:
            names = self.names(parent)
        except NOT_THERE:
            return
        except OSError as error:
            yield unreadable(path, error)
            return
        for name in names:
            below = (*path, name)
            if name.startswith(".") or name in _OF_A_STORE[level]:
                continue
            if _LEVELS[level].fullmatch(name) is None:
                yield Finding(Verdict.STRANGE, "name", "/".join(below))
                continue
            if not wanted(below):
                continue
            try:
                directory = open_directory(self._calls, name, parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                is_strange = error.errno in (errno.ENOTDIR, errno.ELOOP)
                strange = Finding(Verdict.STRANGE, "not_a_directory", "/".join(below))
                yield strange if is_strange else unreadable(below, error)
                continue
            if level + 1 < len(_LEVELS):
                yield from self._walk(directory, below, wanted)
            else:
                yield from self.list_fan(directory, below)

    def list_fan(self, directory: Directory, path: tuple[str, ...]) -> Iterator[StoredRecord | Finding]:
        """What is in a directory of records, sorted."""
        try:
            names = self.names(directory)
        except NOT_THERE:
            return
        except OSError as error:
            yield unreadable(path, error)
            return
        now = self._now()
        for name in names:
            match = RECORD_NAME.fullmatch(name)
            if match is None:
                if not name.startswith("."):
                    yield Finding(Verdict.STRANGE, "name", "/".join((*path, name)))
                continue
            place = "/".join((*path, name))
            try:
                status = self._calls.stat(name, directory.fd)
            except NOT_THERE:
                continue
            except OSError as error:
                yield unreadable((*path, name), error)
                continue
            if not stat.S_ISREG(status.st_mode):
                kind = "symlink" if stat.S_ISLNK(status.st_mode) else "not_a_file"
                yield Finding(Verdict.DAMAGED, kind, place)
                continue
            used_at = min(status.st_mtime, now)
            size, generation = status.st_blocks * 512, (status.st_dev, status.st_ino)
            record = StoredRecord(path[0], path[1], path[2], match[1], place, size, used_at, generation)
            if name.startswith(path[3]):
                yield record
            else:
                yield Finding(Verdict.DAMAGED, "misplaced", place, "no reader looks for it here", record)

    def directory(self, path: tuple[str, ...]) -> Directory:
        """Opens a directory below the root; the last one is kept, since neighbours are asked for in turn."""
        if self._last[0] != path:
            directory = self.root
            for name in path:
                directory = open_directory(self._calls, name, directory)
            self._last = (path, directory)
        return self._last[1]

    def names(self, directory: Directory) -> list[str]:
        """What is in a directory, sorted. Raises OSError."""
        listing = open_directory(self._calls, ".", directory)
        return sorted(entry.name for entry in self._calls.scandir(listing.fd))

    def small(self, directory: Directory, name: str, limit: int) -> bytes | None:
        """Up to ``limit`` bytes of a regular file, None if there is none. Anybody's: who looks need not be the owner.

        Raises:
            OSError: EPERM for what is not a regular file, and the rest of open(2) and read(2).
        """
        try:
            fd = self._calls.open(name, OPEN_FILE, dir_fd=directory.fd)
        except FileNotFoundError:
            return None
        try:
            status = self._calls.stat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PermissionError(errno.EPERM, "not a regular file")
            content = memoryview(bytearray(min(limit, status.st_size)))
            at = 0
            while at < len(content) and (count := self._calls.read(fd, content[at:], at)):
                at += count
            return bytes(content[:at])
        finally:
            self._calls.close(fd)


def is_record_path(parts: tuple[str, ...]) -> bool:
    """Whether these are the names of the directories of a store, and of a record."""
    patterns = (*_LEVELS, RECORD_NAME)
    return len(parts) == len(patterns) and all(p.fullmatch(name) for p, name in zip(patterns, parts, strict=True))


def unreadable(path: tuple[str, ...], error: OSError, record: StoredRecord | None = None) -> Finding:
    """What the system would not show."""
    kind = errno.errorcode.get(error.errno or 0, "OSError")
    return Finding(Verdict.UNREADABLE, kind, "/".join(path) or ".", error.strerror or "", record)
