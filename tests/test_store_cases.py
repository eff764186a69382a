"""Acceptance cases of the disk tier and of snapshots at the level of the library's store."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import tok
from stub_store import BLOCK, NAMESPACE, TABLE, StoreLab

from kvstore.config import parse
from kvstore.engine import Store
from kvstore.errors import LayoutMismatch
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.tiers.base import Tier, tier_types
from kvstore.tiers.os_calls import OsCalls
from kvstore.transfer.copies import PagedMemory

PROMPT = tok(80, 1)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path / "store")
    yield lab
    lab.close()


def _disk(store: Store) -> Tier:
    (channel,) = [channel for channel in store._executor._space.channels if channel is not None]
    return channel.client


# -- B36 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["HNC", "KNX"])
def test_b36_two_readings_of_one_shape_both_round_trip_under_their_declaration(axes: str) -> None:
    # [blocks, heads 2, tokens 16, K then V] and [blocks, K/V 2, tokens 16, heads x dim] have the very same shape.
    shape = (2, BLOCK, 16)
    page = 2 * BLOCK * 16 * 4
    group = GroupGeometry(0, "full_attention", BLOCK, f"B{axes}", (LayerGeometry("l", "float32", axes, shape, page),))
    geometry = RecordGeometry(group, BLOCK)
    array = np.random.default_rng(1).random((8, *shape), dtype=np.float32)
    memory = PagedMemory.from_arrays(geometry, {"l": array})
    slot = np.full(geometry.slot_bytes, 0xA5, np.uint8)
    memory.save([3], slot)
    memory.load(slot, 0, [6])
    assert np.array_equal(array[6], array[3]) and not np.array_equal(array[5], array[3])
    other = GroupGeometry(0, "full_attention", BLOCK, "BHNC" if axes == "KNX" else "BKNX", group.layers)
    assert group.identity() != other.identity()


def test_b36_memory_of_another_shape_than_declared_is_refused_by_the_name_of_its_layer() -> None:
    layer = LayerGeometry("layer.7", "float32", "HNC", (2, BLOCK, 16), 2 * BLOCK * 16 * 4)
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", BLOCK, "BHNC", (layer,)), BLOCK)
    with pytest.raises(LayoutMismatch, match=r"layer\.7"):
        PagedMemory.from_arrays(geometry, {"layer.7": np.zeros((8, BLOCK, 2, 16), np.float32)})


# -- B40 ------------------------------------------------------------------------------------------------------------


def test_b40_a_store_is_a_snapshot_although_its_writes_come_later(
    lab: StoreLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.store() as store:
        client, go_on = _disk(store), threading.Event()
        real = client.write

        def write(*arguments: Any) -> Any:
            assert go_on.wait(60)
            return real(*arguments)

        monkeypatch.setattr(client, "write", write)
        lab.pages(store).write(PROMPT, TABLE)
        ended = threading.Thread(target=store.store, args=(PROMPT, TABLE), kwargs={"timeout": 0.0})
        ended.start()
        ended.join(60)
        # The writer is held; the engine reuses the blocks for another prompt.
        lab.pages(store).write(tok(80, 2), TABLE)
        go_on.set()
        assert store.flush(60)
    with lab.store() as again:
        assert lab.loaded(again, PROMPT) == 80


# -- B69 ------------------------------------------------------------------------------------------------------------


def test_b69_what_was_stored_is_found_after_a_restart_and_not_written_again(lab: StoreLab) -> None:
    with lab.store() as store:
        lab.save(store, PROMPT)
    before = {path: path.stat().st_ino for path in lab.files()}
    with lab.store() as again:
        assert lab.loaded(again, PROMPT) == 80
        lab.save(again, PROMPT)
    assert {path: path.stat().st_ino for path in lab.files()} == before and len(before) == 5


_DIES = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from made_up import tok
from stub_store import StoreLab
lab = StoreLab(Path(sys.argv[2]))
print(lab.save(lab.store(), tok(80, 1)).tiers["disk"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_b69_what_was_reported_stored_survives_sigkill(lab: StoreLab) -> None:
    here = str(Path(__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", _DIES, here, str(lab.root)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.stdout.split(), ran.returncode) == (["5"], -signal.SIGKILL)
    assert lab.loaded(lab.store(), PROMPT) == 80


# -- B76 ------------------------------------------------------------------------------------------------------------


def test_b76_records_spread_evenly_over_256_directories() -> None:
    from blake3 import blake3

    from kvstore.tiers.disk_names import record_name

    counts: dict[str, int] = {}
    for number in range(50_000):
        fan, _name = record_name(blake3(number.to_bytes(8, "little")).digest())
        counts[fan] = counts.get(fan, 0) + 1
    assert len(counts) == 256 and max(counts.values()) < 50_000 * 0.02


def test_b76_a_lookup_lists_no_directory(lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.store(cpu=0) as store:
        lab.save(store, PROMPT)
        assert store._prober.is_listing_done.wait(60)
        listed: list[int] = []
        real = OsCalls.scandir
        monkeypatch.setattr(OsCalls, "scandir", lambda calls, fd: (listed.append(fd), real(calls, fd))[1])
        assert store.lookup(PROMPT) == 80
        assert store.lookup(tok(80, 3)) == 0
        assert listed == []


# -- B83 ------------------------------------------------------------------------------------------------------------


def _slow_store(lab: StoreLab, monkeypatch: pytest.MonkeyPatch, gate: threading.Semaphore) -> Store:
    """A store over 40 chunks of memory whose disk writes each wait for the gate."""
    chunks = 40
    layer = LayerGeometry("l", "float32", "HNC", (2, BLOCK, 16), 2 * BLOCK * 16 * 4)
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", BLOCK, "BHNC", (layer,)), BLOCK)
    text = (
        f"chunk_tokens: {BLOCK}\ntiers: [{{type: cpu, capacity: {200 * geometry.slot_bytes}B}}, "
        f"{{type: disk, path: {lab.root}, capacity: 64MiB, min_free: 0%}}]\nstats: {{snapshot_dir: 'off'}}\n"
    )
    arrays = {"l": np.random.default_rng(5).random((chunks, 2, BLOCK, 16), dtype=np.float32)}
    store = Store(parse(text, tier_types()), NAMESPACE, geometry, PagedMemory.from_arrays(geometry, arrays))
    client = _disk(store)
    real = client.write

    def write(*arguments: Any) -> Any:
        gate.acquire()
        return real(*arguments)

    monkeypatch.setattr(client, "write", write)
    return store


def test_b83_close_finishes_queued_writes_and_says_what_it_dropped(
    lab: StoreLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Semaphore(0)
    store = _slow_store(lab, monkeypatch, gate)
    store.store(tok(40 * BLOCK, 9), list(range(40)), timeout=0.0)
    queued = store._executor.pending_jobs
    assert queued == 40
    gate.release(40)
    assert store.close(timeout=60) == 0
    assert len(lab.files()) == 40


def test_b83_a_close_without_time_drops_whole_writes_only(lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(0)
    store = _slow_store(lab, monkeypatch, gate)
    store.store(tok(40 * BLOCK, 9), list(range(40)), timeout=0.0)
    dropped = store.close(timeout=0.05)
    running = 40 - dropped
    gate.release(40)
    assert 0 < running <= 4 and dropped == 40 - running
    for path in lab.files():
        assert path.stat().st_size == 8192
    assert len(lab.files()) <= running
