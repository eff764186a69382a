"""What lookup, orders and planner share: the catalog, the slots, and which tiers can be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import ContractError
from kvstore.metrics import Counters
from kvstore.planner.accounts import Accounts
from kvstore.planner.catalog import MAX_TIERS, Catalog
from kvstore.planner.slot_table import SlotTable
from kvstore.planner.tracks import Track
from kvstore.policies.base import EvictionPolicy


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier as the planner sees it. ``max_hints`` bounds what it remembers of a persistent tier."""

    name: str
    is_volatile: bool
    max_hints: int = 0
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class PlannerSpec:
    """What a planner is made for.

    Attributes:
        chunk_tokens, block_tokens: sizes in tokens.
        slots: number of slots (of the volatile tier, or of the staging arena where there is none).
        tiers: in lookup order; an index into it names a tier everywhere.
        ranks: number of worker ranks.
        writers: ranks that write persistent tiers (the lowest of each shard), as a bit mask.
        probe_timeout, load_timeout: seconds.
    """

    chunk_tokens: int
    block_tokens: int
    slots: int
    tiers: tuple[TierSpec, ...]
    ranks: int = 1
    writers: int = 1
    probe_timeout: float = 0.02
    load_timeout: float = 5.0

    @property
    def all_ranks(self) -> int:
        """Bit mask of all ranks."""
        return (1 << self.ranks) - 1


class State:
    """Owned by one `Planner`; used from one thread."""

    def __init__(self, spec: PlannerSpec, policy: EvictionPolicy, counters: Counters) -> None:
        if len(spec.tiers) > MAX_TIERS:
            raise ContractError(f"at most {MAX_TIERS} tiers")
        volatile = [index for index, tier in enumerate(spec.tiers) if tier.is_volatile]
        self.spec = spec
        self.counters = counters
        self.slot_tier = volatile[0] if volatile else -1
        """Index of the tier that the slots are, -1 for a staging arena, which is never looked up."""
        self.persistent = tuple(i for i, tier in enumerate(spec.tiers) if not tier.is_volatile)
        self.catalog = Catalog(tier.max_hints for tier in spec.tiers)
        self.slots = SlotTable(spec.slots, policy, is_lookup_tier=bool(volatile))
        self.accounts = Accounts(spec.chunk_tokens, [t.name for t in spec.tiers], self.slot_tier, counters)
        self.generation = 0
        self.plans = 0
        """Plans made so far."""
        self.epochs = [""] * len(spec.tiers)
        self.fetching: dict[bytes, int] = {}
        """Ticket of the fetch that is on its way to an address, of this generation."""
        self.writing: dict[tuple[bytes, int], int] = {}
        """Ticket of the write of (address, tier) that is on its way, of this generation."""
        self._open_as: list[dict[int, str]] = [{} for _tier in spec.tiers]
        self.namespace = ""
        """Hex digest of the namespace that every rank must have a tier open for; "" while it is not known."""
        self.readable = 0
        """Bit mask of the persistent tiers that every rank has open and whose epoch is known."""
        self.writable = 0

    def set_open(self, tier: int, rank: int, namespace: str) -> None:
        """A rank has the tier open for that namespace (hex digest), or not any more ("")."""
        self._open_as[tier][rank] = namespace
        self.refresh()

    def refresh(self) -> None:
        """Works out ``readable`` and ``writable`` anew."""
        self.readable = self.writable = 0
        for tier in self.persistent:
            ranks = self._open_as[tier].values()
            agreed = bool(self.namespace) and all(name == self.namespace for name in ranks)
            if agreed and len(ranks) == self.spec.ranks and self.epochs[tier]:
                self.readable |= 1 << tier
                self.writable |= int(self.spec.tiers[tier].is_writable) << tier
        self.catalog.generation += 1

    def take(self, *, steal: bool, keep_turn: int | None = None) -> int | None:
        """A slot to fill, evicting what it held; None if there is none. See `SlotTable.take`."""
        taken = self.slots.take(steal=steal, keep_turn=keep_turn)
        if taken is None:
            return None
        slot, lost = taken
        if lost is not None:
            self.catalog.clear_slot(lost)
            self.accounts.evicted()
        return slot

    def release(self, slot: int, *, write: bool = False) -> None:
        """Undoes one pin of a slot."""
        self.slots.unpin(slot, write=write)
        self.drain_dropped()

    def drain_dropped(self) -> None:
        """Forgets the addresses that staging slots stopped holding."""
        while self.slots.dropped:
            self.catalog.clear_slot(self.slots.dropped.pop())

    def touch_chain(self, track: Track, addresses: Sequence[bytes], count: int) -> None:
        """Marks the slots of the first ``count`` chunks of a request as used."""
        slot_of, touch = self.catalog.slot, self.slots.touch
        for index, address in enumerate(addresses[:count]):
            slot = slot_of(address)
            if slot >= 0:
                touch(slot, track.turn, index)


def first_tier(mask: int) -> int:
    """Index of the first tier, in lookup order, of a non-empty mask."""
    return (mask & -mask).bit_length() - 1
