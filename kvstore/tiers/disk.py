"""The disk tier: one verified file a record, in directories that are the index.

Invariant: a name leads to a whole record or to nothing; what a read delivers was compared with the header and the
checksum of the address asked for; and the store never takes more than its capacity. A restart finds everything,
since nothing but the directory says what is there.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

from kvstore.errors import ConfigError, ContractError
from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.tiers.base import Scope, Tier, TierStatus, TierType
from kvstore.tiers.disk_breaker import OPEN_KIND, DropBreaker
from kvstore.tiers.disk_config import DiskConfig
from kvstore.tiers.disk_draft import Directory
from kvstore.tiers.disk_epochs import replace_epoch
from kvstore.tiers.disk_files import Files, Found
from kvstore.tiers.disk_ledger import LedgerLocked, error_name
from kvstore.tiers.disk_names import record_name
from kvstore.tiers.disk_pause import WritePause
from kvstore.tiers.disk_root import EPOCH_NAME, namespace_directory, open_namespace, open_root, publish_epoch
from kvstore.tiers.disk_space import IN_FLIGHT, LATE, TOO_LARGE, Space
from kvstore.tiers.disk_tools import DiskTools
from kvstore.tiers.disk_tree import ABSENT, Tree
from kvstore.tiers.disk_writer import PRESENT, STORED, Attached, Limit, RecordWriter, touch
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.record import FOREIGN_KINDS, RecordFormat

NAME = "disk"
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskTier(Tier):
    """Client of a disk store; see `Tier` for the verbs. Any thread; every verb blocks for its I/O.

    Args:
        config: the settings.
        counters: where this client counts, with the tier's name as label.
        writer: whether this client may write and remove records.
        calls: the operating system.
        clock: seconds, monotonic: what deadlines and retries are measured by.
        sleep: waits so many seconds of that clock.
        now_ns: time of day in nanoseconds: what last uses are marked with.
        new_epoch: makes a random epoch name.

    Raises:
        ConfigError: the root can not be used as it is set.
    """

    name = NAME

    def __init__(
        self,
        config: DiskConfig,
        counters: Counters,
        writer: bool,
        calls: OsCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now_ns: Callable[[], int] = time.time_ns,
        new_epoch: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._config = config
        self._counters = counters
        self._counting = threading.Lock()
        self._is_writer = writer and not config.read_only
        self._calls = calls or OsCalls()
        self._clock = clock
        self._now_ns = now_ns
        self._new_epoch = new_epoch
        self._files = Files(self._calls)
        self._pause = WritePause(clock, str(config.path))
        self._breaker = DropBreaker(clock, str(config.path))
        self._root: Directory | None = open_root(config.path, self._calls, self._files, config.read_only)
        self._space = Space(
            self._calls, self._root, config.capacity, config.min_free, self._is_writer,
            clock, sleep, now_ns, partial(self._count, "evicted_chunks"),
        )  # fmt: skip
        self._opened: Attached | None = None
        self._tree: Tree | None = None

    def attach(self, scope: Scope) -> None:
        """See `Tier.attach`. One KV cache group is served: an address does not say which group it is of."""
        if len(scope.geometries) != 1:
            raise ConfigError(f"tiers[disk]: serves one KV cache group, this model has {len(scope.geometries)}")
        if self._root is None:
            raise ContractError("attach after close")
        geometry = scope.geometries[0]
        directory = open_namespace(self._root, scope.namespace, self._calls, self._files, self._config.read_only)
        namespace, shard = namespace_directory(scope.namespace), geometry.shard.name
        writer = RecordWriter(self._calls, self._files, self._space, namespace, self._config.sync)
        self._space.report_for(namespace, shard)
        if self._is_writer:
            with suppress(OSError):  # a full or a busy disk can be served from; the first write tries again
                self._space.join()
        self._opened = Attached(directory, RecordFormat(scope.namespace, geometry, scope.key), shard, writer)

    def published_epoch(self) -> str:
        """See `Tier.published_epoch`.

        Raises:
            TierUnavailable: an operating system error, or none yet on a read-only client.
        """
        return publish_epoch(
            self._attached().directory, self._calls, self._files, self._config.read_only, self._new_epoch
        )

    def publish_epoch(self, epoch: str) -> None:
        """See `Tier.publish_epoch`."""
        replace_epoch(self._attached().directory, self._calls, self._files, epoch)

    def use_epoch(self, epoch: str) -> None:
        """See `Tier.use_epoch`. No I/O: directories are made by the first write."""
        if EPOCH_NAME.fullmatch(epoch) is None:
            raise ContractError(f"{epoch!r} is not the name of an epoch")
        opened = self._attached()
        self._tree = Tree(self._calls, opened.directory, epoch, opened.shard, self._config.sync)

    def contains(self, addresses: Sequence[bytes], deadline: float) -> list[Outcome]:
        """See `Tier.contains`. One ``stat`` an address (2 us)."""
        tree, opened = self._tree, self._opened
        self._count("probes", len(addresses))
        if tree is None or opened is None:
            return [Outcome.UNAVAILABLE] * len(addresses)
        return [self._look(tree, opened.format.slot_bytes, address, deadline) for address in addresses]

    def _look(self, tree: Tree, size: int, address: bytes, deadline: float) -> Outcome:
        if self._clock() >= deadline:
            return Outcome.TIMEOUT
        try:
            kind = tree.look(address, size)
        except OSError as error:
            return self._failed(error)
        if kind and kind != ABSENT:
            self._count("missed_records", reason=kind)
        return Outcome.MISS if kind else Outcome.HIT

    def read(self, addresses: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
        """See `Tier.read`. The deadline is looked at every 8 MiB."""
        tree, opened = self._tree, self._opened
        if tree is None or opened is None:
            return [Outcome.UNAVAILABLE] * len(addresses)
        started = self._clock()
        outcomes = [
            self._read_one(tree, opened, address, buffer, deadline)
            for address, buffer in zip(addresses, buffers, strict=True)
        ]
        hits = outcomes.count(Outcome.HIT)
        self._count("read_records", hits)
        self._count("read_bytes", hits * opened.format.slot_bytes)
        self._count("read_seconds", self._clock() - started)
        return outcomes

    def _read_one(self, tree: Tree, opened: Attached, address: bytes, buffer: memoryview, deadline: float) -> Outcome:
        record, writer = opened.format, opened.writer if self._is_writer else None
        if len(buffer) != record.slot_bytes:
            raise ContractError(f"a buffer of {len(buffer)} bytes for records of {record.slot_bytes}")
        fan, name = record_name(address)
        try:
            directory = tree.directory(fan, make=False)
            if not self._breaker.allows():
                found = Found(OPEN_KIND)
            elif self._clock() >= deadline:
                found = Found("late")
            elif directory is None:
                found = Found("absent")
            else:
                found = self._files.load(directory, name, buffer, lambda: self._clock() >= deadline)
            kind = found.kind or record.fault(address, buffer)
            if not kind:
                self._breaker.succeeded()
                return Outcome.HIT
            self._count("missed_records", reason=kind)
            if kind in (OPEN_KIND, "late"):
                return Outcome.UNAVAILABLE if kind == OPEN_KIND else Outcome.TIMEOUT
            if kind == "absent":
                self._space.missed()
            if kind == "absent" or kind in FOREIGN_KINDS:
                self._breaker.undecided()
                return Outcome.MISS
            may_drop = self._breaker.may_drop(kind)
            if may_drop and writer is not None and directory is not None and found.status is not None:
                writer.drop(directory, name, found.status)
        except OSError as error:
            self._count("missed_records", reason=error_name(error))
            return self._failed(error)
        return Outcome.DAMAGED

    def write(
        self,
        addresses: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        used_ns: Sequence[int] = (),
    ) -> list[Outcome]:
        """See `Tier.write`. SKIPPED while writing is stopped after an error; one attempt every 10 s."""
        tree, opened = self._tree, self._opened
        if tree is None or opened is None or not self._is_writer:
            return [Outcome.UNAVAILABLE] * len(addresses)
        started, limit = self._clock(), Limit(deadline, lambda: self._clock() >= deadline)
        outcomes = []
        now_ns = self._now_ns()
        uses: Sequence[int | None] = [min(used, now_ns) for used in used_ns]
        if not uses:
            # One record alone keeps the kernel's time.
            uses = [now_ns - n for n in range(len(addresses))] if len(addresses) > 1 else [None] * len(addresses)
        for address, buffer, used in zip(addresses, buffers, uses, strict=True):
            if not opened.format.is_sealed_for(address, buffer):
                raise ContractError(f"the buffer is not sealed for {address.hex()}")
            outcomes.append(self._write_one(opened.writer, tree, address, buffer, used, limit))
        self._count("write_seconds", self._clock() - started)
        return outcomes

    def _write_one(
        self, writer: RecordWriter, tree: Tree, address: bytes, buffer: memoryview, used_ns: int | None, limit: Limit
    ) -> Outcome:
        if limit.expired():
            return Outcome.TIMEOUT
        if not self._pause.allows() or not self._breaker.allows():
            return Outcome.SKIPPED
        try:
            result = writer.store(tree, address, buffer, used_ns, limit)
        except OSError as error:
            if isinstance(error, LedgerLocked) and limit.expired():
                return Outcome.TIMEOUT
            self._pause.stop(error_name(error))
            self._space.refused(error.errno in _FULL_ERRORS)
            return self._failed(error)
        if result in (STORED, PRESENT):
            self._pause.resume()
            self._breaker.succeeded()
            self._space.refused(False)
            self._count("written_bytes", len(buffer) if result == STORED else 0)
            return Outcome.STORED
        if result == LATE:
            return Outcome.TIMEOUT
        if result == IN_FLIGHT:
            return Outcome.SKIPPED
        self._count("tier_errors", reason=result)
        if result != TOO_LARGE:
            # Looking for room means searching the store: not again for every record of a burst.
            self._pause.stop(result)
        return Outcome.FULL

    def delete(self, addresses: Sequence[bytes]) -> list[Outcome]:
        """See `Tier.delete`."""
        tree, opened = self._tree, self._opened
        if tree is None or opened is None or not self._is_writer:
            return [Outcome.UNAVAILABLE] * len(addresses)
        return [self._delete_one(opened.writer, tree, address) for address in addresses]

    def _delete_one(self, writer: RecordWriter, tree: Tree, address: bytes) -> Outcome:
        try:
            return Outcome.HIT if writer.delete(tree, address) else Outcome.MISS
        except OSError as error:
            return self._failed(error)

    def collect(self, limit: int) -> int:
        """See `Tier.collect`."""
        opened = self._opened
        if opened is None or not self._is_writer:
            return 0
        try:
            return opened.writer.collect(opened.directory, limit)
        except OSError as error:
            self._failed(error)
            return 0

    def scan(self) -> Iterator[list[bytes]]:
        """See `Tier.scan`. A batch a directory; 3 us a record with a warm cache.

        Raises:
            OSError: a directory could not be listed.
        """
        tree = self._tree
        if tree is not None:
            yield from tree.scan()

    def touch(self, addresses: Sequence[bytes]) -> None:
        """See `Tier.touch`. Each record's time is set at most once in 10 minutes; a failure is counted, no more.

        Also on a client that writes no records: the prober marks what was used.
        """
        tree = self._tree
        if tree is None or self._config.read_only:
            return
        touch(self._calls, tree, addresses, self._now_ns(), self._failed)

    def take_evicted(self) -> list[tuple[str, tuple[bytes, ...]]]:
        """See `Tier.take_evicted`."""
        return self._space.take_evicted()

    def status(self) -> TierStatus:
        """See `Tier.status`. What is used is known at once, from the ledger, unless all has to be counted anew."""
        notes = [*self._files.notes, *(["read-only"] if self._config.read_only else [])]
        notes += [*self._pause.notes, *self._breaker.notes]
        found = self._space.totals()
        used, records = (None, None) if found is None else (found.used, found.records)
        return TierStatus(self._config.capacity, used, records, tuple(notes))

    def measure(self) -> None:
        """See `Tier.measure`."""
        try:
            self._space.measure()
        except OSError as error:
            self._count("tier_errors", reason=error_name(error))

    def close(self) -> None:
        """See `Tier.close`. A verb that still runs keeps what it uses until it ends."""
        self._tree = self._opened = self._root = None
        self._space.close()

    def _attached(self) -> Attached:
        if self._opened is None:
            raise ContractError("the tier is not attached")
        return self._opened

    def _failed(self, error: OSError) -> Outcome:
        self._count("tier_errors", reason=error_name(error))
        return Outcome.FULL if error.errno in _FULL_ERRORS else Outcome.UNAVAILABLE

    def _count(self, name: str, amount: float = 1, reason: str = "") -> None:
        if amount:
            with self._counting:
                self._counters.add(f"{name}_total", amount, tier=NAME, reason=reason)


TIER = TierType(
    name=NAME,
    config=DiskConfig,
    order=20,
    is_default=True,
    volatile=False,
    capacity_bytes=attrgetter("capacity"),
    make=DiskTier,
    threads=4,  # verified reads of 1 MiB records: 1.7 GB/s, with 2 threads 1.4 (2 cores)
    tools=DiskTools,
)
"""The disk tier for the registry."""
