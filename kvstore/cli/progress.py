"""A progress bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from kvstore.units import format_bytes

_INTERVAL = 0.1
"""Seconds between two pictures."""

_ERASE = "\r\x1b[K"


class ProgressBar:
    """Bytes and records done, of those there are.

    Args:
        stream: where it is drawn; if that is no terminal, or a dumb one, nothing is.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self.is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stream = stream
        self._clock = clock
        self._started = self._drawn_at = clock()
        self._records, self._bytes = 0, 0
        self._of_records, self._of_bytes = 0, 0

    def expect(self, records: int, size_bytes: int) -> None:
        """Says how much there is to do."""
        self._of_records, self._of_bytes = records, size_bytes
        self._draw()

    def advance(self, size_bytes: int) -> None:
        """Says that one more record is done."""
        self._records += 1
        self._bytes += size_bytes
        if self.is_shown and self._clock() - self._drawn_at >= _INTERVAL:
            self._draw()

    def erase(self) -> None:
        """Makes room for a line of text; the next `advance` draws again."""
        if self.is_shown:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._drawn_at = 0.0

    def finish(self) -> None:
        """Draws the last picture and leaves it."""
        if self.is_shown:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        if not self.is_shown:
            return
        self._drawn_at = self._clock()
        # Others add and remove records meanwhile: the total is a guess that is never less than what was done.
        part = min(1.0, self._bytes / self._of_bytes) if self._of_bytes else 1.0
        seconds = self._drawn_at - self._started
        speed = f" at {format_bytes(self._bytes / seconds)}/s" if seconds > 0 else ""
        records = f"{self._records} of {max(self._records, self._of_records)} records"
        text = f"] {100 * part:3.0f} %  {records}, {format_bytes(self._bytes)}{speed}"
        width = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 2))
        done = int(width * part)
        self._stream.write(f"{_ERASE}[{'#' * done}{'.' * (width - done)}{text}")
        self._stream.flush()
