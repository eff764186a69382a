"""A loss of power at any moment: what was reported with ``sync`` is there, and what is served is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_memory import Host, StopAt, Stopped, leftovers, record, used_bytes

from kvstore.messages import Outcome
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.tier_suite import sample_address

ROUNDS = 120
ADDRESSES = 6


def _work(host: Host, reported: set[int], chance: random.Random, *, promises: bool) -> None:
    """Stores, reads and removes at random; ``reported`` are the records that were said to be stored, and promised."""
    for _ in range(chance.randint(1, 10)):
        number = chance.randrange(ADDRESSES)
        what = chance.random()
        if what < 0.7:
            if host.write([number]) == [Outcome.STORED] and promises:
                reported.add(number)
        elif what < 0.85:
            host.read([number])
        else:
            reported.discard(number)
            host.tier.delete([sample_address(number)])


def _live(
    root: Path, disk: MemoryDisk, chance: random.Random, reported: set[int], *, sync: bool, promises: bool = True
) -> None:
    """One process from its start to its end, which comes at any call."""
    host = None
    stop = StopAt(chance.randint(0, 150) if chance.random() < 0.8 else 10**9)
    try:
        host = Host(root, disk, sync=sync, before=stop)
        _work(host, reported, chance, promises=promises)
    except Stopped:
        pass
    if host is not None:
        host.calls.die()


def _seeds() -> Iterator[tuple[random.Random, random.Random | None]]:
    """The choices of a round, and of what survives: nothing but what was synced, or some of the rest too."""
    for seed in range(ROUNDS):
        yield random.Random(seed), None if seed % 2 else random.Random(-seed - 1)


def test_with_sync_nothing_that_was_reported_is_lost(tmp_path: Path) -> None:
    reports = 0
    for chance, survival in _seeds():
        disk, reported = MemoryDisk(), set[int]()
        for _ in range(chance.randint(1, 3)):
            # Somebody without sync works in the same directory: its records are present, and not durable.
            if chance.random() < 0.4:
                _live(tmp_path / "store", disk, chance, reported, sync=False, promises=False)
            _live(tmp_path / "store", disk, chance, reported, sync=True)
        reports += len(reported)
        after = Host(tmp_path / "store", disk.lose_power(survival), sync=True)
        assert after.read(sorted(reported)) == [Outcome.HIT] * len(reported)
    assert reports > ROUNDS


def test_with_sync_nothing_is_lost_that_began_with_a_process_that_was_killed_at_any_call(tmp_path: Path) -> None:
    at, is_whole = 0, False
    while not is_whole:
        disk, stop, first = MemoryDisk(), StopAt(at), None
        try:
            first = Host(tmp_path / "store", disk, sync=True, before=stop)
            first.write([1])
            is_whole = True
        except Stopped:
            at += 1
        if first is not None:
            first.calls.die()
        assert Host(tmp_path / "store", disk, sync=True).write([1]) == [Outcome.STORED]
        assert Host(tmp_path / "store", disk.lose_power(), sync=True).read([1]) == [Outcome.HIT], at
    assert at > 30


def test_without_sync_a_loss_of_power_loses_records_and_serves_nothing_wrong(tmp_path: Path) -> None:
    lost = kept = 0
    for chance, survival in _seeds():
        disk, reported = MemoryDisk(), set[int]()
        for _ in range(chance.randint(1, 3)):
            _live(tmp_path / "store", disk, chance, reported, sync=False)
        disk = disk.lose_power(survival)
        after = Host(tmp_path / "store", disk)
        outcomes = after.read(range(ADDRESSES))
        assert set(outcomes) <= {Outcome.HIT, Outcome.MISS, Outcome.DAMAGED}
        kept += outcomes.count(Outcome.HIT)
        lost += len(reported) - outcomes.count(Outcome.HIT)
        assert after.write(range(ADDRESSES)) == [Outcome.STORED] * ADDRESSES
        assert after.read(range(ADDRESSES)) == [Outcome.HIT] * ADDRESSES
        after.tier.measure()
        assert leftovers(disk) == []
        assert after.tier.status().used_bytes == used_bytes(disk)
    assert lost > 0, "the model lost nothing: it proves nothing"
    assert kept > 0


def test_without_sync_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    for chance, _survival in _seeds():
        disk, reported = MemoryDisk(), set[int]()
        for _ in range(chance.randint(1, 3)):
            _live(tmp_path / "store", disk, chance, reported, sync=False)
        assert Host(tmp_path / "store", disk).read(sorted(reported)) == [Outcome.HIT] * len(reported)


@pytest.mark.parametrize("sync", [False, True])
def test_what_another_process_has_linked_and_not_synced_is_synced_before_it_is_reported(
    tmp_path: Path, sync: bool
) -> None:
    disk = MemoryDisk()
    assert Host(tmp_path / "store", disk).write([1]) == [Outcome.STORED]
    assert Host(tmp_path / "store", disk, sync=sync).write([1]) == [Outcome.STORED]
    after = Host(tmp_path / "store", disk.lose_power())
    assert after.read([1]) == [Outcome.HIT if sync else Outcome.MISS]


def test_the_model_keeps_a_file_only_with_its_bytes_and_its_name(tmp_path: Path) -> None:
    disk = MemoryDisk()
    host = Host(tmp_path / "store", disk, sync=True)
    host.write([1])
    assert Host(tmp_path / "store", disk.lose_power()).read([1]) == [Outcome.HIT]
    (path,) = (path for path in disk.files() if path.endswith(".safetensors"))
    node = disk.files()[path]
    node.synced = b""
    assert Host(tmp_path / "store", disk.lose_power()).read([1]) == [Outcome.DAMAGED]
    node.synced = bytes(record(1))
    for above in list(disk.top.names.values()):
        above.synced_names = {}
    assert Host(tmp_path / "store", disk.lose_power()).read([1]) == [Outcome.MISS]
