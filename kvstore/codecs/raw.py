"""The identity codec: a payload is the engine's bytes."""

from __future__ import annotations

from kvstore.codecs.base import Codec


class Raw(Codec):
    """Stores bytes as they are."""

    name = "raw"
    is_identity = True
