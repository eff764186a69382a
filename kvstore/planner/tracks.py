"""What the planner remembers of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.messages import Part


@dataclass(frozen=True, slots=True)
class Match:
    """Answer to a lookup.

    Attributes:
        tokens: tokens beyond the local ones that can be delivered, a multiple of the block; None for "ask later".
        tiers: for each chunk of the promise the index of the tier that has it.
        reason: why the match ends where it ends, a value of ``miss_tokens_total``'s label.
        probe: addresses that nobody has looked for; the first of them ends the match.
    """

    tokens: int | None
    tiers: tuple[int, ...] = ()
    reason: str = ""
    probe: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Track:
    """One live request.

    Attributes:
        turn: its place in the order of recency.
        save_cursor, write_cursor: chunks below were saved (or found stored), and offered to every lower tier.
        barred: nothing of it may be saved any more (its KV predates a reset, or its identity is not known).
        refused_from: first chunk that could not be delivered: a miss for this request for good.
        absent_from: first chunk that a probe did not find.
        wait_until, wait_plans: when "ask me later" ends (None before the first), and the plan before which reports
            that were there by then have not arrived.
        gave_up: whether it ended without an answer.
        verdict, verdict_key: the last answer and what it depended on; None when it must be worked out anew.
        answered: the last answer other than "ask me later", for the accounts.
        leased, lease_until: slots that a promise holds until it is committed.
        no_slot_at: chunk that was last counted as having found no slot.
        is_counted: whether it is in the accounts.
    """

    request_id: str
    turn: int
    save_cursor: int = 0
    write_cursor: int = 0
    barred: bool = False
    refused_from: int | None = None
    absent_from: int | None = None
    wait_until: float | None = None
    wait_plans: int = 0
    gave_up: bool = False
    probe_asked: bool = False
    verdict: Match | None = None
    answered: Match | None = None
    verdict_key: tuple[int, int, int] = (-1, -1, -1)
    leased: list[int] = field(default_factory=list)
    lease_until: float = 0.0
    no_slot_at: int = -1
    is_counted: bool = False


@dataclass(slots=True)
class SaveTicket:
    """An ordered copy of blocks into a slot."""

    address: bytes
    slot: int
    generation: int
    waiting: int
    outcome: int


@dataclass(slots=True)
class FetchTicket:
    """An ordered read of a tier into a slot; ``epoch`` is the one of the plan that it was sent in, "" before."""

    address: bytes
    slot: int
    generation: int
    tier: int
    waiting: int
    outcome: int
    epoch: str = ""


@dataclass(slots=True)
class WriteTicket:
    """An ordered write of a slot to a tier; only the writing ranks answer. ``epoch`` as of a `FetchTicket`."""

    address: bytes
    slot: int
    generation: int
    tier: int
    waiting: int
    outcome: int
    epoch: str = ""


@dataclass(slots=True)
class LoadTicket:
    """An ordered copy of slots into a request's blocks.

    ``tokens`` and ``tiers`` have one entry a part; ``lost_tokens`` are those that could not be planned.
    """

    request_id: str
    first_chunk: int
    parts: tuple[Part, ...]
    lost: tuple[int, ...]
    tokens: tuple[int, ...]
    tiers: tuple[int, ...]
    lost_tokens: int
    waiting: int
    delivered: int
    outcome: int
