"""What every benchmark has in common: rows, interleaved rounds, a table or JSON, and an exit status.

Invariant: a baseline is measured in the same process and in turns with what it is compared to, since a machine's
speed drifts by more than the differences that matter here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROUNDS = 5
"""The least number of rounds that a median is taken of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured.
        value: ours, in ``unit``.
        unit: base unit with its prefix (``GB/s``, ``us``, ``bytes``).
        baseline: what it is compared to, in the same unit, if anything.
        ratio: the figure that ``bar`` is about, if any; for a speed ours / baseline, for a time the time itself
            or a multiple of the baseline, as ``name`` says.
        bar: what ``ratio`` (or ``value``, where there is no ratio) has to reach or stay under; None is informative.
        ok: whether it did.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    bar: float | None = None
    ok: bool = True


def interleave(
    ours: Callable[[], float], baseline: Callable[[], float], rounds: int = ROUNDS, warm_ups: int = 1
) -> tuple[float, float]:
    """Medians of ``rounds`` turns of both, which alternate and swap their order each round.

    Each callable does one turn and returns its figure. The first ``warm_ups`` turns of both are not counted.

    Returns:
        (median of ours, median of the baseline).

    Raises:
        ValueError: fewer than 5 rounds.
    """
    if rounds < ROUNDS:
        raise ValueError(f"a median is taken of at least {ROUNDS} rounds, not {rounds}")
    mine, theirs = [], []
    for turn in range(-warm_ups, rounds):
        order = ((ours, mine), (baseline, theirs))
        for measure, figures in order if turn % 2 else reversed(order):
            figure = measure()
            if turn >= 0:
                figures.append(figure)
    return statistics.median(mine), statistics.median(theirs)


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores that this process may use, memory, kernel, Python."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def run(name: str, fn: Callable[[], Row | Sequence[Row]]) -> list[Row]:
    """The rows of ``fn``, with a progress line on standard error so that a wait is explained."""
    print(f"... {name}", file=sys.stderr, flush=True)
    rows = fn()
    return [rows] if isinstance(rows, Row) else list(rows)


def _cell(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}" if abs(number) < 10_000 else f"{number:,.0f}"


def _table(rows: Sequence[Row]) -> str:
    head = ("name", "value", "unit", "baseline", "ratio", "bar", "ok")
    cells = [
        (r.name, _cell(r.value), r.unit, _cell(r.baseline), _cell(r.ratio), _cell(r.bar), "ok" if r.ok else "MISSED")
        for r in rows
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
    left = {0, 2, 6}
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (head, *cells)
    )


def main(build_rows: Callable[[], Sequence[Row]], argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark from the command line and prints its rows.

    Args:
        build_rows: measures everything; use `run` inside for progress lines.
        argv: arguments, the process's own by default; ``--json`` prints JSON.

    Returns:
        The exit status: 0 only if every row is ok.
    """
    parser = argparse.ArgumentParser(description=sys.modules[build_rows.__module__].__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    rows = list(build_rows())
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine()}))
    else:
        print(_table(rows))
    return 0 if rows and all(row.ok for row in rows) else 1
