"""What must hold after every kill, looked at by other means than the tier's own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

_LEDGER = struct.Struct("<8s16sQ7Q")
_MEMBER = struct.Struct("<8sQQ")
_PATIENCE = 30.0


@dataclass(frozen=True)
class Sight:
    """The directory at one moment under the lock of the ledger.

    Attributes:
        names: of all records.
        record_bytes: what they take.
        claimed: by the files of clients that live.
        owed: by the files of clients that are dead.
        dead: number of files of dead clients.
        used, is_dirty: what the ledger says.
        strays: files that have no business there.
    """

    names: frozenset[str]
    record_bytes: int
    claimed: int
    owed: int
    dead: int
    used: int
    is_dirty: bool
    strays: tuple[str, ...]


@dataclass
class Verdicts:
    """What was seen, and what must not have been."""

    samples: int = 0
    highest: int = 0
    violations: list[str] = field(default_factory=list)

    def check(self, is_good: bool, what: str) -> None:
        if not is_good:
            self.violations.append(what)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[int]:
    """Holds the lock of the ledger; its descriptor."""
    fd = os.open(root / ".ledger", os.O_RDWR)
    try:
        end = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > end:
                raise TimeoutError("somebody keeps the lock of the ledger")
            time.sleep(0.0002)
        yield fd
    finally:
        os.close(fd)


def _is_alive(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _fields(layout: struct.Struct, content: bytes) -> tuple[int, ...] | None:
    if len(content) != layout.size + 16 or xxhash.xxh3_128_digest(content[:-16]) != content[-16:]:
        return None
    return layout.unpack(content[:-16])


def _is_of_the_dead(draft: Path) -> bool:
    """Whether a named draft is there that no process has open.

    Not by its lock: between making the file and locking it a live writer has none, and trying it would disturb him.
    """
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == draft:
                return False
    return draft.exists()


def look(root: Path, fd: int) -> Sight:
    """Looks at everything; while `locked`."""
    names, strays = [], []
    size = claimed = owed = dead = 0
    for path in root.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # drafts come and go without the lock
        if path.is_dir():
            continue
        if path.suffix == ".safetensors":
            names.append(path.name)
            size += status.st_blocks * 512
        elif path.name.startswith(".inflight-"):
            found = _fields(_MEMBER, path.read_bytes())
            bytes_claimed = 0 if found is None else found[2]
            if _is_alive(path):
                claimed += bytes_claimed
            else:
                dead, owed = dead + 1, owed + bytes_claimed
        elif path.name.startswith(".tmp-"):
            if _is_of_the_dead(path):
                strays.append(path.name)
        elif path.name not in {".kvstore", ".ledger", "namespace.json", "epoch"}:
            strays.append(path.name)
    ledger = _fields(_LEDGER, os.pread(fd, 4096, 0))
    is_dirty = ledger is None or ledger[2] != 0
    used = 0 if ledger is None else ledger[3]
    return Sight(frozenset(names), size, claimed, owed, dead, used, is_dirty, tuple(strays))


def sample(root: Path, capacity: int, verdicts: Verdicts) -> Sight:
    """Looks once while everybody works: never over, and exact unless somebody just died."""
    with locked(root) as fd:
        sight = look(root, fd)
    verdicts.samples += 1
    verdicts.highest = max(verdicts.highest, sight.record_bytes + sight.claimed)
    verdicts.check(
        sight.record_bytes + sight.claimed <= capacity,
        f"over capacity: {sight.record_bytes} stored + {sight.claimed} claimed > {capacity}",
    )
    if not sight.dead and not sight.is_dirty:
        expected = sight.record_bytes + sight.claimed
        verdicts.check(sight.used == expected, f"ledger says {sight.used}, there is {expected}")
    return sight


class History:
    """What the log says, read on from where it was last read."""

    def __init__(self, log: Path) -> None:
        self._file = log.open("rb")
        self.stored: set[str] = set()
        self.removed: set[str] = set()
        self.reported: set[str] = set()
        self.is_removed: dict[str, bool] = {}
        self.failures: list[str] = []
        self.stores = self.removals = 0
        self.holds: list[int] = []

    def read(self) -> bytes:
        """The new lines, all of them whole: a line is one write."""
        return self._file.read()

    def learn(self, content: bytes) -> None:
        """Takes what `read` gave."""
        for line in content.decode().splitlines():
            kind, _, text = line.partition(" ")
            if kind == "S":
                self.stores += 1
                self.stored.add(text)
            elif kind == "L":
                self.is_removed[text] = False
            elif kind == "U":
                self.removals += 1
                self.is_removed[text] = True
                self.removed.add(text)
            elif kind == "E":
                self.reported.add(text)
            elif kind == "H":
                self.holds += map(int, text.split())
            else:
                self.failures.append(line)

    def close(self) -> None:
        """Closes the log."""
        self._file.close()


def settle(root: Path, capacity: int, history: History, verdicts: Verdicts) -> Sight:
    """After a restart: nothing is left of the dead, the ledger is exact, what was reported stored is there."""
    with locked(root) as fd:
        sight = look(root, fd)
        content = history.read()
    verdicts.check(not sight.dead, f"{sight.dead} files of dead clients are left")
    verdicts.check(not sight.strays, f"left: {sight.strays}")
    verdicts.check(not sight.is_dirty, "the ledger is dirty after a restart")
    expected = sight.record_bytes + sight.claimed
    verdicts.check(sight.used == expected, f"ledger says {sight.used}, there is {expected} after a restart")
    verdicts.check(expected <= capacity, f"{expected} > {capacity} after a restart")
    history.learn(content)
    verdicts.violations += history.failures
    lost = [name for name in history.stored - sight.names if not history.is_removed.get(name, False)]
    verdicts.check(not lost, f"reported stored and gone without an eviction: {sorted(lost)[:3]}")
    verdicts.check(history.reported <= history.removed, "reported evicted and not removed")
    return sight
