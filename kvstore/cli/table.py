"""One engine's figures as text: a column for each tier, so that any number of figures fits a terminal.

Invariant: what is printed is printable; a snapshot is a file, and a file must not steer a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from kvstore.cli.columns import BOLD, NONE, RED, clean, paint
from kvstore.units import format_bytes, format_seconds

_MAX_COLUMN = 44


def render(report: Mapping[str, Any], *, colour: bool = False) -> str:
    """The table of one engine (`kvstore.cli.report.engine_report`), ending with a line feed."""
    return "\n".join([_header(report, colour), *_grid(report["tiers"]), *_totals(report, colour)]) + "\n"


def share(ratio: Mapping[str, Any]) -> str:
    """A ratio with its denominator: ``3968 of 8000 (49.6 %)``; ``-`` where there is no denominator."""
    if ratio["ratio"] is None:
        return NONE
    return f"{ratio['value']} of {ratio['of']} ({100 * ratio['ratio']:.1f} %)"


def rate(flow: Mapping[str, Any]) -> str:
    """Bytes and, where time was counted, how fast they moved."""
    if not flow["bytes"]:
        return NONE
    speed = flow["gigabytes_per_second"]
    return format_bytes(flow["bytes"]) + (f" at {speed:.2f} GB/s" if speed is not None else "")


def reasons(counts: Mapping[str, float]) -> str:
    """Counts by reason, the largest first: ``absent 12, damaged 1``."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason or 'all'} {count}" for reason, count in ordered) or NONE


def _header(report: Mapping[str, Any], colour: bool) -> str:
    engine = report["engine"]
    life = "alive" if report["alive"] else "ended"
    age = format_seconds(report["age_seconds"])
    title = f"{clean(engine.get('model') or 'unknown model')}  instance {clean(report['instance'])}"
    facts = "  ".join(
        f"{label} {clean(engine[key])}"
        for label, key in (
            ("namespace", "namespace"),
            ("chunk", "chunk_tokens"),
            ("block", "block_tokens"),
            ("ranks", "ranks"),
        )
        if engine.get(key) is not None
    )
    state = paint(life, RED, colour and not report["alive"])
    return f"{paint(title, BOLD, colour)}  {state}, snapshot {age} old\n{facts or 'no engine is described'}"


def _grid(tiers: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tiers:
        return ["", "no tiers: nothing is kept"]
    lines = [["", *(clean(tier["name"]) for tier in tiers)]]
    lines += [[label, *(clean(cell(tier)) for tier in tiers)] for label, cell in _ROWS]
    wrapped = [[wrap(cell, _MAX_COLUMN) or [""] for cell in line] for line in lines]
    widths = [max(len(text) for line in wrapped for text in line[column]) for column in range(len(tiers) + 1)]
    shown = ["", "", "  ".join("-" * width for width in widths)]
    for line in wrapped:
        for texts in zip_longest(*line, fillvalue=""):
            shown.append("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip())
    shown[1:4] = [shown[3], shown[2]]
    return shown


def _totals(report: Mapping[str, Any], colour: bool) -> list[str]:
    tokens, copies = report["tokens"], report["copies"]
    verdict = "" if tokens["adds_up"] else "  " + paint("MISMATCH", RED, colour)
    lines = [
        "",
        f"engine-local tokens  {share(tokens['local'])}",
        f"misses by reason     {clean(reasons(tokens['misses_by_reason']))}",
        f"block copies         in {rate(copies['in'])}, out {rate(copies['out'])}",
        f"queried = local + hits + misses: {tokens['queried']} = {tokens['local']['value']} + "
        f"{tokens['hits']['value']} + {tokens['misses']['value']}{verdict}",
    ]
    if report["hook_errors"]:
        lines.append(paint(f"errors in hooks      {clean(reasons(report['hook_errors']))}", RED, colour))
    if report["probe_timeouts"]:
        lines.append(f"probe timeouts       {report['probe_timeouts']}")
    return lines


def _bytes(count: int | None) -> str:
    return NONE if count is None else format_bytes(count)


def _used(tier: Mapping[str, Any]) -> str:
    used, capacity = tier["used_bytes"], tier["capacity_bytes"]
    if used is None or not capacity:
        return _bytes(used)
    return f"{format_bytes(used)} of {format_bytes(capacity)} ({100 * used / capacity:.1f} %)"


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("state", lambda tier: tier["state"] or NONE),
    ("capacity", lambda tier: _bytes(tier["capacity_bytes"])),
    ("used", _used),
    ("chunks", lambda tier: NONE if tier["chunks"] is None else str(tier["chunks"])),
    ("hit tokens of queried", lambda tier: share(tier["hit_tokens"])),
    ("delivered of hit", lambda tier: share(tier["delivered_tokens"])),
    ("failed tokens", lambda tier: reasons(tier["failed_tokens"])),
    ("stored chunks", lambda tier: str(tier["stored_chunks"])),
    ("skipped chunks", lambda tier: reasons(tier["skipped_chunks"])),
    ("failed stores", lambda tier: reasons(tier["failed_stores"])),
    ("evicted chunks", lambda tier: str(tier["evicted_chunks"])),
    ("records read", lambda tier: str(tier["read_records"])),
    ("missed records", lambda tier: reasons(tier["missed_records"])),
    ("bytes in", lambda tier: rate(tier["in"])),
    ("bytes out", lambda tier: rate(tier["out"])),
    ("errors", lambda tier: reasons(tier["errors"])),
    ("notes", lambda tier: ", ".join(tier["notes"]) or NONE),
)
