"""What a tier is, and the registry of tiers.

A persistent tier holds whole records (`kvstore.tiers.record`) by address, for one namespace and shard at a time. It
is synchronous and batched, never allocates a record-sized buffer of its own, and answers with outcomes: a condition
of the outside world (absent, damaged, full, slow, down) is a value. Its methods are called from the lanes of one
executor or from the prober, so they must be thread-safe; each ends by its ``deadline``.

A volatile tier (slots in memory) has no client: the planner owns its slots, an executor their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import RecordGeometry
from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.tiers.record_key import RecordKey
from kvstore.tiers.tools import TierTools


@dataclass(frozen=True, slots=True)
class Scope:
    """Which records a tier serves.

    ``geometries`` has one entry per group, in group order; all on the same shard. ``key`` authenticates the records,
    and its id is then in the namespace.
    """

    namespace: Namespace
    geometries: tuple[RecordGeometry, ...]
    key: RecordKey | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How a tier is now, for people: bytes allowed and used, and notes (``buffered``, ``read-only``).

    ``used_bytes`` and ``records`` are None while nobody has counted them.
    """

    capacity_bytes: int
    used_bytes: int | None
    records: int | None
    notes: tuple[str, ...] = ()


class Tier(ABC):
    """A persistent tier's client.

    Life: the constructor checks the settings against the machine (`ConfigError` at start); `attach` says which
    records; `use_epoch` under which name; then the verbs; `close` at the end, which is idempotent and bounded.
    """

    name: str

    @abstractmethod
    def attach(self, scope: Scope) -> None:
        """Opens the tier for one namespace and shard. Blocks; makes no directory or key on a read-only client.

        Raises:
            TierUnavailable: it cannot be reached now; may be tried again.
            ConfigError: it can never work like this.
        """

    @abstractmethod
    def published_epoch(self) -> str:
        """Name (16 hex digits) of the epoch that everyone uses, made if there is none yet. Blocks."""

    @abstractmethod
    def publish_epoch(self, epoch: str) -> None:
        """Makes everyone start anew: what `published_epoch` says from now on is not what it said before. Blocks.

        ``epoch`` (16 hex digits, random, never used before) unless somebody else published another one meanwhile.

        Raises:
            TierUnavailable: it could not be; what is published may be the old one still.
        """

    @abstractmethod
    def use_epoch(self, epoch: str) -> None:
        """Names the epoch that the verbs below work in from now on; a running verb stays in its own."""

    @abstractmethod
    def contains(self, addresses: Sequence[bytes], deadline: float) -> list[Outcome]:
        """HIT, MISS, UNAVAILABLE or TIMEOUT for each address. A promise of nothing: a read may still miss."""

    @abstractmethod
    def read(self, addresses: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
        """Reads and verifies whole records into ``buffers`` (each of ``slot_bytes``, 4096-aligned).

        HIT only if the buffer now holds exactly the record that was stored under the address; after any other
        outcome the buffer's content is undefined.
        """

    @abstractmethod
    def write(
        self,
        addresses: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        used_ns: Sequence[int] = (),
    ) -> list[Outcome]:
        """Publishes sealed records. STORED only when a reader can find the whole record; else nothing is left.

        ``used_ns`` says for each record when it was last used (nanoseconds since 1970), where the tier keeps such a
        time: for the chunk at a position of a chain the time at which its request came, less one for each position,
        so that the tail of a chain that is written piece by piece is older than its head. Without it the batch is
        taken for a chain that is used now.
        """

    @abstractmethod
    def delete(self, addresses: Sequence[bytes]) -> list[Outcome]:
        """Removes records: HIT where one was removed, MISS where there was none."""

    @abstractmethod
    def scan(self) -> Iterator[list[bytes]]:
        """Addresses of the current epoch in batches of no order. Not a snapshot; may be stopped at any batch."""

    @abstractmethod
    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks records as used, ``addresses`` in chain order: the head becomes the most recent."""

    @abstractmethod
    def take_evicted(self) -> list[tuple[str, tuple[bytes, ...]]]:
        """(epoch, addresses) that this client removed from its own namespace and shard since the last call."""

    @abstractmethod
    def status(self) -> TierStatus:
        """Cheap; from memory."""

    def collect(self, limit: int) -> int:
        """Removes up to ``limit`` records of epochs of this namespace that are neither published nor used by anyone.

        The number removed. Blocks; called again and again from a background thread of a writing client. A tier that
        forgets by itself has nothing to do.
        """
        return 0

    def measure(self) -> None:  # noqa: B027
        """Finds out what `status` has to say, where that takes a while. Blocks; called from a background thread."""

    @abstractmethod
    def close(self) -> None:
        """Releases everything. Idempotent; does not wait for the outside world."""


@dataclass(frozen=True, slots=True)
class TierType:
    """A kind of tier: what the registry holds.

    Attributes:
        name: the ``type`` in the YAML and the label in metrics.
        config: frozen dataclass of the tier's YAML keys; all have defaults.
        order: place in the lookup order of the defaults, fastest first.
        is_default: whether an empty configuration has one.
        volatile: slots in memory, owned by the planner.
        make: makes the client: ``make(config, counters, writer)``; None for a volatile tier. ``writer`` is False
            for the prober's client, which never changes the tier but for publishing an epoch and marking uses.
        capacity_bytes: the configured capacity, for the planner and for people.
        threads: I/O threads of the tier's lane in one executor.
        tools: what ``kvstore ls`` and its kin open a store with; None for a tier that keeps nothing between engines.
    """

    name: str
    config: type
    order: int
    is_default: bool
    volatile: bool
    capacity_bytes: Callable[[Any], int]
    make: Callable[[Any, Counters, bool], Tier] | None = None
    threads: int = 2
    tools: type[TierTools] | None = None


def tier_types() -> Mapping[str, TierType]:
    """All registered kinds by name, in lookup order (entry points ``kvstore.tiers``)."""
    found = [point.load() for point in entry_points(group="kvstore.tiers")]
    if not found:
        raise ConfigError("no tier is registered: the package is not installed; run pip install tiered-kvstore")
    return {t.name: t for t in sorted(found, key=lambda t: t.order)}
