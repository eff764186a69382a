"""The directories of one epoch and shard, opened once each.

Invariant: a directory is reached from its parent's descriptor, never by a path, and its descriptor lives as long as
a verb uses it. Who makes a directory in an epoch holds a lock on the epoch's, so that nobody collects it
(`kvstore.tiers.disk_epochs`). 256 directories by the first byte of the address: 100,000 records list in 0.3 s on one
level of them, and in twice that on two (measured).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from kvstore.tiers.disk_draft import Directory, make_directory, open_directory
from kvstore.tiers.disk_files import trouble
from kvstore.tiers.disk_names import RECORD_NAME, record_name
from kvstore.tiers.os_calls import OsCalls

FANS = tuple(f"{byte:02x}" for byte in range(256))

ABSENT = "absent"


class Tree:
    """``<namespace>/<epoch>/<shard>/<hh>``. Thread-safe: two openers of one directory both succeed, one is kept."""

    __slots__ = ("_calls", "_locked", "_namespace", "_open", "_sync", "epoch", "shard")

    def __init__(self, calls: OsCalls, namespace: Directory, epoch: str, shard: str, sync: bool) -> None:
        self._calls = calls
        self._namespace = namespace
        self._sync = sync
        self._open: dict[str, Directory] = {}
        self._locked: Directory | None = None
        self.epoch = epoch
        self.shard = shard

    def directory(self, fan: str, make: bool) -> Directory | None:
        """The directory of the addresses that start with ``fan``; None if there is none and ``make`` is False.

        Raises:
            OSError: it can not be opened or made.
        """
        found = self._open.get(fan)
        if found is not None:
            return found
        directory = self._namespace
        try:
            for name in (self.epoch, self.shard, fan):
                if make:
                    directory = make_directory(self._calls, name, directory, self._sync)
                    self._lock(name, directory)
                else:
                    directory = open_directory(self._calls, name, directory)
        except FileNotFoundError:
            if make:
                raise
            return None
        self._open[fan] = directory
        return directory

    def look(self, address: bytes, size: int) -> str:
        """What has the name of an address; one ``stat``.

        Returns:
            ``""`` for a regular file of ours of ``size`` bytes, ``absent``, or the kind of what is wrong with it.

        Raises:
            OSError: it could not be looked at.
        """
        fan, name = record_name(address)
        directory = self.directory(fan, make=False)
        if directory is None:
            return ABSENT
        try:
            status = self._calls.stat(name, directory.fd)
        except FileNotFoundError:
            return ABSENT
        return trouble(status) or ("" if status.st_size == size else "size")

    def _lock(self, name: str, directory: Directory) -> None:
        if name != self.epoch or self._locked is not None:
            return
        # Another rank of this engine may have it, which serves as well. A lock that can not be had costs protection
        # against a collection, that is records, never a wrong one.
        with suppress(OSError):
            self._calls.lock(directory.fd)
            self._locked = directory

    def forget_removed(self, fan: str) -> bool:
        """Lets go of a directory that was removed, so that the next use makes it anew; whether it was."""
        found = self._open.get(fan)
        if found is None or self._calls.stat(found.fd).st_nlink:
            return False
        self._open.pop(fan, None)
        return True

    def scan(self) -> Iterator[list[bytes]]:
        """Addresses by the names in each directory; sizes and owners are looked at by who reads."""
        for fan in FANS:
            try:
                parent = self.directory(fan, make=False)
                # Its own descriptor: the position of a listing is the descriptor's, and another one may be running.
                listing = None if parent is None else open_directory(self._calls, ".", parent)
            except (FileNotFoundError, NotADirectoryError):
                listing = None
            if listing is None:
                continue
            batch = [_address(entry) for entry in self._calls.scandir(listing.fd) if entry.name.startswith(fan)]
            if found := [address for address in batch if address]:
                yield found


def _address(entry: os.DirEntry[str]) -> bytes:
    match = RECORD_NAME.fullmatch(entry.name)
    if match is None or not entry.is_file(follow_symlinks=False):
        return b""
    return bytes.fromhex(match[1])
