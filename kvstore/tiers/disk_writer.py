"""Publishing and removing one record, and marking records as used.

Invariant: room is claimed before the first byte and given back unless the name is linked; whatever ends a write early
(an error, the deadline, an exception from anywhere) leaves no name, no file and no claim. The link is made, and the
claim ended, under one hold of the ledger's lock: nobody ever sees a record that is not accounted for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import ContractError
from kvstore.layout import HEADER_BYTES
from kvstore.tiers.disk_draft import Directory, Draft, Expired
from kvstore.tiers.disk_epochs import collect_epochs
from kvstore.tiers.disk_files import Files
from kvstore.tiers.disk_ledger import LedgerLocked
from kvstore.tiers.disk_names import Path, record_name
from kvstore.tiers.disk_space import LATE, SHORT_WAIT, Space
from kvstore.tiers.disk_tree import Tree
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.record import RecordFormat

TOUCH_INTERVAL_NS = 600 * 10**9
"""A record's time of last use is written at most this often."""

STORED = "stored"
PRESENT = "present"


@dataclass(frozen=True, slots=True)
class Limit:
    """When a write has to end: a moment of the clock, and whether it has passed."""

    deadline: float
    expired: Expired


class RecordWriter:
    """Writes into one namespace, and removes from it. Thread-safe; blocks for its I/O."""

    __slots__ = ("_calls", "_files", "_namespace", "_space", "_sync")

    def __init__(self, calls: OsCalls, files: Files, space: Space, namespace: str, sync: bool) -> None:
        self._calls = calls
        self._files = files
        self._space = space
        self._namespace = namespace
        self._sync = sync

    def store(self, tree: Tree, address: bytes, buffer: memoryview, used_ns: int | None, limit: Limit) -> str:
        """Publishes a sealed record, last used at ``used_ns`` (now for None).

        Returns:
            `STORED`, `PRESENT` (an equal one has the name), `LATE`, or why there is no room (`Space.claim`).

        Raises:
            OSError: nothing is left behind.
        """
        try:
            return self._store(tree, address, buffer, used_ns, limit)
        except OSError:
            # A directory that was removed behind our back opens nothing any more (ENOENT, on ext4 EPERM).
            if not tree.forget_removed(record_name(address)[0]):
                raise
            return self._store(tree, address, buffer, used_ns, limit)

    def _store(self, tree: Tree, address: bytes, buffer: memoryview, used_ns: int | None, limit: Limit) -> str:
        fan, name = record_name(address)
        directory = tree.directory(fan, make=True)
        if directory is None:
            raise ContractError("a directory that was made is there")
        if self._is_same(directory, name, buffer):
            return PRESENT
        path = (self._namespace, tree.epoch, tree.shard, fan, name)
        if reason := self._space.claim(path, len(buffer), limit.deadline):
            return reason
        try:
            draft = self._files.fill(directory, buffer, limit.expired)
            if draft is None:
                return LATE
            try:
                if used_ns is not None:
                    draft.mark_used(used_ns)
                if self._sync:
                    draft.sync()
                return self._publish(draft, directory, path, buffer, limit.deadline)
            finally:
                draft.close()
        finally:
            self._space.release(path)

    def _publish(self, draft: Draft, directory: Directory, path: Path, buffer: memoryview, deadline: float) -> str:
        name, size = path[-1], draft.allocated_bytes()
        try:
            reason = self._space.publish(path, size, lambda: draft.link(name), deadline)
        except FileExistsError:
            if self._is_same(directory, name, buffer):
                return PRESENT
            self._space.remove(lambda: self._files.remove(directory, name))
            reason = self._space.publish(path, size, lambda: draft.link(name), deadline)
        if reason:
            return reason
        if self._sync:
            try:
                self._calls.sync(directory.fd)
            except OSError:
                self._space.remove(lambda: self._files.remove(directory, name))
                raise
        return STORED

    def delete(self, tree: Tree, address: bytes) -> bool:
        """Removes what has the name of an address; whether there was a record.

        Raises:
            OSError: as `Space.remove`.
        """
        fan, name = record_name(address)
        directory = tree.directory(fan, make=False)
        if directory is None:
            return False
        try:
            self._calls.stat(name, directory.fd)  # a miss needs no lock
        except FileNotFoundError:
            return False
        return self._space.remove(lambda: self._files.remove(directory, name)) > 0

    def collect(self, namespace: Directory, limit: int) -> int:
        """Removes up to ``limit`` records of epochs that nobody uses any more; the number removed.

        Raises:
            OSError: as `collect_epochs` and `Space.remove`.
        """

        def remove(directory: Directory, name: str) -> None:
            self._space.remove(lambda: self._files.remove(directory, name))

        return collect_epochs(self._calls, self._files, namespace, remove, limit)

    def drop(self, directory: Directory, name: str, status: os.stat_result) -> None:
        """Removes a damaged record, if ``name`` still leads to it. Does not wait long: the next read finds it again.

        Raises:
            OSError: as `Space.remove`, but for the lock.
        """
        with contextlib.suppress(LedgerLocked):
            self._space.remove(lambda: self._files.drop(directory, name, status), SHORT_WAIT)

    def _is_same(self, directory: Directory, name: str, buffer: memoryview) -> bool:
        is_same = self._files.is_same(directory, name, bytes(buffer[:HEADER_BYTES]), len(buffer))
        # Who wrote it may not have asked for that, or have died between the link and the sync.
        return is_same and (not self._sync or self._files.make_durable(directory, name))


def touch(
    calls: OsCalls, tree: Tree, addresses: Sequence[bytes], now_ns: int, on_error: Callable[[OSError], object]
) -> None:
    """Sets the time of last use of a chain, head first, so that the head is the newest.

    A fresh tail of an older head is made older than it, and not the head newer: eviction then takes the tail first,
    and a head that many chains share is not written again for each of them.
    """
    newest = now_ns
    for address in addresses:
        fan, name = record_name(address)
        try:
            directory = tree.directory(fan, make=False)
            if directory is None:
                continue
            used_at = calls.stat(name, directory.fd).st_mtime_ns
            is_due = not now_ns - TOUCH_INTERVAL_NS < used_at <= now_ns
            if is_due or used_at > newest:
                used_at = newest
                calls.utime(name, used_at, directory.fd)
            newest = used_at - 1
        except FileNotFoundError:
            continue
        except OSError as error:
            on_error(error)


@dataclass(frozen=True, slots=True)
class Attached:
    """What a client opened for one namespace and shard: replaced as a whole, never changed."""

    directory: Directory
    format: RecordFormat
    shard: str
    writer: RecordWriter
