"""What is where: for each address its slot and the persistent tiers that are believed to have it.

Invariant: a slot's address and the address's slot always agree (`SlotTable` holds the other direction). A tier bit is
a hint, which a read may refute; an absent bit is no proof of absence either. Bounded: slots by their number, hints by
``max_hints`` per tier (a hint that finds no room is not learned; the prober still finds the record).

One dict from address to an integer holds it all: measured with `benchmarks.connector`, far below 400 bytes a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

_TIER_BITS = 8
_TIER_MASK = (1 << _TIER_BITS) - 1
MAX_TIERS = _TIER_BITS


class Catalog:
    """Address -> slot and tier bits. Cost of every call: one dict lookup an address."""

    __slots__ = ("_where", "generation", "hint_counts", "max_hints")

    def __init__(self, max_hints: Iterable[int]) -> None:
        self._where: dict[bytes, int] = {}
        self.max_hints = tuple(max_hints)
        self.hint_counts = [0] * len(self.max_hints)
        self.generation = 0
        """Raised by every change, so that a verdict can be cached."""

    def __len__(self) -> int:
        return len(self._where)

    def slot(self, address: bytes) -> int:
        """The address's slot, -1 for none."""
        return (self._where.get(address, 0) >> _TIER_BITS) - 1

    def tiers(self, address: bytes) -> int:
        """Bit mask of the persistent tiers that are believed to have the address."""
        return self._where.get(address, 0) & _TIER_MASK

    def code(self, address: bytes) -> int:
        """Slot and tiers in one number, 0 for unknown; see `split`."""
        return self._where.get(address, 0)

    def used_slots(self) -> list[int]:
        """The slot of every address that has one. O(everything); for `Planner.check`."""
        return [(code >> _TIER_BITS) - 1 for code in self._where.values() if code >> _TIER_BITS]

    @staticmethod
    def split(code: int) -> tuple[int, int]:
        """(slot or -1, tier mask) of a code."""
        return (code >> _TIER_BITS) - 1, code & _TIER_MASK

    def set_slot(self, address: bytes, slot: int) -> None:
        """Records that the address is (being put) in ``slot``."""
        self._where[address] = (self._where.get(address, 0) & _TIER_MASK) | ((slot + 1) << _TIER_BITS)
        self.generation += 1

    def clear_slot(self, address: bytes) -> None:
        """Forgets the address's slot."""
        self._store(address, self._where.get(address, 0) & _TIER_MASK)

    def add_hint(self, address: bytes, tier: int) -> bool:
        """Records that ``tier`` has the address; False if the tier's hints are at their bound."""
        code = self._where.get(address, 0)
        if code >> tier & 1:
            return True
        if self.hint_counts[tier] >= self.max_hints[tier]:
            return False
        self.hint_counts[tier] += 1
        self._where[address] = code | 1 << tier
        self.generation += 1
        return True

    def drop_hint(self, address: bytes, tier: int) -> bool:
        """Forgets that ``tier`` has the address; whether it was believed to."""
        code = self._where.get(address, 0)
        if not code >> tier & 1:
            return False
        self.hint_counts[tier] -= 1
        self._store(address, code & ~(1 << tier))
        return True

    def drop_hints(self, tier: int) -> None:
        """Forgets everything that ``tier`` is believed to have. O(everything): 0.1 s for a million addresses."""
        keep = ~(1 << tier)
        self._where = {address: left for address, code in self._where.items() if (left := code & keep)}
        self.hint_counts[tier] = 0
        self.generation += 1

    def clear(self) -> None:
        """Forgets everything."""
        self._where.clear()
        self.hint_counts = [0] * len(self.max_hints)
        self.generation += 1

    def _store(self, address: bytes, code: int) -> None:
        if code:
            self._where[address] = code
        else:
            self._where.pop(address, None)
        self.generation += 1
