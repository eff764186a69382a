"""The settings: one YAML file to a tree of frozen dataclasses, with every problem in one report."""

from kvstore.config.fields import STRICT, Duration, Fraction, Size, StorePath, store_path
from kvstore.config.load import default_tiers, load, parse
from kvstore.config.schema import (
    Config,
    IdentityConfig,
    LimitsConfig,
    PolicyConfig,
    SaveConfig,
    StatsConfig,
    TierConfig,
    TierKind,
    describe,
)

__all__ = [
    "STRICT",
    "Config",
    "Duration",
    "Fraction",
    "IdentityConfig",
    "LimitsConfig",
    "PolicyConfig",
    "SaveConfig",
    "Size",
    "StatsConfig",
    "StorePath",
    "TierConfig",
    "TierKind",
    "default_tiers",
    "describe",
    "load",
    "parse",
    "store_path",
]
