"""Counters: numbers that only grow, the same names for every tier with the tier as a label.

Invariant: a counter never goes down and never becomes negative; ratios are computed by the reader, who has the
denominators. One `Counters` has one owner; a reader on another thread takes `snapshot`, which copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.errors import ContractError

METRICS: dict[str, str] = {
    "queried_tokens_total": "prompt tokens of requests that were admitted, each request once",
    "local_tokens_total": "of these, tokens that the engine itself had",
    "hit_tokens_total": "of these, tokens promised from a tier (label tier)",
    "miss_tokens_total": "of these, tokens to compute (label reason)",
    "requests_total": "requests counted in queried_tokens_total",
    "delivered_tokens_total": "promised tokens whose bytes reached the engine (label tier)",
    "failed_tokens_total": "promised tokens that were not delivered and were recomputed (label tier, reason)",
    "stored_chunks_total": "chunks that became readable in a tier (label tier)",
    "skipped_chunks_total": "chunks that were not stored (label tier, reason)",
    "failed_stores_total": "chunk writes that failed (label tier, reason)",
    "read_records_total": "records read and verified (label tier)",
    "missed_records_total": "reads that found no usable record (label tier, reason)",
    "evicted_chunks_total": "chunks removed to make room (label tier)",
    "promoted_chunks_total": "chunks that a read brought into a faster tier (label tier: where it came from)",
    "read_bytes_total": "bytes of records read from a tier (label tier)",
    "written_bytes_total": "bytes of records written to a tier (label tier)",
    "read_seconds_total": "time spent in reads (label tier)",
    "write_seconds_total": "time spent in writes (label tier)",
    "copied_in_bytes_total": "bytes copied from engine blocks into slots",
    "copied_out_bytes_total": "bytes copied from slots into engine blocks",
    "copy_seconds_total": "time spent in copies between blocks and slots (label reason: in, out)",
    "probes_total": "addresses asked of a tier (label tier)",
    "probe_timeouts_total": "requests that stopped waiting for a probe",
    "hook_errors_total": "exceptions stopped at the engine's boundary (label reason: the hook)",
    "tier_errors_total": "operating system or network errors of a tier (label tier, reason)",
}
"""Every counter with its meaning; `Counters.add` refuses any other name."""

Labels = tuple[str, str]
"""(tier, reason); ``""`` where a counter has no such label."""


class Counters:
    """A set of counters by name, tier and reason. Owned by one thread; `snapshot` may be called from any."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], float] = {}

    def add(self, name: str, amount: float = 1, *, tier: str = "", reason: str = "") -> None:
        """Raises the counter ``name``.

        Raises:
            ContractError: unknown name or negative amount.
        """
        if name not in METRICS:
            raise ContractError(f"no such counter: {name}")
        if amount < 0:
            raise ContractError(f"{name} can not go down by {-amount}")
        key = (name, tier, reason)
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, name: str, *, tier: str | None = None, reason: str | None = None) -> float:
        """Sum of ``name`` over the labels that are None."""
        return sum(
            v
            for (n, t, r), v in list(self._values.items())
            if n == name and (tier is None or t == tier) and (reason is None or r == reason)
        )

    def snapshot(self) -> list[tuple[str, str, str, float]]:
        """All counters as (name, tier, reason, value), sorted."""
        return sorted((*key, value) for key, value in list(self._values.items()))

    def merge(self, rows: Iterable[tuple[str, str, str, float]]) -> None:
        """Adds rows of another `snapshot`."""
        for name, tier, reason, value in rows:
            self.add(name, value, tier=tier, reason=reason)
