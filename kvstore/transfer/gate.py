"""Keeps an operation that was planned in one epoch from running under the name of another.

A tier works in one epoch at a time, and a verb stays in the one that it started in; but a job that was queued before
a reset, or before the tier's epoch changed, may start after it. So a job enters with the term in which it was queued,
and the epoch changes only while no job is inside.
"""

from __future__ import annotations

import threading

from kvstore.tiers.base import Tier

Term = tuple[str, int]
"""(epoch, generation)."""


class EpochGate:
    """One tier's gate in one executor. Thread-safe; no call blocks."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._inside = 0
        self._is_attached = False
        self._wanted: Term = ("", -1)
        self._applied: Term = ("", -1)

    def attached(self) -> None:
        """The tier was attached: an epoch that was named before is used from now on."""
        with self._lock:
            self._is_attached = True
            self._apply()

    @property
    def term(self) -> Term:
        """What a job that is queued now has to enter with."""
        return self._wanted

    def change(self, epoch: str, generation: int) -> None:
        """From now on only jobs of this term may enter, and work in ``epoch`` (``""``: none may)."""
        with self._lock:
            self._wanted = (epoch, generation)
            self._apply()

    def enter(self, term: Term) -> bool:
        """Whether a job of that term may use the tier now; if so it must call `leave`."""
        with self._lock:
            if not term[0] or not term == self._applied == self._wanted:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """A job that entered is done with the tier."""
        with self._lock:
            self._inside -= 1
            self._apply()

    def _apply(self) -> None:
        if self._inside or not self._is_attached or self._wanted == self._applied:
            return
        epoch, _generation = self._wanted
        if epoch and epoch != self._applied[0]:
            self._tier.use_epoch(epoch)
        self._applied = self._wanted
