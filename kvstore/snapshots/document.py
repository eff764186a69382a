"""What a snapshot says: the document of one part, and the parts of one instance put together.

Invariant: a `Part` that exists was whole, of our version and under its own name; everything else reads as None.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
MAX_BYTES = 1 << 22
"""A larger file is not ours."""

FRESH_SECONDS = 5.0
"""A part that can not be looked up, being in another container, counts as alive for this long."""

OPEN = "open"
FILE_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{1,32})\.json", re.ASCII)

CounterRow = tuple[str, str, str, float]
"""(name, tier, reason, value), as `kvstore.metrics.Counters.snapshot` gives them."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """A tier as one or more parts see it; None is what no part knows. ``state``: open, closed, or why it is not."""

    name: str
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    chunks: int | None = None
    state: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The document of one part. ``time`` is Unix seconds; ``pid_start`` is in clock ticks since boot."""

    instance: str
    role: str
    pid: int
    pid_start: int
    pid_namespace: str
    time: float
    engine: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[TierRow, ...] = ()
    counters: tuple[CounterRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One instance: all its parts merged, tiers by name, counters summed.

    ``time`` is that of the newest part. ``alive`` says whether every part still runs.
    """

    instance: str
    roles: tuple[str, ...]
    time: float
    alive: bool
    engine: Mapping[str, Any]
    tiers: tuple[TierRow, ...]
    counters: tuple[CounterRow, ...]

    def value(self, name: str, *, tier: str | None = None, reason: str | None = None) -> float:
        """Sum of the counter ``name`` over the labels that are None."""
        return sum(row[3] for row in self.rows(name, tier=tier) if reason is None or row[2] == reason)

    def rows(self, name: str, *, tier: str | None = None) -> list[CounterRow]:
        """The rows of the counter ``name``, of one tier or of all."""
        return [row for row in self.counters if row[0] == name and (tier is None or row[1] == tier)]


def start_of(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When ``pid`` started, in clock ticks since boot; None if it does not run (a zombie does not)."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def pid_namespace() -> str:
    """Identity of the process ids that this process sees; ``""`` where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (not a path that leads anywhere)
    except OSError:
        return ""


def is_alive(part: Part, now: float) -> bool:
    """Whether the part still runs: exact on this machine, by the age of its snapshot for another container's."""
    if part.pid_namespace != pid_namespace():
        return now - part.time < FRESH_SECONDS
    return start_of(part.pid) == part.pid_start


def merge(parts: Sequence[Part], alive: bool) -> Snapshot:
    """One snapshot of all ``parts`` of an instance. Where two know a value, the scheduler's is taken."""
    ordered = sorted(parts, key=lambda part: (part.role != "scheduler", part.role))
    engine: dict[str, Any] = {}
    sums: dict[tuple[str, str, str], float] = {}
    tiers: dict[str, list[TierRow]] = {}
    for part in ordered:
        for key, value in part.engine.items():
            if engine.get(key) is None:
                engine[key] = value
        for name, tier, reason, amount in part.counters:
            sums[name, tier, reason] = sums.get((name, tier, reason), 0) + amount
        for row in part.tiers:
            tiers.setdefault(row.name, []).append(row)
    return Snapshot(
        instance=ordered[0].instance,
        roles=tuple(part.role for part in ordered),
        time=max(part.time for part in ordered),
        alive=alive,
        engine=engine,
        tiers=tuple(_merge_tier(rows) for rows in tiers.values()),
        counters=tuple(sorted((*key, value) for key, value in sums.items())),
    )


def _merge_tier(rows: Sequence[TierRow]) -> TierRow:
    states = [row.state for row in rows if row.state]
    return TierRow(
        name=rows[0].name,
        capacity_bytes=_first(row.capacity_bytes for row in rows),
        used_bytes=_first(row.used_bytes for row in rows),
        chunks=_first(row.chunks for row in rows),
        # A tier that one part can not use is not simply open: the reason is what a person has to see.
        state=next((state for state in states if state != OPEN), states[0] if states else None),
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
    )


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def read_part(path: Path) -> Part | None:
    """The document in the file ``path``; None if it is torn, foreign or of another version."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            document = json.loads(file.read(MAX_BYTES))
        part = _parse(document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return part if path.name == f"{part.instance}.{part.role}.json" else None


def _parse(document: Any) -> Part:
    if document["version"] != VERSION:
        raise ValueError("another version")
    return Part(
        instance=str(document["instance"]),
        role=str(document["role"]),
        pid=int(document["pid"]),
        pid_start=int(document["pid_start"]),
        pid_namespace=str(document.get("pid_namespace", "")),
        time=_finite(document["time"]),
        engine=dict(document.get("engine") or {}),
        tiers=tuple(_tier(row) for row in document.get("tiers") or ()),
        counters=tuple((str(n), str(t), str(r), _finite(v)) for n, t, r, v in document.get("counters") or ()),
    )


def _tier(row: Mapping[str, Any]) -> TierRow:
    state = row.get("state")
    return TierRow(
        name=str(row["name"]),
        capacity_bytes=_count(row.get("capacity_bytes")),
        used_bytes=_count(row.get("used_bytes")),
        chunks=_count(row.get("chunks")),
        state=None if state is None else str(state),
        notes=tuple(map(str, row.get("notes") or ())),
    )


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a count")
    return number
