"""``kvstore clear``: removes records, after saying how many with ``--yes`` not given."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from kvstore.cli.columns import BOLD, RED, amount, clean, is_coloured, paint, portable
from kvstore.cli.stores import MISSING, OpenStore, add_place, open_stores
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.tiers.tools import Finding, StoredNamespace, Verdict
from kvstore.units import parse_seconds


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``kvstore``."""
    parser = commands.add_parser(
        "clear",
        help="remove records; without --yes only say how many",
        description="Removes records. Without --yes nothing is removed, and what would be is counted. Safe while "
        "engines run: to them it is an eviction. Memory tiers end with their engine and are not touched. Exit status "
        "2 if there is no such store, tier or namespace, or if something could not be removed.",
    )
    add_place(parser)
    parser.add_argument("--tier", metavar="NAME", help="only this tier of the configuration")
    parser.add_argument("--namespace", metavar="NS", help="only this namespace (16 digits, or its name in the store)")
    parser.add_argument(
        "--older-than", type=_age, metavar="AGE", help="only what was last used longer ago than this, such as 7d or 12h"
    )
    parser.add_argument("--yes", action="store_true", help="really remove")
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Cleared:
    """What was to go of one namespace, and what went."""

    namespace: StoredNamespace
    records: int = 0
    size_bytes: int = 0
    removed: int = 0
    removed_bytes: int = 0
    failure: str = ""

    def report(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {
            "model": self.namespace.model or None,
            "namespace": self.namespace.digits,
            "matched": {"records": self.records, "bytes": self.size_bytes},
            "removed": {"records": self.removed, "bytes": self.removed_bytes},
            "error": portable(self.failure) or None,
        }


def run(options: argparse.Namespace) -> int:
    """Clears the stores, or counts.

    Raises:
        ConfigError: no store has the namespace.
    """
    stores, status = open_stores(options.path, options.config, options.tier)
    used_before = None if options.older_than is None else time.time() - options.older_than
    chosen = [(store, _namespaces(store, options.namespace)) for store in stores]
    if stores and options.namespace and not any(spaces for _, spaces in chosen):
        known = [space.digits for store in stores for space in store.tools.namespaces()]
        raise ConfigError(f"there is no namespace {options.namespace}; known are {', '.join(known) or 'none'}")
    reports = []
    for store, spaces in chosen:
        cleared = [clear(store, space, used_before, remove=options.yes) for space in spaces]
        if any(item.failure for item in cleared):
            status = MISSING
        if options.json:
            reports.append({"tier": store.tier, "place": portable(store.tools.place), **_report(cleared)})
        else:
            _print(store, cleared, options.yes)
    if options.json:
        print(json.dumps({"is_dry_run": not options.yes, "stores": reports}, indent=1, allow_nan=False))
    elif stores and not options.yes:
        print("Nothing was removed. Add --yes to remove this.")
    return status


def _namespaces(store: OpenStore, wanted: str | None) -> list[StoredNamespace]:
    return [space for space in store.tools.namespaces() if wanted in (None, space.digits, space.name)]


def clear(store: OpenStore, namespace: StoredNamespace, used_before: float | None, *, remove: bool) -> Cleared:
    """Counts the records of one namespace and, if ``remove``, removes each; of refusals, the first is kept.

    Args:
        used_before: Unix seconds; what was used then or later is left alone. None for everything.
    """
    cleared = Cleared(namespace)
    for record in store.tools.records(namespace.name):
        if isinstance(record, Finding):
            if record.verdict == Verdict.UNREADABLE and record.place.startswith(namespace.name):
                cleared.failure = cleared.failure or f"{record.place}: {record.detail}"
            continue
        if used_before is not None and (record.used_at is None or record.used_at >= used_before):
            continue
        cleared.records += 1
        cleared.size_bytes += record.size_bytes
        try:
            if remove and store.tools.remove(record, used_before):
                cleared.removed += 1
                cleared.removed_bytes += record.size_bytes
        except TierUnavailable as error:
            cleared.failure = cleared.failure or str(error)
    return cleared


def _report(cleared: list[Cleared]) -> dict[str, Any]:
    return {
        "matched": {"records": sum(i.records for i in cleared), "bytes": sum(i.size_bytes for i in cleared)},
        "removed": {"records": sum(i.removed for i in cleared), "bytes": sum(i.removed_bytes for i in cleared)},
        "namespaces": [item.report() for item in cleared],
    }


def _print(store: OpenStore, cleared: list[Cleared], is_real: bool) -> None:
    colour = is_coloured(sys.stdout)
    print(paint(f"{store.tier}  {clean(store.tools.place)}", BOLD, colour))
    for item in cleared:
        name = f"{item.namespace.model or item.namespace.name} {item.namespace.digits}"
        matched = amount(item.records, item.size_bytes)
        if not is_real:
            print(f"{clean(name)}: would remove {matched}")
            continue
        kept = item.records - item.removed
        note = f"; kept {kept} (used, replaced or gone meanwhile)" if kept and not item.failure else ""
        print(f"{clean(name)}: removed {amount(item.removed, item.removed_bytes)}{note}")
    for item in cleared:
        if item.failure:
            print(paint(clean(item.failure), RED, colour))
    totals = _report(cleared)["removed" if is_real else "matched"]
    print(f"{'removed' if is_real else 'would remove'} {amount(totals['records'], totals['bytes'])}")


def _age(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
