"""How a part publishes: one small file, replaced as a whole.

Invariant: a reader sees a whole document or none. Each part has its own file, so there is no lock.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.snapshots.document import FILE_NAME, VERSION, pid_namespace, start_of

_log = logging.getLogger(__name__)


class SnapshotWriter:
    """Publishes the document of one part. Used by one thread.

    Args:
        directory: from `resolve_dir`.
        instance: the same for all parts of one engine, and for no other; ``[A-Za-z0-9_-]``, at most 64.
        role: ``scheduler``, ``rank0`` ..., or ``store``.
        clock: Unix seconds.

    Raises:
        ValueError: a name that can not be a file name.
    """

    def __init__(self, directory: Path, instance: str, role: str, clock: Callable[[], float] = time.time) -> None:
        name = f"{instance}.{role}.json"
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} can not be the name of a snapshot")
        self._path = directory / name
        self._temporary = directory / f".{instance}.{role}.{os.getpid()}.tmp"
        self._clock = clock
        self._healthy = True
        self._head = {
            "version": VERSION,
            "instance": instance,
            "role": role,
            "pid": os.getpid(),
            "pid_start": start_of(os.getpid()) or 0,
            "pid_namespace": pid_namespace(),
        }

    def publish(self, document: Mapping[str, Any]) -> bool:
        """Replaces the part's file by ``document`` (``engine``, ``tiers``, ``counters``); the rest is added here.

        Costs a small write and a rename, without an fsync: a snapshot need not survive the machine. An error of the
        file system is logged once and otherwise ignored: statistics must not stop an engine.

        Returns:
            Whether it was published.
        """
        content = json.dumps({**document, **self._head, "time": self._clock()}, separators=(",", ":")).encode()
        try:
            self._replace(content)
        except OSError as error:
            if self._healthy:
                _log.warning("snapshots_stopped path=%s error=%s", self._path, error.strerror)
            self._healthy = False
            return False
        self._healthy = True
        return True

    def _replace(self, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._temporary, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        self._temporary.rename(self._path)

    def retire(self) -> None:
        """Removes the part's file; does nothing where it is gone. For a part that has nothing more to tell."""
        for path in (self._temporary, self._path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.debug("snapshot_not_removed path=%s error=%s", path, error.strerror)
