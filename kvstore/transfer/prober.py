"""The prober: finds out what persistent tiers have, off the scheduler's thread.

One thread with read-only clients (one a shard). It works out the namespace, opens the tiers, lists them piece by piece
between questions, answers "is it there" by a deadline, and marks records as used. Everything that it learns is an
event that the scheduler's thread takes with `drain`; nothing else is shared. An event carries the generation and the
epoch in which it was learnt: the taker ignores those of another one.

The published epoch of a tier is read anew before every question and at every tick, so that an engine follows where
another one made everybody start anew; except where this engine works in a private epoch.

A record counts as there when every shard has its own.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic

from kvstore.errors import ConfigError, TierUnavailable
from kvstore.messages import Outcome
from kvstore.tiers.base import Scope, Tier
from kvstore.transfer.events import Answer, Event, Listed, Opened
from kvstore.transfer.lanes import contain

log = logging.getLogger(__name__)

MOST_WAITING = 1024
"""Tasks that may wait for the thread before questions and marks are dropped."""

_ASK_BATCH = 64
_LISTED_AT_LEAST = 1024
"""Addresses gathered into one piece of a listing, so that pieces are few."""
_RETRY_SECONDS = 5.0


class Prober:
    """See the module.

    Args:
        clients: for each persistent tier, by index, one read-only client a shard.
        scopes: makes the scope of each shard; called on the prober's thread and may take long (weights digest).
            Raises `TierUnavailable` where the namespace can not be known; then the tiers stay closed.
        tick: called about every ``every`` seconds on the prober's thread (for the snapshot file).
        new_epoch: makes a random epoch name.
    """

    def __init__(
        self,
        clients: Mapping[int, Sequence[Tier]],
        scopes: Callable[[], Sequence[Scope]],
        tick: Callable[[], None] = lambda: None,
        every: float = 1.0,
        new_epoch: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._clients = dict(clients)
        self._scopes = scopes
        self._tick = tick
        self._every = every
        self._new_epoch = new_epoch
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: deque[Opened | Answer] = deque()
        self._listed: deque[Listed] = deque()
        self._listings: deque[tuple[int, Iterator[list[bytes]]]] = deque()
        self._open: set[int] = set()
        self._epochs: dict[int, str] = {}
        """The epoch that the clients of an open tier work in."""
        self._private: set[int] = set()
        self._undropped: set[int] = set()
        """Tiers that start anew as soon as a new epoch could be published; not asked meanwhile."""
        self._resolved: Sequence[Scope] | None = None
        self._next_try = 0.0
        self._generation = 0
        self.is_listing_done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvstore-prober", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def ask(self, request_id: str, first_chunk: int, addresses: Sequence[bytes], deadline: float) -> None:
        """Asks for a chain of addresses, from its first on until one is nowhere. Never blocks.

        A question that finds `MOST_WAITING` tasks before it is not asked: its asker's deadline ends it.
        """
        asked = tuple(addresses)
        self._offer(lambda: self._answer(request_id, first_chunk, asked, deadline))

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks records as used, head first; not where `MOST_WAITING` tasks wait. Never blocks."""
        used = tuple(addresses)
        self._offer(lambda: self._touch(used))

    def _offer(self, task: Callable[[], None]) -> None:
        # A tier that hangs holds the thread, and requests go on coming.
        if self._tasks.qsize() < MOST_WAITING:
            self._tasks.put(task)

    def run(self, call: Callable[[], None]) -> None:
        """Calls ``call`` on the prober's thread, in turn; what it raises is logged. Never blocks."""
        self._tasks.put(call)

    def detach(self, epochs: Mapping[int, str], generation: int) -> None:
        """Works in these private epochs of open tiers from now on, and learns for this generation. Never blocks."""
        named = dict(epochs)
        self._tasks.put(lambda: self._detach(named, generation))

    def drop(self, tiers: Iterable[int], generation: int) -> None:
        """Publishes a new epoch of these tiers and works in it, now or when they open; `Opened` says when.

        Until then they are not asked. Never blocks.
        """
        dropped = frozenset(tiers)
        self._tasks.put(lambda: self._drop(dropped, generation))

    def drain(self, pieces: int = 2) -> list[Event]:
        """Every answer, which somebody waits for, then at most ``pieces`` pieces of listings. Never blocks."""
        answers, listed = self._answers, self._listed
        events: list[Event] = [answers.popleft() for _ in range(len(answers))]
        return events + [listed.popleft() for _ in range(min(pieces, len(listed)))]

    @property
    def has_events(self) -> bool:
        """Whether `drain` would return something."""
        return bool(self._answers or self._listed)

    def close(self, timeout: float = 1.0) -> None:
        """Stops the thread; waits for it at most ``timeout`` seconds."""
        self._tasks.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        next_tick = 0.0
        while True:
            now = monotonic()
            if now >= next_tick:
                next_tick = now + self._every
                contain("prober.tick", self._tick)
                contain("prober.follow", self._follow)
            if now >= self._next_try and self._is_waiting:
                self._next_try = now + _RETRY_SECONDS
                contain("prober.open", self._open_tiers)
                continue
            try:
                if self._listings:
                    task = self._tasks.get_nowait()
                else:
                    wake = min(next_tick, self._next_try if self._is_waiting else next_tick)
                    task = self._tasks.get(timeout=max(0.0, wake - now))
            except queue.Empty:
                if self._listings:
                    contain("prober.list", self._list_some)
                continue
            if task is None:
                break
            contain("prober.task", task)
        for clients in self._clients.values():
            for client in clients:
                client.close()

    @property
    def _is_waiting(self) -> bool:
        """Whether there is something to try again."""
        return len(self._open) < len(self._clients) or bool(self._undropped)

    def _open_tiers(self) -> None:
        try:
            if self._resolved is None:
                self._resolved = self._scopes()
        except (TierUnavailable, ConfigError) as error:
            log.warning("prober.no_namespace reason=%s", error)
            self._next_try = float("inf")
            return
        for tier, clients in self._clients.items():
            if tier in self._open:
                continue
            try:
                for client, scope in zip(clients, self._resolved, strict=True):
                    client.attach(scope)
                epoch = clients[0].published_epoch() if tier not in self._undropped else ""
            except (TierUnavailable, ConfigError) as error:
                log.warning("tier.closed tier=%s reason=%s", clients[0].name, error)
                continue
            self._open.add(tier)
            if epoch:
                self._enter(tier, epoch)
        self._publish_new()
        if not self._is_waiting:
            self._next_try = float("inf")

    def _publish_new(self) -> None:
        """Publishes the new epochs of a drop where that works now."""
        for tier in sorted(self._undropped & self._open):
            client = self._clients[tier][0]
            try:
                client.publish_epoch(self._new_epoch())
                epoch = client.published_epoch()
            except TierUnavailable as error:
                log.warning("tier.not_dropped tier=%s reason=%s", client.name, error)
                continue
            log.info("tier.dropped tier=%s epoch=%s", client.name, epoch)
            self._undropped.discard(tier)
            self._enter(tier, epoch)

    def _follow(self) -> None:
        """Enters the epochs that others published."""
        for tier in sorted(self._open - self._private - self._undropped):
            try:
                epoch = self._clients[tier][0].published_epoch()
            except TierUnavailable:
                continue  # nothing says that it is another one
            if epoch != self._epochs[tier]:
                log.info("tier.new_epoch tier=%s epoch=%s", self._clients[tier][0].name, epoch)
                self._enter(tier, epoch)

    def _enter(self, tier: int, epoch: str) -> None:
        """Works in a published epoch from now on, and lists it."""
        self._answers.append(Opened(self._generation, tier, epoch))
        self._use(tier, epoch)
        self.is_listing_done.clear()
        self._listings.append((tier, self._scan(self._clients[tier])))

    @staticmethod
    def _scan(clients: Sequence[Tier]) -> Iterator[list[bytes]]:
        if len(clients) == 1:
            yield from clients[0].scan()
            return
        seen: dict[bytes, int] = {}
        for client in clients:
            for batch in client.scan():
                whole = []
                for address in batch:
                    seen[address] = seen.get(address, 0) + 1
                    if seen[address] == len(clients):
                        whole.append(address)
                        del seen[address]
                if whole:
                    yield whole

    def _list_some(self) -> None:
        tier, listing = self._listings.popleft()
        addresses: list[bytes] = []
        for batch in listing:
            addresses += batch
            if len(addresses) >= _LISTED_AT_LEAST:
                # Put back only now: a listing that raises is not tried for ever.
                self._listings.appendleft((tier, listing))
                break
        if addresses:
            self._listed.append(Listed(self._generation, tier, self._epochs[tier], tuple(addresses)))
        if not self._listings:
            self.is_listing_done.set()

    def _use(self, tier: int, epoch: str) -> None:
        self._epochs[tier] = epoch
        for client in self._clients[tier]:
            client.use_epoch(epoch)
        self._forget_listing(tier)

    def _forget_listing(self, tier: int) -> None:
        # A listing that was begun belongs to the epoch before.
        self._listings = deque(item for item in self._listings if item[0] != tier)

    def _detach(self, epochs: Mapping[int, str], generation: int) -> None:
        self._generation = generation
        for tier, epoch in epochs.items():
            self._private.add(tier)
            self._use(tier, epoch)

    def _drop(self, tiers: frozenset[int], generation: int) -> None:
        self._generation = generation
        self._undropped |= tiers
        for tier in tiers:
            self._forget_listing(tier)
        self._publish_new()
        if self._undropped & self._open:
            self._next_try = min(self._next_try, monotonic() + _RETRY_SECONDS)

    def _answer(self, request_id: str, first_chunk: int, addresses: tuple[bytes, ...], deadline: float) -> None:
        self._follow()
        asked = sorted(self._open - self._undropped)
        found: dict[int, list[bytes]] = {tier: [] for tier in asked}
        present = 0
        for start in range(0, len(addresses), _ASK_BATCH):
            batch = addresses[start : start + _ASK_BATCH]
            has = {tier: self._contains(tier, batch, deadline) for tier in asked}
            for index, address in enumerate(batch):
                tiers = [tier for tier, hits in has.items() if hits[index]]
                if not tiers:
                    break
                for tier in tiers:
                    found[tier].append(address)
                present += 1
            if present < start + len(batch):
                break
        places = {(tier, self._epochs[tier]): tuple(hits) for tier, hits in found.items()}
        self._answers.append(Answer(self._generation, request_id, first_chunk, places, present, len(addresses)))

    def _contains(self, tier: int, addresses: Sequence[bytes], deadline: float) -> list[bool]:
        hits = [True] * len(addresses)
        for client in self._clients[tier]:
            outcomes = client.contains(addresses, deadline)
            hits = [hit and outcome == Outcome.HIT for hit, outcome in zip(hits, outcomes, strict=True)]
        return hits

    def _touch(self, addresses: tuple[bytes, ...]) -> None:
        for tier in self._open - self._undropped:
            for client in self._clients[tier]:
                client.touch(addresses)
