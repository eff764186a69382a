"""Speed of the disk tier beside raw direct I/O on the same file system, and how fast a restart lists a store.

The baseline creates new files (O_CREAT | O_EXCL | O_DIRECT, one pwrite) or reads them with one preadv, with the same
sizes, the same number of threads and the same buffers, in turns with ours. Set KVSTORE_BENCH_DIR to measure another
disk than the one of the temporary directory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import ROUNDS, Row, interleave, main, run
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record, soon
from kvstore.tiers.base import Scope
from kvstore.tiers.disk import TIER, DiskConfig, DiskTier
from kvstore.units import GIB, MIB

BAR = 0.8
THREADS = TIER.threads
TURN_BYTES = 128 * MIB
LISTED = 100_000
LISTING_BAR = 1.0


def _scope(record_mib: int, secret: str | None = None) -> Scope:
    """Records of exactly ``record_mib`` MiB of payload in 16 layers, authenticated with a secret."""
    page = record_mib * MIB // 16
    layers = tuple(LayerGeometry(f"layer.{i}", "bfloat16", "HTC", (1, 16, page // 32), page) for i in range(16))
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", 16, "HTC", layers), 16)
    return sample_scope(f"bench-{record_mib}", geometry, secret)


@contextmanager
def _place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=os.environ.get("KVSTORE_BENCH_DIR")))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def _tier(place: Path, scope: Scope, sync: bool = False) -> Iterator[DiskTier]:
    tier = DiskTier(DiskConfig(path=place / "store", capacity=8 * GIB, min_free=0.0, sync=sync), Counters(), True)
    tier.attach(scope)
    tier.use_epoch(tier.published_epoch())
    try:
        yield tier
    finally:
        tier.close()


class _Turns:
    """Turns of writing or reading the same number of records by both, each in THREADS threads."""

    def __init__(self, place: Path, record_mib: int, pool: ThreadPoolExecutor, secret: str | None = None) -> None:
        self.scope = _scope(record_mib, secret)
        self._count = max(THREADS * 2, TURN_BYTES // (record_mib * MIB))
        self._addresses = [sample_address(n) for n in range(self._count)]
        self._records = [sealed_record(self.scope, address, n) for n, address in enumerate(self._addresses)]
        # A target a record, as slots are: one small enough for the processor's cache to hold is slower to read into.
        self._targets = [aligned_buffer(len(self._records[0])) for _ in self._addresses]
        self._pool = pool
        self._raw = place / f"raw-{record_mib}"
        self._raw.mkdir()
        self.bytes = self._count * len(self._records[0])

    def _timed(self, work: Callable[[int], None]) -> float:
        """GB/s of doing ``work`` for each record, split over the threads."""
        shares = [range(thread, self._count, THREADS) for thread in range(THREADS)]
        started = time.perf_counter()
        list(self._pool.map(lambda share: [work(index) for index in share], shares))
        return self.bytes / (time.perf_counter() - started) / 1e9

    def write(self, tier: DiskTier) -> float:
        def one(index: int) -> None:
            assert tier.write([self._addresses[index]], [self._records[index]], soon()) == [Outcome.STORED]

        tier.delete(self._addresses)
        return self._timed(one)

    def read(self, tier: DiskTier) -> float:
        def one(index: int) -> None:
            target = self._targets[index]
            assert tier.read([self._addresses[index]], [target], soon()) == [Outcome.HIT]

        return self._timed(one)

    def raw_write(self) -> float:
        def one(index: int) -> None:
            fd = os.open(self._raw / str(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
            assert os.pwrite(fd, self._records[index], 0) == len(self._records[index])
            os.close(fd)

        for path in self._raw.iterdir():
            path.unlink()
        return self._timed(one)

    def raw_read(self) -> float:
        def one(index: int) -> None:
            fd = os.open(self._raw / str(index), os.O_RDONLY | os.O_DIRECT)
            target = self._targets[index]
            assert os.preadv(fd, [target], 0) == len(target)
            os.close(fd)

        return self._timed(one)


def _speed(name: str, ours: Callable[[], float], raw: Callable[[], float], bar: float | None = BAR) -> Row:
    mine, theirs = interleave(ours, raw, rounds=ROUNDS + 2)
    ratio = mine / theirs
    return Row(name, mine, "GB/s", theirs, ratio, bar, bar is None or ratio >= bar)


def _authenticated(record_mib: int) -> list[Row]:
    """Informative: a keyed checksum reads the payload at half the speed. (Writing finds its records sealed.)"""
    with _place() as place, ThreadPoolExecutor(THREADS) as pool:
        turns = _Turns(place, record_mib, pool, secret="a secret of the benchmark")
        with _tier(place, turns.scope) as tier:
            turns.write(tier)
            turns.raw_write()
            name = f"disk verified read {record_mib} MiB x{THREADS} authenticated"
            return [_speed(name, lambda: turns.read(tier), turns.raw_read, bar=None)]


def _sized(record_mib: int) -> list[Row]:
    with _place() as place, ThreadPoolExecutor(THREADS) as pool:
        turns = _Turns(place, record_mib, pool)
        with _tier(place, turns.scope) as tier:
            rows = [
                _speed(f"disk write {record_mib} MiB x{THREADS}", lambda: turns.write(tier), turns.raw_write),
                _speed(f"disk verified read {record_mib} MiB x{THREADS}", lambda: turns.read(tier), turns.raw_read),
            ]
        with _tier(place, turns.scope, sync=True) as tier:
            name = f"disk write {record_mib} MiB x{THREADS} sync: true"
            rows.append(_speed(name, lambda: turns.write(tier), turns.raw_write, bar=None))
        return rows


def _drop_caches() -> bool:
    """Empties the kernel's caches where this user may; a cold listing can not be measured otherwise."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def _listing() -> list[Row]:
    scope = _scope(1)
    with _place() as place:
        with _tier(place, scope) as tier:
            epoch = tier.published_epoch()
            record = sealed_record(scope, sample_address(0), 0)
            assert tier.write([sample_address(0)], [record], soon()) == [Outcome.STORED]
        (top,) = (place / "store").glob("*-*")
        shard = top / epoch / scope.geometries[0].shard.name
        for fan in range(256):
            (shard / f"{fan:02x}").mkdir(mode=0o700, exist_ok=True)
        for number in range(1, LISTED):
            name = sample_address(number).hex()
            fd = os.open(shard / name[:2] / f"{name}.safetensors", os.O_CREAT | os.O_WRONLY, 0o600)
            os.ftruncate(fd, len(record))
            os.close(fd)
        cold = _list_once(place, scope) if _drop_caches() else None
        warm = [_list_once(place, scope) for _ in range(ROUNDS)]
        usable = statistics.median(first for first, _ in warm)
        complete = statistics.median(last for _, last in warm)
        rows = [
            Row(f"disk start to first hit, {LISTED} records, warm", usable, "s"),
            Row(f"disk listing of {LISTED} records, warm", complete, "s", bar=LISTING_BAR, ok=complete < LISTING_BAR),
        ]
        if cold is not None:
            rows.append(Row(f"disk listing of {LISTED} records, cold", cold[1], "s"))
        return rows


def _list_once(place: Path, scope: Scope) -> tuple[float, float]:
    """(seconds until a probe found a record, seconds until all were listed), both from making the client."""
    started = time.perf_counter()
    with _tier(place, scope) as tier:
        assert tier.contains([sample_address(0)], soon()) == [Outcome.HIT]
        usable = time.perf_counter() - started
        assert sum(map(len, tier.scan())) == LISTED
        return usable, time.perf_counter() - started


def build_rows() -> Sequence[Row]:
    """All rows of this benchmark."""
    rows: list[Row] = []
    for record_mib in (1, 8, 32):
        rows += run(f"records of {record_mib} MiB", lambda size=record_mib: _sized(size))
        rows += run(f"authenticated records of {record_mib} MiB", lambda size=record_mib: _authenticated(size))
    return rows + run(f"listing of {LISTED} records", _listing)


if __name__ == "__main__":
    sys.exit(main(build_rows))
