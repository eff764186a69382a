"""A disk store for people: what lies below its root, without an engine and beside running ones.

Invariant: nothing is written, created, locked or touched, and only `DiskTools.remove` unlinks: a regular file with the
exact name of a record, in directories with the exact names of a store, while the name leads to what was listed.
Everything below the root is reached by descriptors that follow no link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvstore.config import store_path
from kvstore.errors import RecordDamaged, TierUnavailable
from kvstore.tiers.disk_check import Checked, Expected, RecordChecker, group_fields, parse_namespace
from kvstore.tiers.disk_config import DiskConfig
from kvstore.tiers.disk_draft import open_directory
from kvstore.tiers.disk_names import NAMESPACE_NAME, RECORD_NAME
from kvstore.tiers.disk_root import EPOCH_FILE, EPOCH_NAME, MAX_NAMESPACE_BYTES, NAMESPACE_FILE
from kvstore.tiers.disk_survey import NOT_THERE, StoreWalk, is_record_path, unreadable
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.tools import Finding, Inspection, StoredNamespace, StoredRecord, TierTools, Verdict

_KEY = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


class DiskTools(TierTools):
    """See `TierTools`. Kinds of its own: ``symlink``, ``not_a_file``, ``owner`` and ``misplaced`` (a record's name
    leads to something else, or lies where nobody looks), ``size``, ``description`` (``namespace.json`` is absent or
    damaged), ``name`` (strange), and an errno's name (unreadable).

    Cost: listing 5 us a record with a warm cache. Memory: the names in one directory, and one piece of a file.

    Args:
        path: the root.
        calls: the operating system.
        now: Unix seconds; uses in the future count as now.

    Raises:
        TierUnavailable: no store is there, or it can not be opened.
    """

    def __init__(self, path: Path, calls: OsCalls | None = None, now: Callable[[], float] = time.time) -> None:
        self.place = str(path)
        self._calls = calls or OsCalls()
        self._now = now
        self._checker = RecordChecker(self._calls)
        self._walk = StoreWalk(path, self._calls, now)
        self._described: dict[str, tuple[Mapping[str, object], str]] = {}

    @classmethod
    def of(cls, settings: DiskConfig) -> Self:
        """See `TierTools.of`."""
        return cls(settings.path)

    @classmethod
    def at(cls, place: str) -> Self | None:
        """See `TierTools.at`: a path, or ``file://`` and a path."""
        if "://" in place and not place.startswith("file:"):
            return None
        try:
            return cls(store_path(place))
        except ValueError as error:
            raise TierUnavailable(str(error)) from None

    @classmethod
    def inspect_file(cls, path: str) -> Inspection | None:
        """See `TierTools.inspect_file`. A file below a store is judged by its place, another one by its name."""
        file = Path(os.path.abspath(path))  # noqa: PTH100  (Path.absolute keeps `..`)
        with contextlib.suppress(TierUnavailable, IndexError):
            tools = cls(file.parents[4])
            parts = file.relative_to(file.parents[4]).parts
            if is_record_path(parts):
                found = tools._inspect(parts)
                return replace(found, finding=replace(found.finding, place=str(file)))
        calls = OsCalls()
        match = RECORD_NAME.fullmatch(file.name)
        try:
            checked = RecordChecker(calls).check(str(file), None, Expected(address=match[1] if match else ""))
        except FileNotFoundError:
            raise TierUnavailable(f"{path}: there is no such file") from None
        except OSError as error:
            what = "a symbolic link; name the file that it leads to" if error.errno == errno.ELOOP else error.strerror
            raise TierUnavailable(f"{path}: {what}") from None
        if checked.kind == "not_a_file":
            raise TierUnavailable(f"{path}: {checked.detail}")
        finding = Finding(checked.verdict, checked.kind, str(file), checked.detail)
        return _inspection(finding, checked, None)

    def namespaces(self) -> list[StoredNamespace]:
        """See `TierTools.namespaces`."""
        found = []
        try:
            names = self._walk.names(self._walk.root)
        except OSError as error:
            raise TierUnavailable(f"{self.place}: {error.strerror}") from None
        for name in names:
            if NAMESPACE_NAME.fullmatch(name):
                with contextlib.suppress(OSError):  # a link, a file, or gone: `records` tells
                    open_directory(self._calls, name, self._walk.root)
                    found.append(self._namespace(name))
        return found

    def _namespace(self, name: str) -> StoredNamespace:
        text = None
        with contextlib.suppress(OSError):
            text = self._walk.small(open_directory(self._calls, name, self._walk.root), EPOCH_FILE, 16)
        epoch = "" if text is None else text.decode("ascii", "replace")
        digits = name[-16:]
        return StoredNamespace(name, digits, self._description(name)[0], epoch if EPOCH_NAME.fullmatch(epoch) else "")

    def _description(self, name: str) -> tuple[Mapping[str, object], str]:
        """A namespace's fields, and its digest in hex; without a valid description no fields and 16 digits."""
        if name not in self._described:
            self._described[name] = {}, name[-16:]
            with contextlib.suppress(OSError, RecordDamaged):
                directory = open_directory(self._calls, name, self._walk.root)
                text = self._walk.small(directory, NAMESPACE_FILE, MAX_NAMESPACE_BYTES)
                if text is not None:
                    self._described[name] = parse_namespace(text, name[-16:]), hashlib.sha256(text).hexdigest()
        return self._described[name]

    def records(self, namespace: str = "") -> Iterator[StoredRecord | Finding]:
        """See `TierTools.records`. Sorted by place."""
        return self._walk.everything(lambda path: not namespace or path[0] == namespace)

    def verify(self) -> Iterator[Finding]:
        """See `TierTools.verify`. Records of every epoch, also of those that nobody uses any more."""
        with contextlib.suppress(TierUnavailable):  # the listing says so too
            yield from filter(None, [self._check_description(namespace.name) for namespace in self.namespaces()])
        for item in self.records():
            if isinstance(item, Finding):
                yield item
            elif (found := self._check(item)) is not None:
                yield found[0]

    def _check_description(self, name: str) -> Finding | None:
        place = f"{name}/{NAMESPACE_FILE}"
        try:
            directory = open_directory(self._calls, name, self._walk.root)
            text = self._walk.small(directory, NAMESPACE_FILE, MAX_NAMESPACE_BYTES)
            if text is None:
                # A namespace is described before anything else is in it, so that this one is just being made.
                is_used = any(EPOCH_NAME.fullmatch(other) for other in self._walk.names(directory))
                return Finding(Verdict.DAMAGED, "description", place, "is not there") if is_used else None
            parse_namespace(text, name[-16:])
        except NOT_THERE:
            return None
        except RecordDamaged as error:
            return Finding(Verdict.DAMAGED, error.kind, place, str(error).removeprefix(f"{error.kind}: "))
        except OSError as error:
            return unreadable((name, NAMESPACE_FILE), error)
        return None

    def _check(self, record: StoredRecord) -> tuple[Finding, Checked | None] | None:
        """The finding for a record; None if it vanished."""
        *above, name = record.place.split("/")
        fields, digest = self._description(record.namespace)
        expected = Expected(record.address, digest, record.shard, self._walk.owner, fields)
        try:
            checked = self._checker.check(name, self._walk.directory(tuple(above)).fd, expected)
        except NOT_THERE:
            return None
        except OSError as error:
            return unreadable((*above, name), error, record), None
        finding = Finding(checked.verdict, checked.kind, record.place, checked.detail, record)
        return finding, checked

    def inspect(self, key: str, limit: int) -> list[Inspection]:
        """See `TierTools.inspect`. Lists only the directories that may have the key."""
        if _KEY.fullmatch(key) is None:
            return []
        found: list[Inspection] = []
        hidden: Finding | None = None
        # A whole listing costs seconds for a million records; the fan-out directory is in the key.
        for item in self._walk.everything(lambda path: len(path) < 4 or path[3].startswith(key[:2])):
            if isinstance(item, Finding):
                hidden = item if item.verdict == Verdict.UNREADABLE else hidden
            elif len(found) >= limit:
                break
            elif item.address.startswith(key) and (checked := self._check(item)) is not None:
                found.append(_inspection(*checked, self._namespace(item.namespace)))
        if hidden is not None and not found:
            raise TierUnavailable(f"{self.place}/{hidden.place}: {hidden.detail}")
        return found

    def _inspect(self, parts: tuple[str, ...]) -> Inspection:
        """Looks at the record with these names below the root."""
        path = parts[:4]
        for item in self._walk.everything(lambda below: below == path[: len(below)]):
            if item.place != "/".join(parts):
                continue
            namespace = self._namespace(parts[0])
            if isinstance(item, Finding):
                return Inspection(item, 0, namespace, {}, {}, "")
            if (checked := self._check(item)) is not None:
                return _inspection(*checked, namespace)
        raise TierUnavailable(f"{self.place}/{'/'.join(parts)}: there is no such file")

    def remove(self, record: StoredRecord, used_before: float | None = None) -> bool:
        """See `TierTools.remove`."""
        *above, name = parts = tuple(record.place.split("/"))
        if not is_record_path(parts):
            raise TierUnavailable(f"{record.place}: not the name of a record")
        try:
            directory = self._walk.directory(tuple(above))
            status = self._calls.stat(name, directory.fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != record.generation:
                return False
            if used_before is not None and min(status.st_mtime, self._now()) >= used_before:
                return False
            self._calls.unlink(name, directory.fd)
        except NOT_THERE:
            return False
        except OSError as error:
            raise TierUnavailable(f"{record.place}: {error.strerror}") from None
        return True


def _inspection(finding: Finding, checked: Checked | None, namespace: StoredNamespace | None) -> Inspection:
    if checked is None:
        return Inspection(finding, 0, namespace, {}, {}, "")
    fields = {} if checked.header is None else checked.header.fields
    geometry = group_fields(namespace.fields, fields["group"]) if namespace and fields else {}
    return Inspection(finding, checked.status.st_size, namespace, fields, geometry, checked.checksum)
