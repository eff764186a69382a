"""One line that says what runs now."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Rewrites one line on a terminal; prints a line a change elsewhere, so that a log stays readable."""

    def __init__(self, steps: int, out: TextIO = sys.stderr) -> None:
        self._steps = steps
        self._step = 0
        self._out = out
        self._started = time.monotonic()

    def step(self, text: str) -> None:
        """Goes on to the next step."""
        self._step += 1
        line = f"[{time.monotonic() - self._started:4.0f} s] {self._step}/{self._steps} {text}"
        self._out.write(f"\r\x1b[K{line}" if self._out.isatty() else line + "\n")
        self._out.flush()

    def end(self) -> None:
        """Removes the line."""
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()
