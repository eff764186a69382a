"""Start-up of both sides: configuration, refusals, blueprint. Every problem is one clear error before any request."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connectors.vllm import adapt
from kvstore.assembly import Blueprint, blueprint
from kvstore.config import Config, describe, load
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.keys import Namespace
from kvstore.layout import RecordGeometry
from kvstore.snapshots import SnapshotWriter, collect_garbage, resolve_dir
from kvstore.tiers.base import tier_types

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm.kvstore")
"""Below vLLM's own logger, so that its handlers and level serve us too."""

EXTRA_CONFIG_KEYS = ("config",)


@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides know before the first request.

    Attributes:
        config, blueprint: the store.
        fields: the namespace without the weights digest.
        saves, loads: what the role allows.
        instance: name of this engine in snapshots.
        model: for people.
    """

    config: Config
    blueprint: Blueprint
    fields: dict[str, Any]
    saves: bool
    loads: bool
    instance: str
    model: str

    @property
    def identity(self) -> str:
        """Digest of the namespace without the weights."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()

    def namespace(self, weights: str) -> Namespace:
        """The whole namespace."""
        return Namespace({**self.fields, "weights_digest": weights})

    @property
    def has_persistent(self) -> bool:
        """Whether there is a tier that outlives the engine."""
        return any(not kind.volatile for kind in self.blueprint.types)

    def snapshot_writer(self, role: str) -> SnapshotWriter | None:
        """Where this process publishes its part of ``kvstore stats``; None for nowhere."""
        directory = resolve_dir(self.config.stats.snapshot_dir, self.config.local_root)
        if directory is None:
            return None
        collect_garbage(directory)
        return SnapshotWriter(directory, self.instance, role)


def read_settings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Settings:
    """Reads and checks everything.

    Raises:
        ConfigError: with every problem that was found, each with its key and remedy.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kv_transfer_config: missing")
    extra = dict(transfer.kv_connector_extra_config)
    problems = [_unknown(key) for key in extra if key not in EXTRA_CONFIG_KEYS]
    path = extra.get("config")
    config = load(Path(path) if path is not None else None, tier_types())
    kinds = [tier_types()[tier.type] for tier in config.tiers]
    problems += adapt.refusals(vllm_config, kv_cache_config, has_persistent=any(not kind.volatile for kind in kinds))
    if problems:
        raise ConfigError([f"KVStoreConnector: {problem}" for problem in problems])
    try:
        group = adapt.group_geometry(vllm_config, kv_cache_config)
        geometry = RecordGeometry(group, config.chunk_tokens)
    except LayoutMismatch as error:
        raise ConfigError(f"KVStoreConnector: {error}") from None
    plan = blueprint(config, geometry, adapt.topology(vllm_config, kv_cache_config))
    fields = adapt.namespace_fields(vllm_config, kv_cache_config, group, config.chunk_tokens)
    return Settings(
        config=config,
        blueprint=plan,
        fields={**fields, **plan.key_fields()},
        saves=bool(transfer.is_kv_producer),
        loads=bool(transfer.is_kv_consumer),
        instance=adapt.instance_name(vllm_config),
        model=Path(str(vllm_config.model_config.model)).name,
    )


def log_start(settings: Settings) -> None:
    """The one line about the resolved configuration."""
    plan, record = settings.blueprint, settings.blueprint.geometry.slot_bytes
    ranks = len(plan.topology.shards)
    log.info(
        "kvstore.start config=%s chunk_tokens=%d record_bytes=%d slots=%d slot_bytes_total=%d slot_bytes_per_rank=%d",
        json.dumps(describe(settings.config)),
        plan.geometry.chunk_tokens,
        record,
        plan.slots,
        plan.slots * record * ranks,
        plan.slots * record,
    )
    only_private = settings.loads and not settings.saves and not settings.has_persistent
    if only_private:
        log.warning("kvstore.useless nothing will be cached because kv_role is kv_consumer and no tier is shared")


def digest_cache() -> Path:
    """Where digests of weight files are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base) / "kvstore-digests"


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, EXTRA_CONFIG_KEYS, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(EXTRA_CONFIG_KEYS)}"
    return f"kv_connector_extra_config.{key}: unknown key{hint}"
