"""Who owns each slot: state, pins, and which may be given out.

States of a slot: FREE, FILLING (a save or a fetch was ordered), READY (holds its address), EMPTY (holds nothing of
use, but something may still read or write it). A slot is given out again only with no pin at all, with one
exception: a READY slot whose only pins are lower writes may be *stolen* for a save, since their reports may just not
have arrived; the executor, which knows, does the save or answers SKIPPED.

A save never displaces a chunk that its own request used: in a chain longer than the tier the tail would otherwise
push out the head, step by step, and leave a hole that ends every lookup.

Invariants (`check`): pins = fills + lower writes + loads + leases >= 0; a victim is READY and unpinned.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from kvstore.errors import ContractError
from kvstore.policies.base import EvictionPolicy


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    FILLING = 1
    READY = 2
    EMPTY = 3


class SlotTable:
    """The slots of the fastest volatile tier, or of the staging arena. Used from one thread."""

    __slots__ = (
        "_free",
        "_policy",
        "_shown",
        "_stealable",
        "_steals",
        "address",
        "count",
        "dropped",
        "evictable",
        "is_lookup_tier",
        "pins",
        "state",
        "turns",
        "writes",
        "writing",
    )

    def __init__(self, count: int, policy: EvictionPolicy, is_lookup_tier: bool) -> None:
        self.count = count
        self.is_lookup_tier = is_lookup_tier
        self.address: list[bytes | None] = [None] * count
        self.state = bytearray(count)
        self.pins = array("i", bytes(4 * count))
        self.writes = array("i", bytes(4 * count))
        self.turns = array("q", bytes(8 * count))
        """Turn of the last request that used what the slot holds, 0 for none."""
        self.writing = 0
        """Number of slots that lower writes pin."""
        self.dropped: list[bytes] = []
        """Addresses that a staging slot stopped holding; the planner takes them after each release."""
        self.evictable = 0
        """Number of READY slots without pins."""
        self._shown = bytearray(count)
        self._policy = policy
        self._stealable = bytearray(count)
        # The same order for what may be stolen: in order of their writes, which go head first, heads would go first.
        self._steals = type(policy)(count)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of FREE slots."""
        return len(self._free)

    @property
    def ready(self) -> int:
        """Number of READY slots. O(slots)."""
        return self.state.count(SlotState.READY)

    def take(self, *, steal: bool, keep_turn: int | None = None) -> tuple[int, bytes | None] | None:
        """A slot to fill and the address that it loses, or None if none may be given out.

        The slot is FILLING and has one pin. Cost: amortised O(log slots), also when the answer is None.

        Args:
            steal: whether a slot that only lower writes pin will do.
            keep_turn: what the request of this turn used last is no victim.
        """
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._policy.victim() if self.evictable else None
            if steal and (victim is None or self.turns[victim] == keep_turn):
                victim = self._steals.victim()
            if victim is None or self.turns[victim] == keep_turn:
                return None
            slot = victim
        lost = self.address[slot]
        self.state[slot] = SlotState.FILLING
        self.address[slot] = None
        self.turns[slot] = 0
        self.pins[slot] += 1
        self._settle(slot)
        return slot, lost

    def touch(self, slot: int, turn: int, position: int) -> None:
        """Marks the slot as used, unless a newer request used it already."""
        if turn >= self.turns[slot]:
            self.turns[slot] = turn
            self._policy.touch(slot, turn, position)
            self._steals.touch(slot, turn, position)

    def pin(self, slot: int, *, write: bool = False) -> None:
        """Keeps the slot from being given out."""
        self.pins[slot] += 1
        if write:
            self.writing += not self.writes[slot]
            self.writes[slot] += 1
        self._settle(slot)

    def unpin(self, slot: int, *, write: bool = False) -> None:
        """Undoes one `pin`; an EMPTY slot without pins becomes FREE.

        Raises:
            ContractError: there was no such pin.
        """
        self.pins[slot] -= 1
        if write:
            self.writes[slot] -= 1
            self.writing -= not self.writes[slot]
        if self.pins[slot] < 0 or self.writes[slot] < 0:
            raise ContractError(f"slot {slot} was released twice")
        self._settle(slot)

    def filled(self, slot: int, address: bytes) -> None:
        """Ends the fill with success: the slot is READY and its fill pin gone."""
        self.state[slot] = SlotState.READY
        self.address[slot] = address
        self.unpin(slot)

    def emptied(self, slot: int) -> None:
        """Ends the fill without success."""
        self.state[slot] = SlotState.EMPTY
        self.address[slot] = None
        self.unpin(slot)

    def discard(self, slot: int) -> None:
        """Drops what a READY slot holds; it becomes FREE once unpinned."""
        self.state[slot] = SlotState.EMPTY
        self.address[slot] = None
        self._settle(slot)

    def _settle(self, slot: int) -> None:
        pins, state = self.pins[slot], self.state[slot]
        if state == SlotState.READY and pins == 0 and not self.is_lookup_tier:
            state = self.state[slot] = SlotState.EMPTY
            lost, self.address[slot] = self.address[slot], None
            if lost is not None:
                self.dropped.append(lost)
        if state == SlotState.EMPTY and pins == 0:
            self.state[slot] = SlotState.FREE
            self._free.append(slot)
        is_ready = state == SlotState.READY
        is_shown = is_ready and not pins
        if self._shown[slot] != is_shown:
            self._shown[slot] = is_shown
            if is_shown:
                self.evictable += 1
                self._policy.show(slot)
            else:
                self.evictable -= 1
                self._policy.hide(slot)
        is_stealable = is_ready and pins > 0 and pins == self.writes[slot]
        if self._stealable[slot] != is_stealable:
            self._stealable[slot] = is_stealable
            if is_stealable:
                self._steals.show(slot)
            else:
                self._steals.hide(slot)

    def check(self) -> None:
        """Raises ContractError if the invariants do not hold. O(slots); for tests and idle moments."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise ContractError("a slot is free twice")
        for slot in range(self.count):
            state, pins = SlotState(self.state[slot]), self.pins[slot]
            if (state == SlotState.FREE) != (slot in free):
                raise ContractError(f"slot {slot} is {state.name} but free={slot in free}")
            if pins < self.writes[slot] or self.writes[slot] < 0:
                raise ContractError(f"slot {slot} has {pins} pins and {self.writes[slot]} writes")
            if state in (SlotState.FREE,) and pins:
                raise ContractError(f"slot {slot} is free with {pins} pins")
            if (state == SlotState.READY) != (self.address[slot] is not None):
                raise ContractError(f"slot {slot} is {state.name} with address {self.address[slot]!r}")
            if self._shown[slot] != (state == SlotState.READY and pins == 0):
                raise ContractError(f"slot {slot} is {state.name} with {pins} pins but shown={self._shown[slot]}")
            if self._stealable[slot] != (state == SlotState.READY and 0 < pins == self.writes[slot]):
                raise ContractError(f"slot {slot} is {state.name} with {pins} pins, stealable={self._stealable[slot]}")
        if self.writing != sum(1 for count in self.writes if count):
            raise ContractError(f"{self.writing} slots counted as being written")
        if self.evictable != sum(self._shown):
            raise ContractError(f"{self.evictable} evictable slots counted, {sum(self._shown)} shown")
