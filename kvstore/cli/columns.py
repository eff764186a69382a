"""Text for people: columns that fit what is in them, times, and what a terminal may be shown.

Invariant: what is printed is printable; a name in a store is a stranger's, and must not steer a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest
from typing import TextIO

from kvstore.units import format_bytes

NONE = "-"
BOLD, RED, YELLOW = "\x1b[1m", "\x1b[31m", "\x1b[33m"
_RESET = "\x1b[0m"


def clean(text: object) -> str:
    """``text`` with a ``?`` for every character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def portable(text: str) -> str:
    """``text`` as every JSON parser takes it: bytes of a name that are no UTF-8 become ``\\udc80`` and so on."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that wants colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, colour: bool) -> str:
    """``text`` in a colour, if ``colour``."""
    return f"{code}{text}{_RESET}" if colour else text


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of a table; a cell with line feeds takes several.

    Args:
        head: the columns' names.
        rows: as many cells each.
        right: indexes of the columns of numbers.
    """
    cells = [[[clean(line) for line in cell.split("\n")] for cell in row] for row in (head, *rows)]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(head))]
    lines: list[str] = []
    for number, row in enumerate(cells):
        for texts in zip_longest(*row, fillvalue=""):
            pairs = enumerate(zip(texts, widths, strict=True))
            lines.append("  ".join(t.rjust(w) if i in right else t.ljust(w) for i, (t, w) in pairs).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines


def count(number: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def amount(records: int, size_bytes: int) -> str:
    """``5 records, 40.0 KiB``."""
    return f"{count(records, 'record')}, {format_bytes(size_bytes)}"


def when(seconds: float | None) -> str:
    """A time of day of this machine for Unix seconds: ``2031-05-04 13:37``."""
    if seconds is None:
        return NONE
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
