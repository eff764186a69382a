"""What the store itself says and has: tokens delivered by tier, and records on disk.

The engine's own figures are no evidence here: after a failed load vLLM still counts the tokens as external hits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.snapshots import is_alive, merge, read_parts

DELIVERED = "delivered_tokens_total"
UP_TO_DATE_SECONDS = 10.0
STORED_SECONDS = 30.0


class CountsMissing(RuntimeError):
    """The engine did not publish what was waited for; the message says what there was."""


def delivered_after(directory: Path, moment: float) -> dict[str, int]:
    """Tokens delivered by tier, from snapshots that every part of the live engine made after ``moment`` (Unix seconds).

    Raises:
        CountsMissing: no such snapshots within `UP_TO_DATE_SECONDS`.
    """
    deadline = time.monotonic() + UP_TO_DATE_SECONDS
    while True:
        now = time.time()
        parts = [part for part in read_parts(directory) if is_alive(part, now)]
        if parts and all(part.time > moment for part in parts):
            return by_tier(merge(parts, alive=True).rows(DELIVERED))
        if time.monotonic() > deadline:
            ages = ", ".join(f"{part.role} {now - part.time:.1f} s old" for part in parts) or "none of a live engine"
            raise CountsMissing(f"no new snapshots within {UP_TO_DATE_SECONDS:.0f} s in {directory}: {ages}")
        time.sleep(0.02)


def by_tier(rows: list[tuple[str, str, str, float]]) -> dict[str, int]:
    """Counter rows summed by their tier."""
    sums: dict[str, int] = {}
    for _, tier, _, value in rows:
        sums[tier] = sums.get(tier, 0) + round(value)
    return sums


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much each count grew; counts that did not are left out."""
    return {tier: count - before.get(tier, 0) for tier, count in after.items() if count > before.get(tier, 0)}


def records_in(root: Path) -> int:
    """Whole records below ``root``: a record has its name only once it is complete."""
    return sum(1 for _ in root.rglob("*.safetensors"))


def wait_for_records(root: Path, count: int) -> None:
    """Waits until ``root`` has at least ``count`` records; an idle engine must get there without another step.

    Raises:
        CountsMissing: it did not within `STORED_SECONDS`.
    """
    deadline = time.monotonic() + STORED_SECONDS
    while (found := records_in(root)) < count:
        if time.monotonic() > deadline:
            raise CountsMissing(f"{found} of {count} chunks were on disk {STORED_SECONDS:.0f} s after they were saved")
        time.sleep(0.02)
