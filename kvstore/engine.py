"""The store in one process: planner, executor and prober for a library user, tests and benchmarks.

It drives exactly the objects that an engine connector drives, one plan after the other, on the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

from kvstore.assembly import Blueprint, blueprint
from kvstore.config import Config
from kvstore.errors import ContractError, LayoutMismatch
from kvstore.keys import Addresser, Namespace, chunk_hashes, request_identity, token_array
from kvstore.layout import RecordGeometry
from kvstore.metrics import Counters
from kvstore.planner.tracks import Track
from kvstore.tiers.slots import SlotArena
from kvstore.transfer.copies import PagedMemory
from kvstore.transfer.events import Opened, take_events

_PAUSE = 0.002
_COLLECT_BATCH = 64
"""Records of abandoned epochs removed at a time: 10 ms, in which the prober answers nobody."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What `Store.store` did.

    Attributes:
        chunks: full chunks of the tokens.
        slots: how many of them are in a slot now.
        tiers: for each persistent tier by name, how many of them it is known to have.
    """

    chunks: int
    slots: int
    tiers: dict[str, int]


class Store:
    """A KV-cache store over the caller's paged KV memory, on one rank.

    Thread-safe by one lock; every call blocks at most for its timeout. Close it, or use it as a context manager; a
    process that does neither still ends.

    Args:
        config: settings, see `kvstore.config`.
        namespace: what determines the bytes besides the tokens; the id of ``identity.auth_key`` joins it here.
        geometry: of a record; its ``chunk_tokens`` must be the configuration's.
        memory: the paged KV memory to save from and load into.

    Raises:
        ConfigError: a tier that cannot work on this machine.
        LayoutMismatch: geometry and configuration differ.
    """

    def __init__(self, config: Config, namespace: Namespace, geometry: RecordGeometry, memory: PagedMemory) -> None:
        if geometry.chunk_tokens != config.chunk_tokens:
            raise LayoutMismatch(f"chunk_tokens: {config.chunk_tokens} configured, {geometry.chunk_tokens} declared")
        self.counters = Counters()
        self.blueprint: Blueprint = blueprint(config, geometry)
        namespace = Namespace({**namespace.fields, **self.blueprint.key_fields()})
        self.namespace = namespace
        self.planner = self.blueprint.planner(self.counters)
        self.planner.set_namespace(namespace.digest)
        self._arena: SlotArena = self.blueprint.arena()
        self._executor = self.blueprint.executor(0, self._arena, self.counters)
        self._executor.register(memory)
        self._prober = self.blueprint.prober(Counters(), lambda: namespace, self._collect)
        self._lock = threading.RLock()
        self._next_request = 0
        self._is_open = True
        self._persistent = [i for i, kind in enumerate(self.blueprint.types) if not kind.volatile]
        for tier in self._persistent:
            self._executor.attach(tier, self.blueprint.scope(namespace, 0))
        self._prober.start()
        self._settle_start(monotonic() + config.limits.load_timeout)

    def _settle_start(self, deadline: float) -> None:
        with self._lock:
            while any(not self.planner.state.readable >> tier & 1 for tier in self._persistent):
                self._learn()
                self._step()
                if monotonic() >= deadline:
                    break
                self._executor.wait_results(_PAUSE)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- verbs ------------------------------------------------------------------------------------------------------

    def addresses(
        self, tokens: object, *, salt: str = "", adapter: bytes = b"", extras: Sequence[bytes] | None = None
    ) -> list[bytes]:
        """Addresses of the full chunks of ``tokens``.

        Args:
            tokens: token ids (list, tuple, numpy or torch integers).
            salt: isolates a tenant; empty means none.
            adapter: content digest of the adapter, empty for none.
            extras: one byte string a chunk for content that no token id names (image digests with positions).
        """
        hashes = chunk_hashes(self.namespace.digest, tokens, self.blueprint.geometry.chunk_tokens, extras)
        return Addresser(self.namespace.digest, 0, request_identity(salt=salt, adapter=adapter)).addresses(hashes)

    def store(
        self,
        tokens: object,
        block_ids: Sequence[int],
        *,
        salt: str = "",
        adapter: bytes = b"",
        extras: Sequence[bytes] | None = None,
        timeout: float = 10.0,
    ) -> Stored:
        """Saves the full chunks of ``tokens`` from the blocks and waits until every tier has answered.

        The blocks may be reused when this returns. Waits at most ``timeout`` seconds for room and for writes; what
        found none is a tail, so that what is stored is a prefix.
        """
        addresses = self.addresses(tokens, salt=salt, adapter=adapter, extras=extras)
        deadline = monotonic() + timeout
        with self._lock:
            self._check_open()
            with self._track() as track:
                self._save(track, addresses, len(token_array(tokens)), block_ids, deadline)
            return self._stored(addresses)

    def _save(
        self, track: Track, addresses: Sequence[bytes], tokens: int, block_ids: Sequence[int], deadline: float
    ) -> None:
        while True:
            self._learn()
            self.planner.offer(track, addresses, tokens, block_ids)
            self._step()
            done = track.save_cursor >= len(addresses) and track.write_cursor >= track.save_cursor
            if (done and not self.planner.orders.open) or monotonic() >= deadline:
                return
            if self.planner.orders.open:
                self._executor.wait_results(_PAUSE)
            elif not done and not self.planner.state.slots.free and not self.planner.state.slots.evictable:
                return

    def _stored(self, addresses: Sequence[bytes]) -> Stored:
        catalog = self.planner.catalog
        tiers = {
            self.blueprint.types[tier].name: sum(catalog.tiers(a) >> tier & 1 for a in addresses)
            for tier in self._persistent
        }
        return Stored(len(addresses), sum(catalog.slot(a) >= 0 for a in addresses), tiers)

    def lookup(
        self, tokens: object, *, salt: str = "", adapter: bytes = b"", extras: Sequence[bytes] | None = None
    ) -> int:
        """Number of prefix tokens that a `retrieve` would find now. Blocks at most for the probe deadline."""
        addresses = self.addresses(tokens, salt=salt, adapter=adapter, extras=extras)
        with self._lock:
            self._check_open()
            with self._track() as track:
                found = self._match(track, addresses)
                self.planner.admit(track, len(token_array(tokens)), 0, found)
            return found

    def retrieve(
        self,
        tokens: object,
        block_ids: Sequence[int],
        *,
        salt: str = "",
        adapter: bytes = b"",
        extras: Sequence[bytes] | None = None,
    ) -> int:
        """Loads the stored prefix of ``tokens`` into the blocks; the number of tokens delivered.

        Blocks from the returned token on are untouched, or (after a failed load) undefined. Waits at most
        ``limits.load_timeout`` plus the probe deadline.
        """
        addresses = self.addresses(tokens, salt=salt, adapter=adapter, extras=extras)
        block = self.blueprint.geometry.group.block_tokens
        with self._lock:
            self._check_open()
            with self._track() as track:
                found = min(self._match(track, addresses), len(block_ids) * block)
                self.planner.admit(track, len(token_array(tokens)), 0, found)
                return self._load(track, addresses, found, block_ids) if found else 0

    def _match(self, track: Track, addresses: Sequence[bytes]) -> int:
        limit = len(addresses) * self.blueprint.geometry.chunk_tokens
        asked = False
        while True:
            self._learn()
            match = self.planner.match(track, addresses, 0, limit, monotonic())
            if match.tokens is not None:
                return match.tokens
            if match.probe and not asked and track.wait_until is not None:
                asked = True
                first = len(addresses) - len(match.probe)
                self._prober.ask(track.request_id, first, match.probe, track.wait_until)
            self._step()
            if not self._prober.has_events:
                self._executor.wait_results(_PAUSE / 4)

    def _load(self, track: Track, addresses: Sequence[bytes], tokens: int, block_ids: Sequence[int]) -> int:
        block = self.blueprint.geometry.group.block_tokens
        self.planner.commit(track, addresses, 0, tokens, block_ids)
        deadline = monotonic() + self.blueprint.config.limits.load_timeout + 1.0
        while True:
            finished, invalid = self._step(wait=True)
            if track.request_id in finished:
                break
            if monotonic() > deadline:
                raise ContractError("an executor did not end a load by its deadline")
        self._prober.touch(addresses[: tokens // self.blueprint.geometry.chunk_tokens])
        bad = [index for index, block_id in enumerate(block_ids) if block_id in invalid]
        return min([tokens, *(index * block for index in bad)])

    # -- turning the crank ------------------------------------------------------------------------------------------

    def _step(self, *, wait: bool = False) -> tuple[set[str], set[int]]:
        plan, is_whole = self.planner.plan(monotonic()), False
        try:
            self._executor.begin(plan)
            self._executor.start_loads(has_forward=False)
            self._executor.take_snapshots()
            ended = self._executor.poll(wait=wait)
            is_whole = True
        finally:
            # An interrupt or a bug: what is left must not be done later, when the caller has reused the blocks, and
            # what failed of this load must not be taken for a failure of the next one.
            if not is_whole:
                self._executor.abandon()
                self._executor.poll()
        report = self._executor.report()
        if report is not None:
            self.planner.absorb(report)
        return ended

    def _learn(self) -> None:
        take_events(self._prober.drain(), self.planner, self._opened)

    def _opened(self, opened: Opened) -> None:
        self.planner.set_epoch(opened.tier, opened.epoch)

    def _collect(self) -> None:
        """On the prober's thread."""
        self._executor.collect(_COLLECT_BATCH)

    def flush(self, timeout: float) -> bool:
        """Waits until nothing that was ordered is open; whether that was reached."""
        deadline = monotonic() + timeout
        with self._lock:
            while self.planner.orders.open:
                self._step()
                if monotonic() >= deadline:
                    return False
                self._executor.wait_results(_PAUSE)
        return True

    def close(self, timeout: float = 5.0) -> int:
        """Finishes queued writes for ``timeout`` seconds and lets go of everything; the number of dropped ones."""
        with self._lock:
            if not self._is_open:
                return 0
            self._is_open = False
            self._prober.close()
            dropped = self._executor.close(timeout)
            self._arena.close()
            return dropped

    @contextmanager
    def _track(self) -> Iterator[Track]:
        self._next_request += 1
        track = self.planner.track(f"store-{self._next_request}")
        try:
            yield track
        finally:
            self.planner.close(track.request_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ContractError("the store is closed")
