"""From YAML text to `Config`, with every problem in one report: its line, its path, and the remedy.

Invariant: a configuration is either complete and checked or an error; nothing is ignored and there is no lenient mode.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvstore.config.fields import FROM_FILE
from kvstore.config.schema import (
    Config,
    IdentityConfig,
    LimitsConfig,
    PolicyConfig,
    SaveConfig,
    StatsConfig,
    TierConfig,
    TierKind,
)
from kvstore.config.tree import Tree, read_tree
from kvstore.errors import ConfigError

_SECTIONS: dict[str, type] = {
    "save": SaveConfig,
    "policy": PolicyConfig,
    "limits": LimitsConfig,
    "identity": IdentityConfig,
    "stats": StatsConfig,
}
_TOP = tuple(field.name for field in dataclasses.fields(Config))


def load(path: Path | None, types: Mapping[str, TierKind], environ: Mapping[str, str] = os.environ) -> Config:
    """The settings in the file ``path``; the defaults for None. Reads one file, blocks for that long.

    Args:
        path: a YAML file in UTF-8.
        types: the registered kinds of tiers by name.
        environ: where ``${VAR}`` is looked up.

    Raises:
        ConfigError: no such file, or any problem in it; all of them in one report.
    """
    if path is None:
        return parse("", types, environ=environ)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: the configuration file can not be read: {error.strerror}") from None
    return parse(text, types, origin=str(path), environ=environ)


def parse(
    text: str, types: Mapping[str, TierKind], origin: str = "configuration", environ: Mapping[str, str] = os.environ
) -> Config:
    """The settings in YAML ``text``; what it does not mention has its default, an empty text is all defaults.

    Raises:
        ConfigError: one line ``origin:LINE: path: problem`` for each problem.
    """
    tree = read_tree(text, origin, environ)
    if not isinstance(tree.value, dict | None):
        tree.blame("", f"the file must be a mapping such as chunk_tokens: 256, not a {_kind(tree.value)}")
    top = tree.value if isinstance(tree.value, dict) else {}
    known = _without_unknown(top, _TOP, "", tree, _places(types))
    values: dict[str, Any] = {key: value for key, value in known.items() if key not in _SECTIONS and key != "tiers"}
    for name, cls in _SECTIONS.items():
        values[name] = _section(cls, known.get(name), name, tree, _places(types))
    if "tiers" in known:
        values["tiers"] = _tiers(known["tiers"], types, tree)
    else:
        values["tiers"] = default_tiers(types)
    try:
        config = Config(**values)
    except ValidationError as error:
        _blame_all(error, Config, "", tree)
        config = Config()
    tree.report()
    return config


def default_tiers(types: Mapping[str, TierKind]) -> tuple[TierConfig, ...]:
    """The tiers of an empty configuration, fastest first, each with its default settings."""
    kinds = sorted((kind for kind in types.values() if kind.is_default), key=lambda kind: kind.order)
    return tuple(TierConfig(kind.name, kind.config()) for kind in kinds)


def _tiers(items: object, types: Mapping[str, TierKind], tree: Tree) -> tuple[TierConfig, ...]:
    if not isinstance(items, list):
        tree.blame("tiers", "write a list such as [{type: ...}], [] for no tiers, or remove the key for the defaults")
        return ()
    tiers: list[TierConfig] = []
    for index, item in enumerate(items):
        path = f"tiers[{index}]"
        if not isinstance(item, dict):
            tree.blame(path, f"a tier is a mapping such as {{type: {next(iter(types), '...')}}}")
            continue
        name = item.get("type")
        kind = types.get(name) if isinstance(name, str) else None
        if kind is None:
            problem = f"there is no tier {name!r}" if "type" in item else "it has no type"
            where = f"{path}.type" if "type" in item else path
            tree.blame(where, f"{problem}{_hint(str(name), types)}; known are {', '.join(types) or 'none'}")
            continue
        if any(tier.type == kind.name for tier in tiers):
            tree.blame(f"{path}.type", f"there is already a tier {kind.name}; each kind may be used once")
            continue
        keys = {key: value for key, value in item.items() if key != "type"}
        tiers.append(TierConfig(kind.name, _section(kind.config, keys, path, tree, _places(types))))
    return tuple(tiers)


def _section(cls: type, value: object, path: str, tree: Tree, places: Mapping[str, list[str]]) -> Any:
    """An instance of ``cls``; after problems, which go into the tree, one with the defaults."""
    if value is None:
        return cls()
    if not isinstance(value, dict):
        tree.blame(path, f"must be a mapping, not {_kind(value)}")
        return cls()
    known = _without_unknown(value, [field.name for field in dataclasses.fields(cls)], path, tree, places)
    try:
        # Through JSON: strict fields then take mappings and lists, but still no number for text or text for a number.
        return TypeAdapter(cls).validate_json(json.dumps(known), context=FROM_FILE)
    except ValidationError as error:
        _blame_all(error, cls, path, tree)
        return cls()


def _without_unknown(
    value: Mapping[str, Any], known: Iterable[str], path: str, tree: Tree, places: Mapping[str, list[str]]
) -> dict[str, Any]:
    names = list(known)
    for key in value:
        if key not in names:
            elsewhere = [place for place in places.get(key, []) if place != f"{path}.{key}"]
            hint = f"; it belongs to {' or '.join(elsewhere)}" if elsewhere else _hint(key, names)
            tree.blame(f"{path}.{key}" if path else key, f"unknown key{hint or '; known are ' + ', '.join(names)}")
    return {key: item for key, item in value.items() if key in names}


def _places(types: Mapping[str, TierKind]) -> dict[str, list[str]]:
    """Full paths of every key there is, by key, for those that were written at the wrong level."""
    places: dict[str, list[str]] = {name: [name] for name in _TOP}
    for section, cls in _SECTIONS.items():
        for field in dataclasses.fields(cls):
            places.setdefault(field.name, []).append(f"{section}.{field.name}")
    for kind in types.values():
        for field in dataclasses.fields(kind.config):
            places.setdefault(field.name, []).append(f"a tier of type {kind.name}")
    return places


def _hint(key: str, names: Iterable[str]) -> str:
    close = get_close_matches(key, list(names), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "mapping" if isinstance(value, dict) else repr(value)


def _blame_all(error: ValidationError, cls: type, path: str, tree: Tree) -> None:
    secrets = {field.name for field in dataclasses.fields(cls) if not field.repr}
    for problem in error.errors(include_url=False):
        where = path
        for part in problem["loc"]:
            where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
        shown = "" if secrets.intersection(map(str, problem["loc"])) else f", not {problem['input']!r}"
        tree.blame(where, _message(problem["type"], problem["msg"], problem.get("ctx", {}), shown))


def _message(kind: str, message: str, context: Mapping[str, Any], shown: str) -> str:
    if kind == "value_error":
        return str(context["error"])
    wanted = {
        "bool_type": "write true or false",
        "string_type": "write text, in quotes",
        "literal_error": f"write {context.get('expected')}",
        "greater_than": f"must be more than {context.get('gt')}",
        "missing": "is required",
    }.get(kind)
    if kind.startswith("int_"):
        wanted = "write a whole number such as 256"
    return f"{wanted or message}{shown}"
