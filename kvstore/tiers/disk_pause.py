"""When to stop writing after an error, and when to try again.

Invariant: one line is logged when writing stops and one when it works again, however many writes fail between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0


class WritePause:
    """Thread-safe. ``clock`` gives monotonic seconds; ``place`` names the store in the log.

    Attributes:
        reason: why writing is stopped, ``""`` while it is not.
    """

    __slots__ = ("_clock", "_lock", "_place", "_retry_at", "reason")

    def __init__(self, clock: Callable[[], float], place: str) -> None:
        self._clock = clock
        self._place = place
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self.reason = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say in a status."""
        return (f"not writing: {self.reason}",) if self.reason else ()

    def allows(self) -> bool:
        """Whether a write may be tried; while stopped one attempt in `RETRY_SECONDS` may."""
        if not self.reason:
            return True
        with self._lock:
            now = self._clock()
            if self.reason and now < self._retry_at:
                return False
            self._retry_at = now + RETRY_SECONDS
            return True

    def stop(self, reason: str) -> None:
        """A write failed."""
        with self._lock:
            was, self.reason = self.reason, reason
            self._retry_at = self._clock() + RETRY_SECONDS
        if not was:
            log.warning("disk writing stopped reason=%s path=%s retry_s=%g", reason, self._place, RETRY_SECONDS)

    def resume(self) -> None:
        """A write succeeded."""
        if not self.reason:
            return
        with self._lock:
            was, self.reason = self.reason, ""
        if was:
            log.warning("disk writing again path=%s stopped_for=%s", self._place, was)
