"""The demo's table as text."""

from __future__ import annotations

from collections.abc import Mapping

from demo.cases import CASES, CPU_HIT, DISK_HIT, ENGINE_HIT, NO_CONNECTOR, TIER_OF, ZERO_CONTROL, Result
from demo.cases import COLD as COLD_CASE

_LABELS = {
    COLD_CASE: "cold prefill",
    ENGINE_HIT: "engine's own prefix hit",
    CPU_HIT: "cpu hit (prefix cache emptied)",
    DISK_HIT: "disk hit (SIGKILL, restart)",
    ZERO_CONTROL: "control: stored KV is zeros",
    NO_CONNECTOR: "without connector",
}
_HEAD = ("case", "TTFT", "external tokens delivered", "identical to run without connector")


def render(results: Mapping[str, Result]) -> str:
    """One table, a row a case, columns aligned, no trailing spaces."""
    rows = [_HEAD, *(_row(case, results[case]) for case in CASES)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _row(case: str, result: Result) -> tuple[str, str, str, str]:
    tokens = str(result.external_tokens)
    if case in TIER_OF and result.external_tokens:
        tokens += f" ({TIER_OF[case]})"
    runs, count = len(result.samples), result.identical_count
    identical = "yes" if count == runs else "no"
    return _LABELS[case], _milliseconds(result.ttft_s), tokens, f"{identical} ({count} of {runs})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    label, ttft, tokens, identical = (
        row[0].ljust(widths[0]),
        row[1].rjust(widths[1]),
        row[2].rjust(widths[2]),
        row[3],
    )
    return "  ".join((label, ttft, tokens, identical)).rstrip()
