"""When damage stops being an accident: the disk tier's breaker.

Invariant: at most `DROPS` records are dropped as damaged within `WINDOW_SECONDS`. One more means that the disk, the
memory or we are at fault and not the records: nothing is dropped any more and the tier answers nothing, until an
attempt that is made every `RETRY_SECONDS` succeeds. One line is logged for each of the two transitions.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

DROPS = 8
WINDOW_SECONDS = 60.0
RETRY_SECONDS = 10.0

OPEN_KIND = "breaker_open"
"""What a read is counted under that was not made."""

KEPT_KINDS = frozenset({"symlink", "not_a_file", "owner", "mode"})
"""Damage that is no damaged record of ours, so that it is neither removed nor held against the disk."""


class DropBreaker:
    """Thread-safe. ``clock`` gives monotonic seconds; ``place`` names the store in the log."""

    __slots__ = ("_clock", "_drops", "_is_open", "_lock", "_place", "_retry_at")

    def __init__(self, clock: Callable[[], float], place: str) -> None:
        self._clock = clock
        self._place = place
        self._lock = threading.Lock()
        self._drops: deque[float] = deque()
        self._is_open = False
        self._retry_at = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say in a status."""
        return (f"breaker open: more than {DROPS} damaged records a minute",) if self._is_open else ()

    def allows(self) -> bool:
        """Whether the disk may be used; while the breaker is open one attempt in `RETRY_SECONDS` may."""
        if not self._is_open:
            return True
        with self._lock:
            now = self._clock()
            if self._is_open and now < self._retry_at:
                return False
            self._retry_at = now + RETRY_SECONDS
            return True

    def undecided(self) -> None:
        """A read found nothing: that says nothing about the disk, so that the next one may be the attempt."""
        if self._is_open:
            with self._lock:
                self._retry_at = self._clock()

    def may_drop(self, kind: str) -> bool:
        """Says that a read found damage of this kind; whether the record may be dropped for it."""
        if kind in KEPT_KINDS:
            return False
        with self._lock:
            now = self._clock()
            while self._drops and self._drops[0] <= now - WINDOW_SECONDS:
                self._drops.popleft()
            if len(self._drops) < DROPS:
                self._drops.append(now)
                return True
            was_open, self._is_open = self._is_open, True
            self._retry_at = now + RETRY_SECONDS
        if not was_open:
            log.warning(
                "disk breaker open kind=%s path=%s drops=%d retry_s=%g", kind, self._place, DROPS, RETRY_SECONDS
            )
        return False

    def succeeded(self) -> None:
        """A record was read and verified, or written."""
        if not self._is_open:
            return
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            log.warning("disk breaker closed path=%s", self._place)
