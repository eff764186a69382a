"""``kvstore stats``: what every engine on this machine holds, hit, missed and moved."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.snapshots import Snapshot

DEFAULT_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
_FOUND, _NOTHING = 0, 2


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``kvstore``."""
    parser = commands.add_parser(
        "stats",
        help="one table for each engine",
        description="One table for each engine that publishes snapshots here. Exit status 2 if there is none.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--dir", type=Path, metavar="DIR", help="directory of snapshots (stats.snapshot_dir)")
    where.add_argument("--config", type=Path, metavar="FILE", help="the engine's YAML file, which says where they are")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument(
        "--watch",
        type=_positive_seconds,
        nargs="?",
        const=DEFAULT_SECONDS,
        metavar="SECONDS",
        help=f"show again every SECONDS ({DEFAULT_SECONDS:g}) until Ctrl-C",
    )
    parser.add_argument("--count", type=_positive_count, metavar="N", help="with --watch: stop after N times")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Shows the snapshots once or repeatedly; returns 0, or 2 if the last look found none.

    Raises:
        ConfigError: the configuration file is wrong or publishes no snapshots.
    """
    if options.json and options.watch is not None:
        parser.error("--json prints one document: use it without --watch")
    if options.count is not None and options.watch is None:
        parser.error("--count needs --watch")
    directories = find_directories(options.dir, options.config)
    if options.watch is None:
        return show(directories, as_json=options.json)
    try:
        return watch(directories, options.watch, options.count)
    except KeyboardInterrupt:
        return _FOUND


def find_directories(directory: Path | None, config: Path | None) -> list[Path]:
    """Where to look: the directory named, that of a configuration, or both places that ``auto`` may mean.

    An engine with another environment may have taken the other place, so without a hint both are read.
    """
    if directory is not None:
        return [directory]
    from kvstore.config import load
    from kvstore.snapshots import resolve_dir
    from kvstore.tiers.base import tier_types

    settings = load(config, tier_types())
    root = settings.local_root
    if config is not None and settings.stats.snapshot_dir != "auto":
        named = resolve_dir(settings.stats.snapshot_dir, root, create=False)
        if named is None:
            raise ConfigError(f"{config}: stats.snapshot_dir is off: no snapshots are published")
        return [named]
    found = [resolve_dir("auto", base, environ, create=False) for base, environ in ((None, os.environ), (root, {}))]
    return [path for path in found if path is not None]


def show(directories: Sequence[Path], *, as_json: bool) -> int:
    """Prints what is there now; returns 0, or 2 if that is nothing, after saying where it looked."""
    now = time.time()
    snapshots = collect(directories, now)
    if as_json:
        from kvstore.cli.report import engine_report

        document: dict[str, Any] = {
            "time": now,
            "directories": [str(path) for path in directories],
            "engines": [engine_report(snapshot, now) for snapshot in snapshots],
        }
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        sys.stdout.write(_tables(snapshots, now))
    if snapshots:
        return _FOUND
    print(nothing_found(directories), file=sys.stderr)
    return _NOTHING


def watch(directories: Sequence[Path], seconds: float, count: int | None) -> int:
    """Shows the tables again and again, ``count`` times or until interrupted."""
    shown = 0
    while True:
        now = time.time()
        snapshots = collect(directories, now)
        text = _tables(snapshots, now) if snapshots else nothing_found(directories) + "\n"
        sys.stdout.write((_CLEAR if sys.stdout.isatty() else "") + text + ("" if sys.stdout.isatty() else "\n"))
        sys.stdout.flush()
        shown += 1
        if count is not None and shown >= count:
            return _FOUND if snapshots else _NOTHING
        time.sleep(seconds)


def collect(directories: Sequence[Path], now: float) -> list[Snapshot]:
    """The snapshots in all ``directories``, the newest first."""
    from kvstore.snapshots import read_all

    found = [snapshot for directory in dict.fromkeys(directories) for snapshot in read_all(directory, now)]
    return sorted(found, key=lambda snapshot: (-snapshot.time, snapshot.instance))


def nothing_found(directories: Sequence[Path]) -> str:
    """Where was looked, and what to do."""
    looked = "\n".join(f"  {path}{'' if path.is_dir() else ' (no such directory)'}" for path in directories)
    return (
        f"No engine has published a snapshot. Looked in:\n{looked or '  (no directory is known)'}\n"
        "Start an engine with the connector; stats.snapshot_dir in its YAML (auto, or a directory) says where it "
        "publishes.\nIf it is not one of these, run: kvstore stats --config FILE, or kvstore stats --dir DIR"
    )


def _tables(snapshots: Sequence[Snapshot], now: float) -> str:
    from kvstore.cli.report import engine_report
    from kvstore.cli.table import render

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return "\n".join(render(engine_report(snapshot, now), colour=colour) for snapshot in snapshots)


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _positive_count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count above 0")
    return count
