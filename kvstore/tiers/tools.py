"""What people do with the store of a persistent tier while they ask no engine: list, verify, inspect, remove.

Invariant: nothing but `TierTools.remove` changes a store, not even when something was used last; and what is wrong
with a store is a value (`Finding`), never an exception. Others may write, evict and remove meanwhile: what vanished
is no finding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self


class Verdict(StrEnum):
    """What to think of something that lies in a store."""

    OK = "ok"
    DAMAGED = "damaged"
    """It has a record's name, in the namespace and version that its place says, and is not that record."""
    FOREIGN = "foreign"
    """A record of another version or namespace: never served, and perhaps whole, so that it is left alone."""
    STRANGE = "strange"
    """Nothing that a store writes: neither read nor counted nor removed by it."""
    UNREADABLE = "unreadable"
    """The system would not show it."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record as a listing shows it: its content was not looked at.

    Attributes:
        namespace: name of its namespace in the store, which ends with the namespace's 16 digits.
        epoch: 16 hex digits.
        shard: name of the shard.
        address: 64 hex digits.
        place: where it is, below the store's own place.
        size_bytes: what it takes of the tier.
        used_at: Unix seconds of its last use, None where the tier does not know.
        generation: tells it from a later one in the same place.
    """

    namespace: str
    epoch: str
    shard: str
    address: str
    place: str
    size_bytes: int
    used_at: float | None
    generation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace of a store.

    Attributes:
        name: its name in the store.
        digits: the first 16 hex digits of its digest.
        fields: its description, empty where that is absent or damaged.
        epoch: the epoch that is published, ``""`` for none.
    """

    name: str
    digits: str
    fields: Mapping[str, Any] = field(repr=False)
    epoch: str

    @property
    def model(self) -> str:
        """The model's name, ``""`` where the description does not say it."""
        model = self.fields.get("model", "")
        return model if isinstance(model, str) else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at one place of a store.

    Attributes:
        kind: name of the damage or difference, ``""`` for OK. Kinds as in `kvstore.tiers.record`, and those of the
            tier.
        place: where, below the store's own place.
        record: what `TierTools.remove` takes; None where it is nothing that may be removed.
    """

    verdict: Verdict
    kind: str
    place: str
    detail: str = ""
    record: StoredRecord | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything about one record.

    Attributes:
        finding: the verdict.
        content_bytes: length of its bytes.
        namespace: what its place says that it belongs to; None for a file outside a store.
        header: the fields of its header page, empty where that can not be parsed.
        geometry: the description of its group in the namespace, empty where nothing describes it.
        checksum: of the payload as it is, in hex; ``""`` where it was not computed.
    """

    finding: Finding
    content_bytes: int
    namespace: StoredNamespace | None
    header: Mapping[str, str]
    geometry: Mapping[str, Any]
    checksum: str


class TierTools(ABC):
    """One store of a persistent tier, opened for people. One thread; every verb blocks for its I/O.

    Memory is bounded by what one directory or one batch of keys lists, never by what a file claims to be.

    Attributes:
        place: where the store is, for people, without secrets.
    """

    place: str

    @classmethod
    @abstractmethod
    def of(cls, settings: Any) -> Self:
        """Opens the store that the tier's settings name.

        Raises:
            TierUnavailable: there is no store, or none that can be read.
        """

    @classmethod
    @abstractmethod
    def at(cls, place: str) -> Self | None:
        """Opens the store at a place that a person wrote; None if this kind of tier has no such places.

        Raises:
            TierUnavailable: as `of`.
        """

    @classmethod
    def inspect_file(cls, path: str) -> Inspection | None:
        """Looks at one file, in a store or not; None for a tier that has no files.

        Raises:
            TierUnavailable: there is no such file, or it can not be read.
        """
        return None

    @abstractmethod
    def namespaces(self) -> list[StoredNamespace]:
        """The namespaces by name; also such as have no records.

        Raises:
            TierUnavailable: they can not be listed.
        """

    @abstractmethod
    def records(self, namespace: str = "") -> Iterator[StoredRecord | Finding]:
        """Every record, of all epochs and shards, and a `Finding` for whatever else is there.

        Args:
            namespace: name of the only namespace to list, ``""`` for all.
        """

    @abstractmethod
    def verify(self) -> Iterator[Finding]:
        """Reads every record whole: a finding for each, OK ones too, and for whatever else is there."""

    @abstractmethod
    def inspect(self, key: str, limit: int) -> list[Inspection]:
        """Looks at the records whose address begins with the hex digits ``key``, at the most ``limit`` of them.

        Raises:
            TierUnavailable: there is none, and a part of the store can not be read.
        """

    @abstractmethod
    def remove(self, record: StoredRecord, used_before: float | None = None) -> bool:
        """Removes a record that was listed, unless it is another one or gone by now; whether it did.

        Safe beside running engines: to them it is an eviction.

        Args:
            used_before: Unix seconds; a record that was used then or later, also since the listing, is kept.

        Raises:
            TierUnavailable: the system refuses; says why.
        """
