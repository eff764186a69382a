"""Every record below a root, by descriptors.

Invariant: nothing is reached through a link, and a directory that vanishes meanwhile is skipped, not an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from kvstore.tiers.disk_draft import DRAFT_NAME, Directory, collect_draft, open_directory
from kvstore.tiers.disk_names import LEVELS, RECORD_NAME, Above
from kvstore.tiers.os_calls import OsCalls

_NOT_THERE = (FileNotFoundError, NotADirectoryError)


def open_below(calls: OsCalls, root: Directory, path: Sequence[str]) -> Directory | None:
    """The directory at ``path`` below ``root``, None if there is none.

    Raises:
        OSError: it can not be opened.
    """
    directory = root
    try:
        for name in path:
            directory = open_directory(calls, name, directory)
    except _NOT_THERE:
        return None
    return directory


def _directories(calls: OsCalls, directory: Directory, path: tuple[str, ...]) -> Iterator[tuple[Directory, Above]]:
    if len(path) == len(LEVELS):
        yield directory, (path[0], path[1], path[2], path[3])
        return
    for name in [entry.name for entry in calls.scandir(directory.fd)]:
        if LEVELS[len(path)].fullmatch(name) is None:
            if DRAFT_NAME.fullmatch(name):
                collect_draft(calls, directory, name)
            continue
        below = open_below(calls, directory, (name,))
        if below is not None:
            yield from _directories(calls, below, (*path, name))


def walk(calls: OsCalls, root: Directory) -> Iterator[tuple[Directory, Above, str, os.stat_result]]:
    """(directory, its path, name, status) of every record, in no order; drafts of dead writers are collected.

    Cost: about 4 us a record with a warm cache. Not a snapshot.

    Raises:
        OSError: a directory could not be listed.
    """
    # Its own descriptor: the position of a listing is the descriptor's, and another one may be running.
    for directory, path in _directories(calls, open_directory(calls, ".", root), ()):
        fan = path[3]
        for name in [entry.name for entry in calls.scandir(directory.fd)]:
            if RECORD_NAME.fullmatch(name) is None or not name.startswith(fan):
                if DRAFT_NAME.fullmatch(name):
                    collect_draft(calls, directory, name)
                continue
            try:
                status = calls.stat(name, directory.fd)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield directory, path, name, status
