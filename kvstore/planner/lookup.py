"""Answers "how much of this prompt can be delivered", and keeps a promise's slots until it is committed.

A lease is not a reservation: it keeps slots that hold promised chunks from being evicted until its deadline, and all
leases together hold at most half of the slots. A promise that falls short all the same is a load that fails honestly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.planner.catalog import MAX_TIERS
from kvstore.planner.slot_table import SlotState
from kvstore.planner.state import State, first_tier
from kvstore.planner.tracks import Match, Track

_MAY_CHANGE = {"pending": "probe_deadline", "closed": "tier_closed", "unknown": "probe_deadline"}
"""What is worth asking again for, and the reason of the miss once the deadline has passed."""

_PLANS_UNTIL_REPORTED = 2
"""Plans until what was reported at the time of a question has arrived, also where an engine runs a step ahead."""


class Lookup:
    """Part of one planner."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._next_lease_end = float("inf")
        self._leased_slots = 0

    @property
    def leased_slots(self) -> int:
        """Pins held by leases now."""
        return self._leased_slots

    def match(self, track: Track, addresses: Sequence[bytes], local: int, limit: int, now: float) -> Match:
        """See `Planner.match`."""
        key = (local, limit, self._state.catalog.generation)
        verdict = track.verdict
        if verdict is not None and verdict.tokens is not None and track.verdict_key == key:
            if track.leased:
                self._extend(track, now)
            return verdict
        match = self._walk(track, addresses, local, limit)
        if match.tokens is None:
            if track.wait_until is None:
                track.wait_until = now + self._state.spec.probe_timeout
                track.wait_plans = self._state.plans + _PLANS_UNTIL_REPORTED
            if now < track.wait_until or (match.reason != "unknown" and self._awaits_reports(track, now)):
                return match
            self._state.counters.add("probe_timeouts_total")
            track.gave_up = True
            match = self._walk(track, addresses, local, limit)
        self.end_lease(track)
        if match.tokens:
            self._lease(track, addresses, local, match, now)
        track.verdict, track.verdict_key, track.answered = match, key, match
        return match

    def _awaits_reports(self, track: Track, now: float) -> bool:
        """Whether the step that brings the ranks' reports is still to come, however long the steps are."""
        late = track.wait_until is not None and now >= track.wait_until + self._state.spec.load_timeout
        return self._state.plans < track.wait_plans and not late

    def _walk(self, track: Track, addresses: Sequence[bytes], local: int, limit: int) -> Match:
        state, chunk, block = self._state, self._state.spec.chunk_tokens, self._state.spec.block_tokens
        limit = limit // block * block
        first, last = local // chunk, min(len(addresses), -(-limit // chunk))
        if local >= limit or first >= last:
            return Match(0, reason="partial_chunk")
        tiers: list[int] = []
        reason = "partial_chunk"
        code_of, slot_state, slot_tier = state.catalog.code, state.slots.state, state.slot_tier
        readable, ready = state.readable, int(SlotState.READY)
        refused = len(addresses) if track.refused_from is None else track.refused_from
        for index in range(first, last):
            if index >= refused:
                reason = "failed_before"
                break
            code = code_of(addresses[index])
            slot, mask = (code >> MAX_TIERS) - 1, code & readable
            if slot >= 0 and slot_tier >= 0 and slot_state[slot] == ready:
                tiers.append(slot_tier)
            elif mask and (slot < 0 or slot_state[slot] == ready or addresses[index] in state.fetching):
                tiers.append(first_tier(mask))
            elif (blocked := self._blocked(track, index, code)) in _MAY_CHANGE and not track.gave_up:
                probe = tuple(addresses[index:last]) if blocked == "unknown" else ()
                return Match(None, tuple(tiers), blocked, probe)
            else:
                reason = _MAY_CHANGE.get(blocked, blocked)
                break
        tiers, fits = self._fit(track, addresses, first, tiers)
        tokens = min((first + len(tiers)) * chunk, limit) - local
        return Match(max(0, tokens), tuple(tiers), reason if fits else "no_slot")

    def _blocked(self, track: Track, index: int, code: int) -> str:
        """Why a chunk can not be promised now."""
        state = self._state
        if code >> MAX_TIERS:
            return "pending"  # on its way into a slot
        if track.absent_from is not None and index >= track.absent_from:
            return "never_stored"
        if code:
            return "closed"  # in a tier that the ranks have not reported open
        if any(state.epochs):
            return "unknown"
        return "tier_closed" if state.persistent else "never_stored"

    def _fit(self, track: Track, addresses: Sequence[bytes], first: int, tiers: list[int]) -> tuple[list[int], bool]:
        """The longest prefix whose reads find slots now, and whether that is all of it."""
        slots, leased = self._state.slots, set(track.leased)
        room = slots.free + slots.evictable
        if len(tiers) <= room:
            return tiers, True
        # What only this request's own lease pins is room that a commit finds.
        room += sum(1 for slot in leased if slots.pins[slot] == 1)
        for index in range(len(tiers)):
            slot = self._state.catalog.slot(addresses[first + index])
            # A promised slot without another pin is not room for a read either.
            if slot < 0 or slots.pins[slot] == (slot in leased):
                room -= 1
            if room < 0:
                return tiers[:index], False
        return tiers, True

    def _lease(self, track: Track, addresses: Sequence[bytes], local: int, match: Match, now: float) -> None:
        state, first = self._state, local // self._state.spec.chunk_tokens
        room = state.slots.count // 2 - self._leased_slots
        for offset, tier in enumerate(match.tiers):
            if tier == state.slot_tier and len(track.leased) < room:
                slot = state.catalog.slot(addresses[first + offset])
                state.slots.pin(slot)
                track.leased.append(slot)
        self._leased_slots += len(track.leased)
        self._extend(track, now)

    def _extend(self, track: Track, now: float) -> None:
        track.lease_until = now + self._state.spec.load_timeout
        self._next_lease_end = min(self._next_lease_end, track.lease_until)

    def end_lease(self, track: Track) -> None:
        """Lets go of what the request's promise holds."""
        leased, track.leased = track.leased, []
        self._leased_slots -= len(leased)
        for slot in leased:
            self._state.release(slot)
        if leased:
            track.verdict = None

    def expire(self, tracks: Iterable[Track], now: float) -> None:
        """Ends the leases whose deadline passed. O(1) before the first deadline."""
        if now < self._next_lease_end:
            return
        self._next_lease_end = float("inf")
        for track in tracks:
            if track.leased and now >= track.lease_until:
                self.end_lease(track)
            elif track.leased:
                self._next_lease_end = min(self._next_lease_end, track.lease_until)
