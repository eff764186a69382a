"""Least recently used, ordered within a chain so that a head outlives its tail.

A chunk is only useful while every chunk before it is there. The order is therefore (turn, -position): what one
request touched leaves from its last chunk to its first, whenever each of them was inserted. On agent traffic this
lifts small caches from 5 to 13 % hits against touching first to last (the reference ratios of the public traces).

Kept as a heap of integers with lazy removal: hiding a pinned slot costs nothing and does not lose its age, which a
linked list could only do by a search.
"""

from __future__ import annotations

import heapq

from kvstore.policies.base import EvictionPolicy

_SLOT_BITS = 32
_POSITION_BITS = 24
_LAST_POSITION = (1 << _POSITION_BITS) - 1


class Lru(EvictionPolicy):
    """Tail-first LRU. ``victim`` is amortised O(log n)."""

    def __init__(self, count: int) -> None:
        self._keys = [0] * count
        self._shown = bytearray(count)
        self._heap: list[int] = []

    def touch(self, slot: int, turn: int, position: int) -> None:
        key = (turn << _POSITION_BITS) | (_LAST_POSITION - min(position, _LAST_POSITION))
        self._keys[slot] = (key << _SLOT_BITS) | slot
        if self._shown[slot]:
            self._push(slot)

    def show(self, slot: int) -> None:
        if not self._shown[slot]:
            self._shown[slot] = 1
            self._push(slot)

    def hide(self, slot: int) -> None:
        self._shown[slot] = 0

    def victim(self) -> int | None:
        heap = self._heap
        while heap:
            slot = heap[0] & ((1 << _SLOT_BITS) - 1)
            if self._shown[slot] and heap[0] == self._keys[slot]:
                return slot
            heapq.heappop(heap)
        return None

    def _push(self, slot: int) -> None:
        heapq.heappush(self._heap, self._keys[slot])
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [key for index, key in enumerate(self._keys) if self._shown[index]]
            heapq.heapify(self._heap)
