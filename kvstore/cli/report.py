"""The figures of one engine, made from its counters: what ``--json`` prints and the tables show.

Invariant: a ratio never comes without its numerator and denominator, and is null where there is no denominator.
"""

from __future__ import annotations

from typing import Any

from kvstore.snapshots import Snapshot, TierRow


def ratio(part: float, whole: float) -> dict[str, float | None]:
    """``part`` of ``whole``: ``{"value", "of", "ratio"}``; the ratio is None for a whole of 0."""
    return {"value": whole_number(part), "of": whole_number(whole), "ratio": part / whole if whole else None}


def whole_number(value: float) -> float:
    """An integer where ``value`` is one: tokens and bytes are counted, not measured."""
    return int(value) if value == int(value) else value


def engine_report(snapshot: Snapshot, now: float) -> dict[str, Any]:
    """The JSON-able figures of one engine. ``now`` is Unix seconds."""
    queried = snapshot.value("queried_tokens_total")
    local = snapshot.value("local_tokens_total")
    hits = snapshot.value("hit_tokens_total")
    misses = snapshot.value("miss_tokens_total")
    return {
        "instance": snapshot.instance,
        "roles": list(snapshot.roles),
        "alive": snapshot.alive,
        "age_seconds": max(0.0, now - snapshot.time),
        "engine": dict(snapshot.engine),
        "requests": whole_number(snapshot.value("requests_total")),
        "tokens": {
            "queried": whole_number(queried),
            "local": ratio(local, queried),
            "hits": ratio(hits, queried),
            "misses": ratio(misses, queried),
            "misses_by_reason": by_reason(snapshot, "miss_tokens_total"),
            "adds_up": queried == local + hits + misses,
        },
        "copies": {
            "in": flow(snapshot.value("copied_in_bytes_total"), snapshot.value("copy_seconds_total", reason="in")),
            "out": flow(snapshot.value("copied_out_bytes_total"), snapshot.value("copy_seconds_total", reason="out")),
        },
        "hook_errors": by_reason(snapshot, "hook_errors_total"),
        "probe_timeouts": whole_number(snapshot.value("probe_timeouts_total")),
        "tiers": [tier_report(snapshot, row, queried) for row in tier_rows(snapshot)],
        "counters": [list(row) for row in snapshot.counters],
    }


def tier_rows(snapshot: Snapshot) -> list[TierRow]:
    """The tiers of the snapshot, with those that only have counters at the end, so that no figure is lost."""
    known = [row.name for row in snapshot.tiers]
    others = dict.fromkeys(tier for _, tier, _, _ in snapshot.counters if tier and tier not in known)
    return [*snapshot.tiers, *(TierRow(name) for name in others)]


def tier_report(snapshot: Snapshot, row: TierRow, queried: float) -> dict[str, Any]:
    """The figures of one tier. ``queried``: tokens asked of the engine, the denominator of its hits."""

    def total(name: str) -> float:
        return snapshot.value(name, tier=row.name)

    return {
        "name": row.name,
        "state": row.state,
        "notes": list(row.notes),
        "capacity_bytes": row.capacity_bytes,
        "used_bytes": row.used_bytes,
        "chunks": row.chunks,
        "hit_tokens": ratio(total("hit_tokens_total"), queried),
        "delivered_tokens": ratio(total("delivered_tokens_total"), total("hit_tokens_total")),
        "failed_tokens": by_reason(snapshot, "failed_tokens_total", row.name),
        "stored_chunks": whole_number(total("stored_chunks_total")),
        "skipped_chunks": by_reason(snapshot, "skipped_chunks_total", row.name),
        "failed_stores": by_reason(snapshot, "failed_stores_total", row.name),
        "evicted_chunks": whole_number(total("evicted_chunks_total")),
        "promoted_chunks": whole_number(total("promoted_chunks_total")),
        "read_records": whole_number(total("read_records_total")),
        "missed_records": by_reason(snapshot, "missed_records_total", row.name),
        "in": flow(total("written_bytes_total"), total("write_seconds_total")),
        "out": flow(total("read_bytes_total"), total("read_seconds_total")),
        "errors": by_reason(snapshot, "tier_errors_total", row.name),
    }


def flow(count: float, seconds: float) -> dict[str, float | None]:
    """Bytes moved, the seconds that took, and the rate; no rate where no time was counted."""
    return {
        "bytes": whole_number(count),
        "seconds": seconds,
        "gigabytes_per_second": count / seconds / 1e9 if seconds else None,
    }


def by_reason(snapshot: Snapshot, name: str, tier: str | None = None) -> dict[str, float]:
    """The counter ``name`` by reason, without zeros."""
    sums: dict[str, float] = {}
    for _, _, reason, value in snapshot.rows(name, tier=tier):
        sums[reason] = sums.get(reason, 0) + value
    return {reason: whole_number(value) for reason, value in sorted(sums.items()) if value}
