"""The one error tree of the store.

::

    KVStoreError
    |-- ConfigError          a setting or a combination of settings that cannot work; names the key and the remedy
    |-- LayoutMismatch       KV memory whose declared geometry the store cannot serve
    `-- TierError            a tier as a whole; one record that is absent is a value (``Outcome.MISS``), not an error
        |-- TierUnavailable  down, switched off, not yet open
        |-- TierFull         no room and nothing that may be evicted
        `-- RecordDamaged    bytes that are not the record they claim to be (raised by tools; a load answers DAMAGED)

    ContractError            a bug in this package or in its caller; deliberately outside the tree, never caught
"""

from __future__ import annotations

from collections.abc import Iterable


class KVStoreError(Exception):
    """Anything that the store can report to its user."""


class ConfigError(KVStoreError):
    """One or more settings are wrong. ``problems`` has a line for each, and the message has them all."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class LayoutMismatch(KVStoreError):
    """The KV memory has a geometry that the store does not serve, or that was not declared."""


class TierError(KVStoreError):
    """A tier cannot do what it was asked."""


class TierUnavailable(TierError):
    """The tier is down, switched off or not open."""


class TierFull(TierError):
    """The tier has no room and may evict nothing."""


class RecordDamaged(TierError):
    """Bytes that are not the record they claim to be; ``kind`` is the name of the damage."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind = kind
        super().__init__(f"{kind}: {detail}" if detail else kind)


class ContractError(AssertionError):
    """A broken invariant: a bug, never a condition of the outside world."""
