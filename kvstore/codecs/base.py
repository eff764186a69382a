"""What a codec is, and the registry of codecs.

A codec's name is part of every record's header, so a record of another codec is a miss. The first version stores the
engine's bytes as they are; a codec that changes them will declare it here and must be exact on the way back.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import ClassVar


class Codec(ABC):
    """A reversible, exact transformation of a payload. ``name`` goes into the record's header."""

    name: ClassVar[str]
    is_identity: ClassVar[bool]


def codecs() -> Mapping[str, type[Codec]]:
    """All registered codecs by name (entry points ``kvstore.codecs``)."""
    return {point.name: point.load() for point in entry_points(group="kvstore.codecs")}
