"""Sizes, durations and percentages with their units, to and from text.

A number without a unit is refused (0 alone needs none): bare numbers are what makes a cache 7 times too large.
"""

from __future__ import annotations

import re
from decimal import Decimal

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE = 4096

_SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 1 << 40,
}
_SECONDS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s?([A-Za-z%]+)", re.ASCII)


def _split(text: object, kind: str, example: str) -> tuple[Decimal, str]:
    if isinstance(text, int) and not isinstance(text, bool) and text == 0:
        return Decimal(0), ""
    if isinstance(text, str) and text.strip() == "0":
        return Decimal(0), ""
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a {kind}; write a number with its unit, such as {example}")
    return Decimal(match[1]), match[2]


def parse_bytes(text: object) -> int:
    """Bytes of a size such as ``4GiB``, ``512MiB`` or ``5GB``; 0 needs no unit.

    Raises:
        ValueError: no unit, unknown unit, negative, not a number, or a fraction of a byte.
    """
    number, unit = _split(text, "size", "4GiB")
    if not unit:
        return 0
    if unit not in _SIZES:
        raise ValueError(f"{text!r} has no size unit; use one of {', '.join(_SIZES)}, as in 4GiB")
    value = number * _SIZES[unit]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes; write for example 4GiB")
    return int(value)


def parse_seconds(text: object) -> float:
    """Seconds of a duration such as ``250ms``, ``2s`` or ``7d``; 0 needs no unit.

    Raises:
        ValueError: no unit, unknown unit, negative, not a number.
    """
    number, unit = _split(text, "duration", "250ms")
    if not unit:
        return 0.0
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} has no time unit; use one of {', '.join(_SECONDS)}, as in 250ms")
    return float(number * _SECONDS[unit])


def parse_fraction(text: object) -> float:
    """Fraction in [0, 1) of a percentage such as ``5%``; 0 needs no unit.

    Raises:
        ValueError: no percent sign, or not below 100 %.
    """
    number, unit = _split(text, "percentage", "5%")
    if unit not in ("%", ""):
        raise ValueError(f"{text!r} is not a percentage; write for example 5%")
    if number >= 100:
        raise ValueError(f"{text!r} leaves nothing; write a percentage below 100%")
    return float(number / 100)


def format_bytes(count: float) -> str:
    """``count`` bytes for people: binary units, three significant digits (``1.50 GiB``)."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{_digits(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} TiB"


def format_seconds(seconds: float) -> str:
    """``seconds`` for people (``250 ms``, ``20.0 ms``, ``2.00 s``)."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} us"


def _digits(number: float) -> str:
    """Three significant digits, never an exponent (``%.3g`` writes 1020 as ``1.02e+03``)."""
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def align_up(count: int, step: int = PAGE) -> int:
    """The smallest multiple of ``step`` that is at least ``count``."""
    return -(-count // step) * step
