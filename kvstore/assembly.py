"""Puts planner, executors and prober together from a configuration and a geometry.

The one place where a tier's settings become slots, clients and specs; the library engine and the engine connectors
use it alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from kvstore.config import Config, TierConfig
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import RecordGeometry, Shard
from kvstore.metrics import Counters
from kvstore.planner.planner import Planner, PlannerSpec, TierSpec
from kvstore.policies.base import policies
from kvstore.tiers.base import Scope, Tier, TierType, tier_types
from kvstore.tiers.record_key import key_fields, record_key
from kvstore.tiers.slots import SlotArena
from kvstore.transfer.executor import Executor, ExecutorSpec
from kvstore.transfer.prober import Prober
from kvstore.units import MIB, format_bytes

log = logging.getLogger(__name__)

STAGING_BYTES = 64 * MIB
"""Slot memory of an engine without a volatile tier, all ranks together; at least two slots a rank."""

_HINTS_WITHOUT_CAPACITY = 1_000_000


class _VolatileSettings(Protocol):
    pin: Literal["auto", "required", "off"]


class _PersistentSettings(Protocol):
    read_only: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """Who holds what.

    Attributes:
        shards: the shard index of each rank.
        shard_count: number of shards of the model.
        local_ranks: ranks on this machine; slot memory is divided by it.
    """

    shards: tuple[int, ...] = (0,)
    shard_count: int = 1
    local_ranks: int = 1

    @property
    def writers(self) -> int:
        """Bit mask of the ranks that write: the lowest of each shard."""
        first: dict[int, int] = {}
        for rank, shard in enumerate(self.shards):
            first.setdefault(shard, rank)
        return sum(1 << rank for rank in first.values())


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything about one engine's store that its processes must agree on."""

    config: Config
    tiers: tuple[TierConfig, ...]
    types: tuple[TierType, ...]
    geometry: RecordGeometry
    topology: Topology
    slots: int
    slot_tier: int

    def geometry_of(self, shard: int) -> RecordGeometry:
        """The geometry of a record of that shard."""
        return RecordGeometry(self.geometry.group, self.geometry.chunk_tokens, Shard(shard, self.topology.shard_count))

    def scope(self, namespace: Namespace, shard: int) -> Scope:
        """What the tiers of that shard serve."""
        return Scope(namespace, (self.geometry_of(shard),), record_key(self.config.identity.auth_key))

    def key_fields(self) -> Mapping[str, str]:
        """What the namespace of authenticated records says about their key; nothing without one."""
        return key_fields(self.config.identity.auth_key)

    def planner(self, counters: Counters) -> Planner:
        """The engine's planner."""
        record = self.geometry.slot_bytes
        specs = []
        for tier, kind in zip(self.tiers, self.types, strict=True):
            capacity = kind.capacity_bytes(tier.settings)
            hints = capacity // record * 5 // 4 + 1024 if capacity else _HINTS_WITHOUT_CAPACITY
            is_writable = kind.volatile or not cast(_PersistentSettings, tier.settings).read_only
            specs.append(TierSpec(kind.name, kind.volatile, 0 if kind.volatile else hints, is_writable))
        limits = self.config.limits
        spec = PlannerSpec(
            chunk_tokens=self.geometry.chunk_tokens,
            block_tokens=self.geometry.group.block_tokens,
            slots=self.slots,
            tiers=tuple(specs),
            ranks=len(self.topology.shards),
            writers=self.topology.writers,
            probe_timeout=limits.probe_timeout,
            load_timeout=limits.load_timeout,
        )
        return Planner(spec, policies()[self.config.policy.evict](self.slots), counters)

    def arena(self) -> SlotArena:
        """One rank's slot memory."""
        pin: Literal["auto", "required", "off"] = "auto"
        if self.slot_tier >= 0:
            pin = cast(_VolatileSettings, self.tiers[self.slot_tier].settings).pin
        return SlotArena(self.geometry.slot_bytes, self.slots, pin=pin)

    def clients(self, counters: Counters, *, writer: bool) -> list[Tier | None]:
        """A client of each persistent tier at its index, None at a volatile one's."""
        return [
            None if kind.make is None else kind.make(tier.settings, counters, writer)
            for tier, kind in zip(self.tiers, self.types, strict=True)
        ]

    def executor(self, rank: int, arena: SlotArena, counters: Counters, cpus: Set[int] | None = None) -> Executor:
        """The executor of one rank. Raises ConfigError for a tier that can not work on this machine."""
        spec = ExecutorSpec(
            rank=rank,
            is_writer=bool(self.topology.writers >> rank & 1),
            geometries=(self.geometry_of(self.topology.shards[rank]),),
            write_limit=max(1, self.slots // 4) if self.slot_tier >= 0 else self.slots,
            load_timeout=self.config.limits.load_timeout,
            lane_threads=max([kind.threads for kind in self.types if not kind.volatile], default=1),
        )
        return Executor(spec, arena, self.clients(counters, writer=True), counters, cpus=cpus)

    def prober(
        self, counters: Counters, namespace: Callable[[], Namespace], tick: Callable[[], None] = lambda: None
    ) -> Prober:
        """The engine's prober; ``namespace`` is called on its thread."""
        shards = range(self.topology.shard_count)
        made = [self.clients(counters, writer=False) for _shard in shards]
        clients: Mapping[int, Sequence[Tier]] = {
            index: [cast(Tier, clients[index]) for clients in made]
            for index, kind in enumerate(self.types)
            if not kind.volatile
        }

        def scopes() -> Sequence[Scope]:
            found = namespace()
            return [self.scope(found, shard) for shard in shards]

        return Prober(clients, scopes, tick, self.config.stats.every)


def blueprint(config: Config, geometry: RecordGeometry, topology: Topology | None = None) -> Blueprint:
    """Works out slots and tiers.

    Raises:
        ConfigError: a volatile tier that is too small for one record.
    """
    topology = topology or Topology()
    types = tier_types()
    used = [(t, types[t.type]) for t in config.tiers if types[t.type].capacity_bytes(t.settings) > 0]
    record = geometry.slot_bytes
    slot_tier = next((index for index, (_tier, kind) in enumerate(used) if kind.volatile), -1)
    if slot_tier >= 0:
        tier, kind = used[slot_tier]
        capacity = kind.capacity_bytes(tier.settings)
        slots = capacity // (record * topology.local_ranks)
        if slots < 1:
            raise ConfigError(
                f"tiers: {kind.name}: capacity: {format_bytes(capacity)} over {topology.local_ranks} rank(s) is less "
                f"than one record of {format_bytes(record)} ({geometry.chunk_tokens} tokens); set at least "
                f"{format_bytes(record * topology.local_ranks * 8)}, or 0 to switch the tier off"
            )
    else:
        slots = max(2, STAGING_BYTES // (record * topology.local_ranks)) if used else 1
    if not used:
        log.warning("store.no_tiers nothing will be cached because no tier is configured (tiers: [] or all sizes 0)")
    return Blueprint(
        config, tuple(t for t, _k in used), tuple(k for _t, k in used), geometry, topology, slots, slot_tier
    )
