"""What an eviction policy is, and the registry of policies.

A policy orders the slots of a volatile tier. It never sees an address and never decides whether a slot may go: the
planner hides slots that are pinned. Work per call is amortised constant or logarithmic, also when nothing may go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import entry_points


class EvictionPolicy(ABC):
    """Order of eviction over slots ``0..count-1``. Made as ``Policy(count)``; used from one thread."""

    @abstractmethod
    def __init__(self, count: int) -> None: ...

    @abstractmethod
    def touch(self, slot: int, turn: int, position: int) -> None:
        """Marks ``slot`` as used in ``turn`` (rising) at ``position`` in its chain (0 is the head)."""

    @abstractmethod
    def show(self, slot: int) -> None:
        """Lets ``slot`` be a victim, at the age it has."""

    @abstractmethod
    def hide(self, slot: int) -> None:
        """Keeps ``slot`` from being a victim."""

    @abstractmethod
    def victim(self) -> int | None:
        """The slot to go next among those shown, None if there is none. Does not change the order."""


def policies() -> Mapping[str, type[EvictionPolicy]]:
    """All registered policies by name (entry points ``kvstore.policies``)."""
    return {point.name: point.load() for point in entry_points(group="kvstore.policies")}
