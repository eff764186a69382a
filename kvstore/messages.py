"""What the planner orders (`Plan`) and what an executor did (`Report`).

Both are frozen and pickle cheaply: operations travel as plain tuples, a column of them per kind, not as hundreds of
objects. Every operation has a **ticket**, a number that is never used twice; a report names tickets. The planner
counts completions per rank, so a report may arrive late, twice, out of order, or not at all if a later one does.
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

Write = tuple[int, int, bytes, int, int, int, int]
"""(ticket, slot, address, group, tier, turn, position): write the slot to a persistent tier, after a save into it in
the same plan. Turn (rising with each request) and position in the chain say how recently it was used."""

Fetch = tuple[int, int, bytes, int, int]
"""(ticket, slot, address, group, tier): read a record from a persistent tier into the slot."""

Part = tuple[int, bytes, int, int, tuple[int, ...]]
"""(slot, address, fetch ticket or 0, first block within the chunk, block ids): blocks to fill from the slot."""

Load = tuple[int, str, int, tuple[Part, ...], tuple[int, ...]]
"""(ticket, request id, group, parts, lost blocks): fill the blocks of one request from its parts, in order.

The lost blocks could not be planned and come after those of the parts; they are reported invalid in any case. A load
without parts reports a failure and nothing else.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's orders, the same for every rank.

    Attributes:
        sequence: number of the plan, rising.
        generation: raised by each reset; operations of an older one are not started.
        epochs: the current epoch's name of each tier by tier index, ``""`` where there is none (yet).
        saves, writes, fetches, loads: the operations, in the order in which they should be done.
        acks: for each rank the highest batch sequence received, -1 for none.
    """

    sequence: int
    generation: int
    epochs: tuple[str, ...] = ()
    saves: tuple[Save, ...] = ()
    writes: tuple[Write, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    loads: tuple[Load, ...] = ()
    acks: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.saves or self.writes or self.fetches or self.loads)


Done = tuple[int, Outcome]
"""(ticket, outcome) of a save, write or fetch."""

Loaded = tuple[int, int, Outcome]
"""(ticket, parts delivered from the first on, outcome of the first part that was not) of a load."""

TierState = tuple[int, str, str]
"""(tier, namespace digest as hex or "" while closed, reason while closed) whenever it changes."""

Evicted = tuple[int, str, tuple[bytes, ...]]
"""(tier, epoch, addresses that the tier removed to make room)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What ended on one rank between two of its reports.

    Attributes:
        sequence: number of the batch, rising by one per rank.
        done, loaded: ended operations.
        evicted: what persistent tiers removed.
        tiers: changed states of tiers.
    """

    sequence: int
    done: tuple[Done, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    tiers: tuple[TierState, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank did: every batch that no plan has acknowledged yet, oldest first.

    A batch may thus arrive more than once; the planner takes each only once, by its sequence.
    """

    rank: int
    batches: tuple[Batch, ...]
