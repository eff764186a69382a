"""``python -m demo``: runs the scenario, prints one table and the live statistics, writes ``build/demo.json``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from demo import cases
from demo.cases import Result
from demo.child import EngineFailed, kill_tree, tree_of
from demo.counts import CountsMissing
from demo.progress import Progress
from demo.scenario import STEPS, Scenario
from demo.table import render

BUILD = Path(__file__).resolve().parent.parent / "build"
DONE, FAILED, INTERRUPTED = 0, 1, 130


def main() -> int:
    """Runs the demo; returns 0 if every expectation held, 1 if one did not, 130 when interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    started = time.monotonic()
    # Resolved, and 0700: a store refuses a directory that others may write to.
    folder = Path(tempfile.mkdtemp(prefix="kvstore-demo-")).resolve()
    progress = Progress(STEPS)
    scenario = Scenario(folder, progress)
    try:
        results = scenario.measure()
        progress.end()
        print(render(results))
        _write_json(results)
        _show_statistics(scenario.store.settings)
    except (EngineFailed, CountsMissing) as error:
        progress.end()
        print(f"demo: FAILED: {error}", file=sys.stderr)
        _keep_logs(folder)
        return FAILED
    except KeyboardInterrupt:
        progress.end()
        print("demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Cleaning up is bounded; a second Ctrl-C must not cut it short.
            signal.signal(number, signal.SIG_IGN)
        try:
            scenario.close()
        finally:
            # An interrupt while an engine is being started leaves it to nobody; it is still our child.
            kill_tree([process for process in tree_of(os.getpid()) if process.pid != os.getpid()])
            shutil.rmtree(folder)
    problems = cases.failed_expectations(results)
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    verdict = "every expectation held" if not problems else f"{len(problems)} expectations failed"
    print(f"demo: {verdict} after {time.monotonic() - started:.0f} s; figures in {os.path.relpath(BUILD)}/demo.json")
    return FAILED if problems else DONE


def _interrupted(number: int, frame: FrameType | None) -> None:
    # Both signals take the way out that ends the engines and removes the folder.
    raise KeyboardInterrupt


def _write_json(results: Mapping[str, Result]) -> None:
    BUILD.mkdir(exist_ok=True)
    (BUILD / "demo.json").write_text(json.dumps(cases.to_json(results), indent=2) + "\n")


def _show_statistics(settings: Path) -> None:
    """What a user would type, on the engine that still runs."""
    print("\n$ kvstore stats", flush=True)
    command = Path(sys.executable).with_name("kvstore")
    subprocess.run([command, "stats", "--config", settings], check=False, timeout=30)


def _keep_logs(folder: Path) -> None:
    BUILD.mkdir(exist_ok=True)
    for log in sorted(folder.glob("*.log")):
        kept = BUILD / f"demo-{log.name}"
        shutil.copyfile(log, kept)
        print(f"demo: its log is kept in {os.path.relpath(kept)}", file=sys.stderr)
