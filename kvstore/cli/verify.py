"""``kvstore verify``: reads every record and names what is damaged."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.cli.columns import BOLD, RED, YELLOW, clean, is_coloured, paint, portable
from kvstore.cli.document import JsonWriter
from kvstore.cli.progress import ProgressBar
from kvstore.cli.stores import DAMAGE, OpenStore, add_place, open_stores
from kvstore.errors import TierUnavailable
from kvstore.tiers.tools import Finding, StoredRecord, Verdict
from kvstore.units import format_bytes

_REMOVED = "removed"
_REPLACED = "not removed: it was replaced or is gone"
_NOT_OURS = "not removed: only records are"
_BAD = frozenset({Verdict.DAMAGED, Verdict.UNREADABLE})


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``kvstore``."""
    parser = commands.add_parser(
        "verify",
        help="read every record and name what is damaged",
        description="Reads every record of a store, compares it with its name, its header and its checksum, and names "
        "what is damaged. Changes nothing without --delete. Exit status 1 if there is damage, removed or not; 2 if "
        "there is no store.",
    )
    add_place(parser)
    parser.add_argument("--delete", action="store_true", help="remove each damaged record after naming it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verifies the stores; 0, 1 for damage, or 2 if a store is missing and no other one is damaged."""
    stores, status = open_stores(options.path, options.config)
    if not options.json:
        damage = [_verify_text(store, options.delete) for store in stores]
        return DAMAGE if any(damage) else status
    with JsonWriter(sys.stdout.write) as document:
        document.list("stores")
        damage = [_verify_json(store, options.delete, document) for store in stores]
    return DAMAGE if any(damage) else status


@dataclass(slots=True)
class Summary:
    """What one verification found."""

    size_bytes: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    removed: int = 0

    @property
    def is_damaged(self) -> bool:
        """Whether anything was damaged, or could not be read to find out."""
        return any(self.verdicts[verdict] for verdict in _BAD)


def verify(store: OpenStore, delete: bool, say: Callable[[Finding], None], end: Callable[[str], None]) -> Summary:
    """Verifies a store, with a progress bar where the standard error is a terminal.

    Args:
        delete: whether damaged records are removed.
        say: is told each finding that is not OK, before anything is done about it.
        end: is told what was done about it, ``""`` for nothing.
    """
    summary = Summary()
    bar = ProgressBar(sys.stderr)
    if bar.is_shown:
        bar.expect(*_sum(store))
    for finding in store.tools.verify():
        summary.verdicts[finding.verdict] += 1
        if finding.verdict != Verdict.OK:
            summary.kinds[finding.kind] += 1
            bar.erase()
            say(finding)
            sys.stdout.flush()
            outcome = _remove(store, finding) if delete and finding.verdict == Verdict.DAMAGED else ""
            summary.removed += outcome == _REMOVED
            end(outcome)
        if finding.record is not None:
            summary.size_bytes += finding.record.size_bytes
            bar.advance(finding.record.size_bytes)
    bar.finish()
    return summary


def _sum(store: OpenStore) -> tuple[int, int]:
    sizes = [item.size_bytes for item in store.tools.records() if isinstance(item, StoredRecord)]
    return len(sizes), sum(sizes)


def _remove(store: OpenStore, finding: Finding) -> str:
    if finding.record is None:
        return _NOT_OURS
    try:
        return _REMOVED if store.tools.remove(finding.record) else _REPLACED
    except TierUnavailable as error:
        return f"not removed: {error}"


def _verify_text(store: OpenStore, delete: bool) -> bool:
    colour = is_coloured(sys.stdout)
    print(paint(f"{store.tier}  {clean(store.tools.place)}", BOLD, colour))

    def say(finding: Finding) -> None:
        verdict = finding.verdict
        code = RED if verdict in _BAD else YELLOW
        detail = f": {finding.detail}" if finding.detail else ""
        print(f"{paint(verdict.value, code, colour)} ({finding.kind})  {clean(finding.place)}{clean(detail)}")

    def end(outcome: str) -> None:
        if outcome:
            print(f"  {clean(outcome)}")

    summary = verify(store, delete, say, end)
    verdicts = (
        ", ".join(f"{number} {verdict.value}" for verdict, number in sorted(summary.verdicts.items())) or "nothing"
    )
    print(f"{format_bytes(summary.size_bytes)} read: {verdicts}" + (f"; {summary.removed} removed" if delete else ""))
    if summary.verdicts[Verdict.DAMAGED] and not delete:
        print("Damaged records are never served; kvstore verify --delete removes them.")
    return summary.is_damaged


def _verify_json(store: OpenStore, delete: bool, document: JsonWriter) -> bool:
    document.object()
    document.put("tier", store.tier)
    document.put("place", portable(store.tools.place))
    document.list("findings")

    def say(finding: Finding) -> None:
        document.object()
        document.put("verdict", finding.verdict.value)
        document.put("kind", finding.kind)
        document.put("place", portable(finding.place))
        document.put("detail", portable(finding.detail))
        document.put("address", None if finding.record is None else finding.record.address)

    def end(outcome: str) -> None:
        document.put("outcome", portable(outcome))
        document.end()

    summary = verify(store, delete, say, end)
    document.end()
    document.put("bytes", summary.size_bytes)
    document.put("verdicts", {verdict.value: summary.verdicts[verdict] for verdict in Verdict})
    document.put("kinds", dict(summary.kinds))
    document.put("removed", summary.removed)
    document.end()
    return summary.is_damaged
