"""Counts what the planner sees, so that queried tokens = engine-local + hits by tier + misses by reason."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.planner.tracks import LoadTicket, Match, Track


class Accounts:
    """Part of one planner; writes into its counters."""

    def __init__(self, chunk_tokens: int, tier_names: Sequence[str], slot_tier: int, counters: Counters) -> None:
        self._chunk = chunk_tokens
        self._names = tuple(tier_names)
        self._slot_tier = slot_tier
        self._slot_name = self._names[slot_tier] if slot_tier >= 0 else "staging"
        self._counters = counters

    def admitted(self, track: Track, tokens: int, local: int, promised: int, match: Match) -> None:
        """A request of ``tokens`` tokens starts with ``local`` engine tokens and ``promised`` of ours; once each.

        The rest is counted as missed: what lies behind the last full chunk (or is the one token that must be
        computed) as ``partial_chunk``, the chunks before it under the reason for which the match ended.
        """
        if track.is_counted:
            return
        track.is_counted = True
        add = self._counters.add
        add("requests_total")
        add("queried_tokens_total", tokens)
        add("local_tokens_total", local)
        left = promised
        first = local
        for tier in match.tiers if promised else ():
            end = (first // self._chunk + 1) * self._chunk
            part = min(left, end - first)
            if part > 0:
                add("hit_tokens_total", part, tier=self._names[tier])
            left, first = left - part, end
        if left > 0:
            add("hit_tokens_total", left)
        missed = tokens - local - promised
        if missed <= 0:
            return
        covered = local + promised
        reason = match.reason or "partial_chunk"
        tail = min(missed, tokens - max(covered, (tokens - 1) // self._chunk * self._chunk))
        if reason == "partial_chunk":
            tail = missed
        elif track.answered is None:
            tail = 0
        if tail:
            add("miss_tokens_total", tail, reason="partial_chunk")
        if missed - tail:
            add("miss_tokens_total", missed - tail, reason=reason)

    def saved(self, outcome: Outcome) -> None:
        """A save into a slot ended."""
        if outcome == Outcome.STORED:
            self._counters.add("stored_chunks_total", tier=self._slot_name)
        elif outcome == Outcome.SKIPPED:
            self._counters.add("skipped_chunks_total", tier=self._slot_name, reason="slot_busy")
        else:
            self._counters.add("failed_stores_total", tier=self._slot_name, reason=outcome.name.lower())

    def written(self, tier: int, outcome: Outcome) -> None:
        """A write to a persistent tier ended on every writing rank."""
        name = self._names[tier]
        if outcome == Outcome.STORED:
            self._counters.add("stored_chunks_total", tier=name)
        elif outcome == Outcome.SKIPPED:
            self._counters.add("skipped_chunks_total", tier=name, reason="skipped")
        else:
            self._counters.add("failed_stores_total", tier=name, reason=outcome.name.lower())

    def fetched(self, tier: int, outcome: Outcome) -> None:
        """A read into a slot ended on every rank."""
        if outcome == Outcome.HIT and self._slot_tier >= 0:
            self._counters.add("promoted_chunks_total", tier=self._names[tier])

    def loaded(self, load: LoadTicket) -> None:
        """A load ended on every rank."""
        for index, tokens in enumerate(load.tokens):
            name = self._names[load.tiers[index]]
            if index < load.delivered:
                self._counters.add("delivered_tokens_total", tokens, tier=name)
            else:
                self._counters.add("failed_tokens_total", tokens, tier=name, reason=Outcome(load.outcome).name.lower())
        if load.lost_tokens:
            self._counters.add("failed_tokens_total", load.lost_tokens, reason="not_planned")

    def evicted(self) -> None:
        """A slot's chunk made room for another."""
        self._counters.add("evicted_chunks_total", tier=self._slot_name)

    def no_slot(self) -> None:
        """A chunk found no slot; it is offered again while its request lives."""
        self._counters.add("skipped_chunks_total", tier=self._slot_name, reason="no_slot")

    def closed(self, track: Track) -> None:
        """A request ended; what was saved but found no room for its lower writes is counted."""
        unwritten = track.save_cursor - track.write_cursor
        if unwritten > 0:
            for index, name in enumerate(self._names):
                if index != self._slot_tier:
                    self._counters.add("skipped_chunks_total", unwritten, tier=name, reason="write_budget")
                    break
