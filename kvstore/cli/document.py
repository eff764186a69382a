"""One JSON document, written piece by piece: a million records are listed without holding them.

Invariant: what was written is a valid document when the writer is left, whatever ended it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class JsonWriter:
    """Writes one object. Use it as a context manager: all that is open is closed at the end.

    Args:
        write: takes text.
    """

    __slots__ = ("_open", "_write")

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._open: list[tuple[str, bool]] = []

    def __enter__(self) -> Self:
        self._start("{")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, BrokenPipeError):
            return
        while self._open:
            self.end()
        self._write("\n")

    def object(self, key: str | None = None) -> None:
        """Begins an object: in an object under ``key``, in a list without one."""
        self._next(key)
        self._start("{")

    def list(self, key: str | None = None) -> None:
        """Begins a list."""
        self._next(key)
        self._start("[")

    def put(self, key: str | None, value: Any) -> None:
        """Writes a whole value."""
        self._next(key)
        self._write(json.dumps(value, allow_nan=False))

    def end(self) -> None:
        """Ends the innermost object or list."""
        closing, is_empty = self._open.pop()
        self._write(closing if is_empty else "\n" + " " * len(self._open) + closing)

    def _start(self, opening: str) -> None:
        self._write(opening)
        self._open.append(("}" if opening == "{" else "]", True))

    def _next(self, key: str | None) -> None:
        closing, is_empty = self._open[-1]
        self._open[-1] = (closing, False)
        name = "" if key is None else f"{json.dumps(key)}: "
        self._write(("\n" if is_empty else ",\n") + " " * len(self._open) + name)
