"""Every persistent tier of the registry keeps the promises of `TierSuite`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.metrics import Counters
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier, tier_types
from kvstore.units import MIB

PERSISTENT = sorted(name for name, kind in tier_types().items() if not kind.volatile)


def _disk(place: Path, writer: bool) -> Tier:
    kind = tier_types()["disk"]
    assert kind.make is not None
    return kind.make(kind.config(path=place / "store", capacity=256 * MIB, min_free=0.0), Counters(), writer)


MAKERS: dict[str, Callable[[Path, bool], Tier]] = {"disk": _disk}
"""How a test makes a client of each kind; a new tier joins by one line here."""


@pytest.mark.parametrize("kind", PERSISTENT, indirect=True)
class TestEveryTier(TierSuite):
    @pytest.fixture
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def place(self, kind: str, tmp_path: Path) -> tuple[str, Path]:
        return kind, tmp_path

    def make_client(self, place: tuple[str, Path], writer: bool = True) -> Tier:
        kind, path = place
        return MAKERS[kind](path, writer)
