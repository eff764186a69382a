"""Puts the demo's figures into the table of README.md: ``python scripts/readme_table.py`` after ``make demo``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- demo-table -->", "<!-- /demo-table -->"
OWN_HIT = "engine_prefix_hit"
LABELS = {
    "cold": "cold prefill",
    OWN_HIT: "vLLM's own prefix hit",
    "cpu_hit": "cpu hit (prefix cache emptied)",
    "disk_hit_after_kill": "disk hit (after `kill -9` and a restart)",
    "zero_control": "control: stored KV is zeros",
    "no_connector": "without connector",
}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of the six cases of ``build/demo.json``."""
    own = results[OWN_HIT]["ttft_s"]
    lines = [
        "| case | TTFT (median of 5) | of vLLM's own hit | external tokens | identical |",
        "|---|---:|---:|---:|---|",
    ]
    for case, label in LABELS.items():
        result = results[case]
        milliseconds = f"{result['ttft_s'] * 1e3:,.1f} ms"
        ratio = f"{result['ttft_s'] / own:.2f}x"
        identical = "yes" if result["identical"] else "no"
        lines.append(f"| {label} | {milliseconds} | {ratio} | {result['external_tokens']} | {identical} |")
    return "\n".join(lines)


def filled(text: str, content: str) -> str:
    """``text`` with everything between the marks replaced.

    Raises:
        ValueError: the marks are not there exactly once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the text must have {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main() -> int:
    """Fills the README; returns 0, or 1 if the demo has not run yet."""
    figures, readme = ROOT / "build" / "demo.json", ROOT / "README.md"
    if not figures.is_file():
        print("readme_table: there is no build/demo.json; run make demo first", file=sys.stderr)
        return 1
    readme.write_text(filled(readme.read_text(), table(json.loads(figures.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
