"""Where snapshots are: a directory of ours that nobody else can write to, with what is read from it and removed.

A directory may hold anything: what is not ours is skipped, never touched.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.snapshots.document import FILE_NAME, Part, Snapshot, is_alive, merge, read_part

KEEP_SECONDS = 86400.0
"""How long the last snapshot of an ended part is kept."""

_TEMPORARY = re.compile(r"\.[A-Za-z0-9_-]{1,64}\.[A-Za-z0-9_-]{1,32}\.\d{1,10}\.tmp", re.ASCII)

_log = logging.getLogger(__name__)


def resolve_dir(
    setting: str, disk_root: Path | None, environ: Mapping[str, str] = os.environ, *, create: bool = True
) -> Path | None:
    """The directory of snapshots: ``setting`` itself, or for ``auto`` the first of these that there is.

    ``$XDG_RUNTIME_DIR/kvstore``, then ``.stats`` under ``disk_root``. None for ``off`` and where there is neither.

    Args:
        setting: ``auto``, ``off`` or a path.
        disk_root: where a tier keeps records on this machine.
        environ: where ``XDG_RUNTIME_DIR`` is looked up.
        create: make it, 0700, and check it, as a writer must. A reader does neither.

    Raises:
        ConfigError: it is not ours, others may write to it, or a named one can not be made.
    """
    if setting == "off":
        return None
    if setting != "auto":
        path = Path(setting)
        try:
            return _opened(path) if create else path
        except OSError as error:
            raise ConfigError(f"stats.snapshot_dir: {path} can not be made: {error.strerror}; name another") from None
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime) / "kvstore"] if runtime and _is_ours(Path(runtime)) else []
    candidates += [disk_root / ".stats"] if disk_root is not None else []
    for candidate in candidates:
        if not create:
            return candidate
        try:
            return _opened(candidate)
        except OSError as error:
            _log.debug("snapshot_dir_unusable path=%s error=%s", candidate, error.strerror)
    return None


def _is_ours(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _opened(path: Path) -> Path:
    try:
        # One by one: with ``parents=True`` the parents would get the umask's mode, and a tier root may not be 0775.
        for missing in reversed([path, *path.parents]):
            if not missing.exists():
                missing.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"stats.snapshot_dir: {path} is not a directory; name another") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"stats.snapshot_dir: {path} is not a directory (a link is not followed); name another")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"stats.snapshot_dir: {path} belongs to user {found.st_uid}, not to us; name another")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"stats.snapshot_dir: others may write to {path}; run chmod go-w {path} or name another")
    return path


def read_parts(directory: Path) -> list[Part]:
    """Every whole document of ours in ``directory``, by file name; a directory that is not there has none."""
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if FILE_NAME.fullmatch(entry.name))
    except OSError:
        return []
    parts = (read_part(directory / name) for name in names)
    return [part for part in parts if part is not None]


def read_all(directory: Path, now: float | None = None) -> list[Snapshot]:
    """Every instance with a snapshot in ``directory``, the newest first. Torn and foreign files are skipped."""
    moment = time.time() if now is None else now
    instances: dict[str, list[Part]] = {}
    for part in read_parts(directory):
        instances.setdefault(part.instance, []).append(part)
    merged = [merge(parts, all(is_alive(part, moment) for part in parts)) for parts in instances.values()]
    return sorted(merged, key=lambda snapshot: (-snapshot.time, snapshot.instance))


def collect_garbage(directory: Path, now: float | None = None) -> int:
    """Removes what ended parts left more than a day ago; returns the number of files. Touches nothing else."""
    moment = time.time() if now is None else now
    old = [
        directory / f"{part.instance}.{part.role}.json"
        for part in read_parts(directory)
        if moment - part.time > KEEP_SECONDS and not is_alive(part, moment)
    ]
    removed = 0
    for path in [*old, *_old_temporaries(directory, moment)]:
        try:
            path.unlink()
            removed += 1
        except OSError as error:
            _log.debug("snapshot_not_removed path=%s error=%s", path, error.strerror)
    return removed


def _old_temporaries(directory: Path, now: float) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [
                directory / entry.name
                for entry in entries
                if _TEMPORARY.fullmatch(entry.name) and now - entry.stat(follow_symlinks=False).st_mtime > KEEP_SECONDS
            ]
    except OSError:
        return []
