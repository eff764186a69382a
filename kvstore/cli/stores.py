"""Which stores a command works on: the one that is named, or those of the tiers in a configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, TierUnavailable

if TYPE_CHECKING:
    from kvstore.tiers.tools import TierTools

OK, DAMAGE, MISSING = 0, 1, 2
"""Exit statuses: all is well; damage was found; there is no such store or record, or the usage is wrong."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store and the name of the kind of tier that it belongs to."""

    tier: str
    tools: TierTools


def add_place(parser: argparse.ArgumentParser, option: str = "path") -> None:
    """Adds where the store is, and ``--json``.

    Args:
        option: ``path`` for a positional PATH, else the name of an option.
    """
    where = parser.add_mutually_exclusive_group()
    about = "the store; without it those of the tiers in the configuration"
    if option == "path":
        where.add_argument("path", nargs="?", metavar="PATH", help=about)
    else:
        where.add_argument(option, dest="path", metavar="PATH", help=about)
    where.add_argument("--config", type=Path, metavar="FILE", help="the engine's YAML file (default: its defaults)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def open_stores(path: str | None, config: Path | None, tier: str | None = None) -> tuple[list[OpenStore], int]:
    """Opens the stores; one that is missing is named on the standard error and left out.

    Args:
        path: the place of the only one, None for those in the configuration.
        config: the configuration file, None for the defaults.
        tier: the only kind of tier, None for all.

    Returns:
        The stores, and `OK` or, if one is missing, `MISSING`.

    Raises:
        ConfigError: no tier of that kind, or none that keeps anything.
    """
    from kvstore.config import load
    from kvstore.tiers.base import tier_types

    types = tier_types()
    kinds = {name: kind.tools for name, kind in types.items() if kind.tools is not None}
    if tier is not None and tier not in types:
        raise ConfigError(f"there is no tier {tier!r}; known are {', '.join(types)}")
    if tier is not None and tier not in kinds:
        raise ConfigError(f"tier {tier} keeps nothing without its engine; choose one of {', '.join(kinds)}")
    wanted: list[tuple[str, Callable[[Any], TierTools | None], Any]]
    if path is not None:
        wanted = [(name, tools.at, path) for name, tools in kinds.items() if tier in (None, name)]
    else:
        settings = load(config, types)
        wanted = [(t.type, kinds[t.type].of, t.settings) for t in settings.tiers if t.type in kinds]
        wanted = [item for item in wanted if tier in (None, item[0])]
        if not wanted:
            raise ConfigError(f"the configuration has no tier {tier or 'that keeps a store'}; name the store's path")
    return _open_all(wanted, path)


def _open_all(
    wanted: Sequence[tuple[str, Callable[[Any], TierTools | None], Any]], path: str | None
) -> tuple[list[OpenStore], int]:
    stores, status = [], OK
    for name, opener, place in wanted:
        try:
            tools = opener(place)
        except TierUnavailable as error:
            print(f"kvstore: {error}", file=sys.stderr)
            status = MISSING
            continue
        if tools is not None:
            stores.append(OpenStore(name, tools))
    if not stores and status == OK:
        raise ConfigError(f"{path}: none of these tiers keeps a store in such a place: {[w[0] for w in wanted]}")
    return stores, status
