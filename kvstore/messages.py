"""What the planner orders (`Plan`) and what an executor did (`Report`).

Both are frozen and pickle cheaply: operations travel as plain tuples, a column of them per kind, not as hundreds of
objects. Every operation has a **ticket**, a number that is never used twice; a report names tickets. The planner
counts reports per rank, so a report may arrive late, twice or out of order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Outcome(IntEnum):
    """How an operation on one chunk ended. A value, never an exception."""

    HIT = 0
    """Read and verified, or present."""
    STORED = 1
    """Written and published, or already there with equal content."""
    PENDING = 2
    """Not known yet; ask again."""
    MISS = 3
    """Not there."""
    DAMAGED = 4
    """There, and not what it claims to be."""
    UNAVAILABLE = 5
    """The tier could not be asked, or an operation on it failed."""
    FULL = 6
    """No room."""
    SKIPPED = 7
    """Not done, by choice: nothing was touched."""
    TIMEOUT = 8
    """The deadline passed first."""


OK_OUTCOMES = frozenset({Outcome.HIT, Outcome.STORED})

Save = tuple[int, int, bytes, int, tuple[int, ...]]
"""(ticket, slot, address, group, block ids): copy the blocks into the slot."""

Write = tuple[int, int, bytes, int, int]
"""(ticket, slot, address, group, tier): write the slot to a persistent tier, after a save into it in the same plan."""

Fetch = tuple[int, int, bytes, int, int]
"""(ticket, slot, address, group, tier): read a record from a persistent tier into the slot."""

Part = tuple[int, bytes, int, int, tuple[int, ...]]
"""(slot, address, fetch ticket or 0, first block within the chunk, block ids): blocks to fill from the slot."""

Load = tuple[int, str, int, tuple[Part, ...]]
"""(ticket, request id, group, parts): fill the blocks of one request; reports the parts that were delivered."""

Fail = tuple[int, str, tuple[int, ...]]
"""(ticket, request id, block ids): report this load as failed as a whole."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's orders, the same for every rank.

    Attributes:
        sequence: number of the plan, rising.
        generation: raised by each reset; operations of an older one are not started.
        epochs: the current epoch's name of each tier by tier index, ``""`` where there is none (yet).
        saves, writes, fetches, loads, fails: the operations, in the order in which they should be done.
        acks: for each rank the highest report sequence received, -1 for none.
    """

    sequence: int
    generation: int
    epochs: tuple[str, ...] = ()
    saves: tuple[Save, ...] = ()
    writes: tuple[Write, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    loads: tuple[Load, ...] = ()
    fails: tuple[Fail, ...] = ()
    acks: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.saves or self.writes or self.fetches or self.loads or self.fails)


Done = tuple[int, Outcome]
"""(ticket, outcome) of a save, write or fetch."""

Loaded = tuple[int, int, Outcome]
"""(ticket, parts delivered from the first on, outcome of the first part that was not) of a load."""

TierState = tuple[int, str, str]
"""(tier, namespace digest as hex or "" while closed, reason while closed) whenever it changes."""

Evicted = tuple[int, str, tuple[bytes, ...]]
"""(tier, epoch, addresses that the tier removed to make room)."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank did. Items are repeated until a plan acknowledges ``sequence``.

    Attributes:
        rank: index of the rank.
        sequence: number of this report, rising per rank.
        done, loaded: ended operations.
        evicted: what persistent tiers removed.
        tiers: changed states of tiers.
    """

    rank: int
    sequence: int
    done: tuple[Done, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    tiers: tuple[TierState, ...] = ()
