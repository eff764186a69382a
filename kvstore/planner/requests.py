"""The requests that are live, from their first lookup or save to their end.

Invariant: a request is in the accounts at most once, and what its promise holds ends with it at the latest.
"""

from __future__ import annotations

from kvstore.planner.lookup import Lookup
from kvstore.planner.state import State
from kvstore.planner.tracks import Match, Track


class Requests:
    """Part of one planner. Used from one thread; no call blocks."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.lookup = Lookup(state)
        self._tracks: dict[str, Track] = {}
        self._next_turn = 1

    def track(self, request_id: str) -> Track:
        """The track of a live request, made at its first use."""
        track = self._tracks.get(request_id)
        if track is None:
            track = self._tracks[request_id] = Track(request_id, self._next_turn)
            self._next_turn += 1
        return track

    def find(self, request_id: str) -> Track | None:
        """The track of a live request, None for none."""
        return self._tracks.get(request_id)

    def close(self, request_id: str) -> None:
        """Forgets a request that ended, in any state. What was ordered for it ends by itself."""
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self.lookup.end_lease(track)
            self.state.accounts.closed(track)

    @property
    def live_requests(self) -> int:
        """Number of requests with a track."""
        return len(self._tracks)

    def admit(self, track: Track, tokens: int, local_tokens: int, promised: int, unasked: str = "filtered") -> None:
        """The engine admitted the request: counts it, once, with what its last answer said.

        Args:
            unasked: the reason of its misses if it never asked.
        """
        self.state.accounts.admitted(track, tokens, local_tokens, promised, track.answered or Match(0, reason=unasked))
