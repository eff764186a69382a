"""The types of settings, shared with the tiers: quantities with their units, and paths.

Invariant: a quantity read from a file has its unit; a bare number other than 0 is refused with an example. A number
that code gives is in base units (bytes, seconds, a fraction) and is taken as it is. What tells the two apart is the
validation context, which only the loader sets.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, TypeVar
from urllib.parse import unquote

from pydantic import BeforeValidator, ConfigDict, PlainValidator, ValidationInfo

from kvstore.units import parse_bytes, parse_fraction, parse_seconds

STRICT = ConfigDict(extra="forbid", strict=True)
"""Configuration of every settings dataclass: unknown keys and implicit conversions are refused."""

FROM_FILE = {"from_file": True}
"""Validation context of values that were read from a file."""

MAX_BYTES = 2**63 - 1

_BARE_VARIABLE = re.compile(r"\$(\w+)")

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks a field as a quantity, so that it can be shown with its unit: ``bytes``, ``seconds``, ``fraction``."""

    name: str


def _quantity(parse: Callable[[object], _N], limit: float) -> Callable[[object, ValidationInfo], _N]:
    def check(value: object, call: ValidationInfo) -> _N:
        if not call.context and isinstance(value, (int, float)) and not isinstance(value, bool):
            number = value
        else:
            number = parse(value)
        if not (0 <= number <= limit and math.isfinite(number)):
            raise ValueError(f"{value!r} is out of range")
        return number  # type: ignore[return-value]  # a float given by code for an int is refused by the field itself

    return check


Size = Annotated[int, BeforeValidator(_quantity(parse_bytes, MAX_BYTES)), Unit("bytes")]
"""Bytes; in YAML ``4GiB``, ``512MiB``, ``5GB``, or 0."""

Duration = Annotated[float, BeforeValidator(_quantity(parse_seconds, 1e9)), Unit("seconds")]
"""Seconds; in YAML ``250ms``, ``2s``, ``7d``, or 0."""

Fraction = Annotated[float, BeforeValidator(_quantity(parse_fraction, 1.0)), Unit("fraction")]
"""Fraction of a whole; in YAML ``5%``, or 0."""


def store_path(text: object) -> Path:
    """The absolute path that ``text`` means: ``~``, ``file:///x``, ``file://~/x``, relative to the working directory.

    Symbolic links are kept: whether one is acceptable is for the tier that opens the directory to say.

    Raises:
        ValueError: empty, not a path of this machine, or with a bare ``$VAR`` that nothing would expand.
    """
    if not isinstance(text, (str, PurePath)):
        raise ValueError(f"{text!r} is not a path")
    path = str(text)
    if path.startswith("file:"):
        path = _from_url(path)
    elif re.match(r"[a-z][a-z0-9+.-]*://", path, re.IGNORECASE):
        raise ValueError(f"{path!r} is not a directory of this machine")
    if not path.strip() or "\0" in path:
        raise ValueError(f"{path!r} is not a path")
    if bare := _BARE_VARIABLE.search(path):
        raise ValueError(f"{path!r} has a bare variable; write ${{{bare[1]}}}")
    expanded = os.path.expanduser(path)  # noqa: PTH111  (Path.expanduser raises where there is no home)
    if expanded.startswith("~"):
        raise ValueError(f"{path!r} names a home directory that is not known; write ./{path} for a name with a tilde")
    return Path(os.path.abspath(expanded))  # noqa: PTH100  (Path.absolute keeps `..`: two spellings of one directory)


def _from_url(url: str) -> str:
    path = unquote(url.removeprefix("file:"))
    if path.startswith("//"):
        path = path[2:].removeprefix("localhost")
    if not path.startswith(("/", "~")):
        raise ValueError(f"{url!r} is not a path of this machine; write file:///directory")
    return path


class IsPath:
    """Marks a field as a local directory of records."""

    __slots__ = ()


StorePath = Annotated[Path, PlainValidator(store_path), IsPath()]
"""A directory of this machine, absolute and without `..`. A default must come from ``store_path`` itself."""
