"""What the prober learns, as events that the scheduler's thread tells its planner.

Invariant: what was learnt in another generation or another epoch than the planner's changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.planner.planner import Planner


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier is open on the prober's side in the epoch that is published there, for the first time or in a new one."""

    generation: int
    tier: int
    epoch: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A piece of a tier's listing."""

    generation: int
    tier: int
    epoch: str
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's end: what was found where, and how many of the asked addresses from the first on.

    ``found`` is by tier and its epoch.
    """

    generation: int
    request_id: str
    first_chunk: int
    found: Mapping[tuple[int, str], tuple[bytes, ...]]
    present: int
    asked: int


Event = Opened | Listed | Answer


def take_events(events: Sequence[Event], planner: Planner, opened: Callable[[Opened], None]) -> None:
    """Tells the planner what was learnt, and ``opened`` which tiers opened, whose epochs it decides about."""
    epochs = planner.state.epochs
    for event in events:
        if isinstance(event, Opened):
            opened(event)
        elif event.generation != planner.state.generation:
            continue
        elif isinstance(event, Listed):
            if event.epoch == epochs[event.tier]:
                planner.learn(event.tier, event.addresses)
        else:
            for (tier, epoch), addresses in event.found.items():
                if epoch == epochs[tier]:
                    planner.learn(tier, addresses)
            track = planner.find(event.request_id)
            if track is not None and event.present < event.asked:
                planner.answer(track, event.first_chunk + event.present)
