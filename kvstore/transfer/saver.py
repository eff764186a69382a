"""The saving half of an executor: blocks into slots, slots into persistent tiers.

A snapshot is complete when `snapshot` returns, so the engine may reuse the blocks; everything after it reads the slot.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from time import time_ns

from kvstore.messages import Outcome, Save, Write
from kvstore.transfer.workspace import Workspace

WRITE_TIMEOUT = 30.0
"""Seconds for one write to a tier."""

_REMEMBERED_TURNS = 4096


class Saver:
    """Part of one executor."""

    def __init__(self, workspace: Workspace, now_ns: Callable[[], int] = time_ns) -> None:
        self._space = workspace
        self._now_ns = now_ns
        self._turns: OrderedDict[int, int] = OrderedDict()
        self._slots_on_way = 0
        self._seal_lock = threading.Lock()

    def snapshot(self, save: Save) -> int:
        """Copies blocks into a slot, unless a lower write still reads the slot; the bytes copied."""
        ticket, slot, address, group, blocks = save
        space = self._space
        if space.busy[slot] or space.memory is None:
            space.done.append((ticket, Outcome.SKIPPED))
            return 0
        space.content[slot] = None
        space.memory.save(blocks, space.arena.array(slot))
        space.content[slot], space.sealed[slot] = address, 0
        space.done.append((ticket, Outcome.STORED))
        return space.spec.geometries[group].payload_bytes

    def write(self, write: Write) -> None:
        """Queues a write of a slot, if the slot holds the address and few enough are on their way."""
        ticket, slot, address, _group, tier, turn, position = write
        space, channel = self._space, self._space.channels[tier]
        if not space.spec.is_writer:
            return
        if channel is None:
            space.done.append((ticket, Outcome.UNAVAILABLE))
            return
        if space.content[slot] != address or (not space.busy[slot] and self._slots_on_way >= space.spec.write_limit):
            space.done.append((ticket, Outcome.SKIPPED))
            return
        term, deadline = channel.gate.term, space.clock() + WRITE_TIMEOUT
        buffer = space.arena.buffer(slot)
        used_ns = self._began(turn) - position

        def run() -> None:
            outcome, evicted = Outcome.SKIPPED, []
            if channel.gate.enter(term):
                try:
                    self._seal(slot, address, buffer)
                    outcome = channel.client.write([address], [buffer], deadline, [used_ns])[0]
                    evicted = channel.client.take_evicted()
                finally:
                    channel.gate.leave()
            space.post(lambda: self._written(ticket, slot, outcome))
            if evicted:
                space.post(lambda: space.evicted.extend((tier, epoch, gone) for epoch, gone in evicted))

        def failed() -> None:
            space.post(lambda: self._written(ticket, slot, Outcome.UNAVAILABLE))

        self._slots_on_way += not space.busy[slot]
        space.busy[slot] += 1
        if not channel.lane.submit(run, failed, is_load=False):
            self._written(ticket, slot, Outcome.SKIPPED)

    def _began(self, turn: int) -> int:
        """When the first chunk of a request was written (ns since 1970): one time for its whole chain, less one a
        position, so that the tail is older than the head in whatever steps it was written."""
        began = self._turns.get(turn)
        if began is None:
            began = self._turns[turn] = self._now_ns()
            if len(self._turns) > _REMEMBERED_TURNS:
                self._turns.popitem(last=False)
        return began

    def _seal(self, slot: int, address: bytes, buffer: memoryview) -> None:
        # Once a slot, under a lock: two tiers may write one slot at the same time.
        space = self._space
        with self._seal_lock:
            if not space.sealed[slot] and space.format is not None:
                space.format.seal(address, buffer)
                space.sealed[slot] = 1

    def _written(self, ticket: int, slot: int, outcome: Outcome) -> None:
        self._space.busy[slot] -= 1
        self._slots_on_way -= not self._space.busy[slot]
        self._space.done.append((ticket, outcome))
