"""The tree of settings, and how to show it.

Invariant: every dataclass here is frozen and complete: a value that exists has been checked. Tiers bring their own
settings, so this tree knows no tier by name.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from kvstore.config.fields import STRICT, Duration, IsPath, Unit, store_path
from kvstore.units import format_bytes, format_seconds

_T = TypeVar("_T")

AUTO = "auto"
OFF = "off"
MIN_SECRET = 16
"""Characters of a key at least."""


class TierKind(Protocol):
    """What this package needs of a registered kind of tier (`kvstore.tiers.base.TierType`)."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> type: ...
    @property
    def order(self) -> int: ...
    @property
    def is_default(self) -> bool: ...


def _only(available: object, refusal: str) -> AfterValidator:
    """Refuses every value but one: the others are designed and not built yet."""

    def check(value: _T) -> _T:
        if value != available:
            raise ValueError(refusal)
        return value

    return AfterValidator(check)


def _registered_policy(name: str) -> str:
    known = sorted(entry_points(group="kvstore.policies").names)
    if name not in known:
        raise ValueError(f"{name!r} is not a policy; known are {', '.join(known) or 'none: the package is broken'}")
    return name


def _secret(text: str | None) -> str | None:
    # No message here may show the value.
    if text is not None and text != text.strip():
        raise ValueError("the key begins or ends with white space; remove it, or other engines have another key")
    if text is not None and len(text) < MIN_SECRET:
        raise ValueError(
            f"a key of {len(text)} characters can be guessed; write at least {MIN_SECRET} random ones, such as "
            "${KV_AUTH_KEY} made by openssl rand -hex 32"
        )
    return text


def _snapshot_dir(value: object) -> object:
    return value if value in (AUTO, OFF) else str(store_path(value))


@dataclass(frozen=True, slots=True, config=STRICT)
class SaveConfig:
    """What is saved: tokens that were generated (``decode``), chunks that are not full (``partial_tail``)."""

    decode: bool = False
    partial_tail: Annotated[bool, _only(False, "true is not available yet; write false")] = False


@dataclass(frozen=True, slots=True, config=STRICT)
class PolicyConfig:
    """Which chunk leaves a tier that the planner owns when it is full: the name of a registered policy."""

    evict: Annotated[str, AfterValidator(_registered_policy)] = "lru"


@dataclass(frozen=True, slots=True, config=STRICT)
class LimitsConfig:
    """Deadlines of whole operations, in seconds: of asking the tiers, and of a load."""

    probe_timeout: Duration = 0.020
    load_timeout: Annotated[Duration, Field(gt=0)] = 5.0


@dataclass(frozen=True, slots=True, config=ConfigDict(**STRICT, hide_input_in_errors=True))
class IdentityConfig:
    """What enters the identity of the stored bytes, and what a reset of the engine's cache does.

    ``auth_key`` is a secret that authenticates records: without it nobody can make one that is served.
    """

    weights_digest: Literal["full", "sampled"] = "full"
    auth_key: Annotated[str | None, AfterValidator(_secret)] = dataclasses.field(default=None, repr=False)
    on_reset: Literal["detach", "drop"] = "detach"


@dataclass(frozen=True, slots=True, config=STRICT)
class StatsConfig:
    """Where snapshots for ``kvstore stats`` go (``auto``, ``off``, or a directory), and how often, in seconds."""

    snapshot_dir: Annotated[str, BeforeValidator(_snapshot_dir)] = AUTO
    every: Annotated[Duration, Field(gt=0)] = 1.0


@dataclass(frozen=True, slots=True, config=STRICT)
class TierConfig:
    """One entry of ``tiers``: the name of a registered kind, and its settings (the kind's ``config`` class)."""

    type: str
    settings: Any


@dataclass(frozen=True, slots=True, config=STRICT)
class Config:
    """All settings of a store.

    A direct construction with a wrong value raises pydantic's ``ValidationError``; the loader turns all of them into
    one `ConfigError`.

    Attributes:
        chunk_tokens: tokens in a chunk, a multiple of the engine's block.
        tiers: in lookup order, fastest first, each kind at most once.
    """

    chunk_tokens: Annotated[int, Field(gt=0)] = 256
    save: SaveConfig = SaveConfig()
    tiers: tuple[TierConfig, ...] = ()
    policy: PolicyConfig = PolicyConfig()
    limits: LimitsConfig = LimitsConfig()
    identity: IdentityConfig = IdentityConfig()
    stats: StatsConfig = StatsConfig()

    def settings_of(self, type_name: str) -> Any | None:
        """The settings of the tier of that kind; None if there is no such tier."""
        return next((tier.settings for tier in self.tiers if tier.type == type_name), None)

    @property
    def local_root(self) -> Path | None:
        """The directory of the first tier that keeps records in a local directory; None if none does."""
        for tier in self.tiers:
            for field in dataclasses.fields(tier.settings):
                if _marker(type(tier.settings), field.name, IsPath) is not None:
                    return Path(getattr(tier.settings, field.name))
        return None


def _marker(cls: type, field: str, kind: type[_T]) -> _T | None:
    annotation = get_type_hints(cls, include_extras=True)[field]
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def describe(config: Config) -> dict[str, Any]:
    """The resolved settings as JSON-able values for people: quantities with units, absolute paths, secrets masked.

    A field with ``repr=False`` is a secret: ``***`` where it has a value.
    """
    shown = {field.name: _shown(config, field) for field in dataclasses.fields(config)}
    shown["tiers"] = [{"type": tier.type, **_fields(tier.settings)} for tier in config.tiers]
    return shown


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _shown(value, field) for field in dataclasses.fields(value)}


def _shown(owner: Any, field: dataclasses.Field[Any]) -> Any:
    value = getattr(owner, field.name)
    if not field.repr:
        return None if value is None else "***"
    if dataclasses.is_dataclass(value):
        return _fields(value)
    unit = _marker(type(owner), field.name, Unit)
    if unit is not None:
        return _with_unit(value, unit.name)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value)


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{format_bytes(value)} ({value})"
    return format_seconds(value) if unit == "seconds" else f"{100 * value:g} %"
