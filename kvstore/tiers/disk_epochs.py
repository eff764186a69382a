"""Epochs of a namespace on disk: publishing a new one, and removing the records of those that nobody uses.

Invariants: the published epoch is never collected, and neither is one that a living client writes in. A writer holds
a ``flock`` on the directory of its epoch (`Tree`), which the kernel drops with the process, so a private epoch is
recognised as abandoned without any record of who made it. An epoch's name is random and never used twice: a directory
that is neither published nor locked has no future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_draft import DRAFT_NAME, Directory, collect_draft, open_directory
from kvstore.tiers.disk_files import Files
from kvstore.tiers.disk_root import EPOCH_FILE, EPOCH_NAME
from kvstore.tiers.disk_space import FAN_NAME, RECORD_NAME, SHARD_NAME
from kvstore.tiers.os_calls import OsCalls

Remove = Callable[[Directory, str], None]
"""Removes a record of a directory by its name, and says so to who counts the store's bytes."""


def replace_epoch(directory: Directory, calls: OsCalls, files: Files, epoch: str) -> None:
    """Publishes ``epoch`` in a namespace's directory in place of what is there. Blocks.

    The new file is complete and on stable storage before the old name goes. Whoever comes between the two finds none
    and publishes one of its own, which is a new one as well.

    Raises:
        TierUnavailable: an operating system error.
    """
    try:
        draft = files.draft(directory, direct=False)
        try:
            draft.fill(memoryview(epoch.encode()), lambda: False)
            draft.sync()
            with suppress(FileNotFoundError):
                calls.unlink(EPOCH_FILE, directory.fd)
            with suppress(FileExistsError):
                draft.link(EPOCH_FILE)
            calls.sync(directory.fd)
        finally:
            draft.close()
    except OSError as error:
        raise TierUnavailable(f"{EPOCH_FILE}: {error.strerror}") from error


def collect_epochs(calls: OsCalls, files: Files, namespace: Directory, remove: Remove, limit: int) -> int:
    """Removes up to ``limit`` records of abandoned epochs, and the directories that are empty then; the number removed.

    Raises:
        OSError: something could not be listed or removed.
    """
    names = _names(calls, namespace, EPOCH_NAME.fullmatch)
    # Read after the listing: what was listed and is not published now never will be.
    text = files.small(namespace, EPOCH_FILE, 16)
    published = "" if text is None else text.decode("ascii", "replace")
    if EPOCH_NAME.fullmatch(published) is None:
        return 0
    removed = 0
    for name in names:
        if name != published and removed < limit:
            removed += _collect(calls, namespace, name, remove, limit - removed)
    return removed


def _names(calls: OsCalls, directory: Directory, wanted: Callable[[str], object]) -> list[str]:
    # A descriptor of its own: the position of a listing is the descriptor's, and another one may be running.
    listing = open_directory(calls, ".", directory)
    return [entry.name for entry in calls.scandir(listing.fd) if wanted(entry.name)]


def _collect(calls: OsCalls, namespace: Directory, name: str, remove: Remove, limit: int) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        epoch = open_directory(calls, name, namespace)
        try:
            calls.lock(epoch.fd)
        except BlockingIOError:
            return 0  # somebody writes in it
        removed = 0
        for shard_name, shard in _below(calls, epoch, SHARD_NAME.fullmatch):
            for fan_name, fan in _below(calls, shard, FAN_NAME.fullmatch):
                for record in _names(calls, fan, lambda _name: True):
                    if removed == limit:
                        return removed
                    if RECORD_NAME.fullmatch(record):
                        with suppress(FileNotFoundError):
                            remove(fan, record)
                        removed += 1
                    elif DRAFT_NAME.fullmatch(record):
                        collect_draft(calls, fan, record)
                _remove_empty(calls, fan_name, shard)
            _remove_empty(calls, shard_name, epoch)
        _remove_empty(calls, name, namespace)
        return removed
    return 0


def _below(calls: OsCalls, directory: Directory, wanted: Callable[[str], object]) -> Iterator[tuple[str, Directory]]:
    for name in _names(calls, directory, wanted):
        with suppress(FileNotFoundError, NotADirectoryError):
            yield name, open_directory(calls, name, directory)


def _remove_empty(calls: OsCalls, name: str, parent: Directory) -> None:
    with suppress(OSError):  # not empty: a late link, or something that is not ours
        calls.rmdir(name, parent.fd)
