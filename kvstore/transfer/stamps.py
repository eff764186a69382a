"""Whether files are still what they were: a file that changed between two looks may have been read in either state.

A stamp is device, inode, size, mtime and ctime, as in `kvstore.transfer.weights`; no program can set a ctime.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Stamps = Mapping[Path, str]
"""Stamp of each file, "" for one that could not be looked at."""


def stamps_of(files: Iterable[Path]) -> Stamps:
    """The stamps of files now. One ``stat`` a file."""
    return {path: _stamp(path) for path in files}


def first_changed(before: Stamps, now: Stamps) -> Path | None:
    """The first file, by name, that came, went or changed between the two; None for none."""
    return min((path for path in before.keys() | now.keys() if before.get(path) != now.get(path)), default=None)


def _stamp(path: Path) -> str:
    try:
        stat = os.stat(path)  # noqa: PTH116 - follows links: what they lead to is what is loaded
    except OSError:
        return ""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
