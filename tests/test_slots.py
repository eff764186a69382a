"""Slot memory and the cpu tier's settings."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.config.load import parse
from kvstore.errors import ConfigError, ContractError
from kvstore.tiers import slots
from kvstore.tiers.cpu import TIER, CpuConfig, default_capacity
from kvstore.tiers.slots import SlotArena, available_memory, populate_by_advice, populate_by_locking
from kvstore.units import GIB, MIB, PAGE

SLOT = 3 * PAGE


@pytest.fixture
def arena():
    made = SlotArena(SLOT, 5)
    yield made
    made.close()


def test_a_slot_is_writable_aligned_and_of_its_size(arena):
    for slot in range(5):
        buffer = arena.buffer(slot)
        assert (buffer.nbytes, buffer.format, buffer.readonly) == (SLOT, "B", False)
        assert arena.array(slot).ctypes.data % PAGE == 0


def test_slots_do_not_share_bytes(arena):
    for slot in range(5):
        arena.array(slot)[:] = slot + 1
    assert [set(arena.array(slot).tolist()) for slot in range(5)] == [{i + 1} for i in range(5)]


def test_buffer_and_array_are_views_of_the_same_bytes(arena):
    arena.buffer(2)[7] = 99
    assert arena.array(2)[7] == 99


@pytest.mark.parametrize("slot", [-1, 5])
def test_a_slot_out_of_range_is_refused(arena, slot):
    with pytest.raises(ContractError):
        arena.array(slot)


@pytest.mark.parametrize(("size", "count"), [(0, 1), (PAGE + 1, 1), (PAGE, 0)])
def test_a_slot_is_whole_pages_and_there_is_one(size, count):
    with pytest.raises(ContractError):
        SlotArena(size, count)


def test_close_is_idempotent_and_views_outlive_it():
    arena = SlotArena(SLOT, 2)
    view = arena.buffer(1)
    view[:] = b"\x07" * SLOT
    arena.close()
    arena.close()
    assert bytes(view) == b"\x07" * SLOT
    with pytest.raises(ContractError):
        arena.array(0)


@pytest.mark.parametrize("populate", [populate_by_advice, populate_by_locking])
def test_prefault_brings_every_page_in_and_changes_none(populate, monkeypatch):
    monkeypatch.setattr(slots, "PREFAULT_PIECE", 2 * MIB)
    before, after = threading.Semaphore(0), threading.Semaphore(0)

    def in_steps(address: int, length: int) -> bool:
        before.acquire()
        accepted = populate(address, length)
        after.release()
        return accepted

    pieces = 4
    arena = SlotArena(2 * MIB, pieces, populate=(in_steps,))
    arena.array(0)[:] = 0xA5  # written before its pages are populated
    for piece in range(pieces):
        arena.array(piece)[::PAGE] = piece + 1
        before.release()
        after.acquire()
    assert arena.wait_prefault(30)
    assert set(arena.array(0)[1::PAGE].tolist()) == {0xA5}
    for piece in range(pieces):
        assert set(arena.array(piece)[::PAGE].tolist()) == {piece + 1}
    arena.close()


def _resident_bytes(arena: SlotArena) -> int:
    start = arena.array(0).ctypes.data
    inside, resident = False, 0
    with open("/proc/self/smaps") as lines:  # noqa: PTH123  (a virtual file, read line by line)
        for line in lines:
            head = line.split(" ", 1)[0]
            if "-" in head:
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low < start + arena.total_bytes and start < high
            elif inside and head == "Rss:":
                resident += int(line.split()[1]) * 1024
    return resident


@pytest.mark.parametrize("populate", [populate_by_advice, populate_by_locking])
def test_prefault_makes_the_memory_resident(populate):
    cold = SlotArena(MIB, 16, prefault=False)
    assert _resident_bytes(cold) == 0
    warm = SlotArena(MIB, 16, populate=(populate,))
    assert warm.wait_prefault(30)
    assert _resident_bytes(warm) >= warm.total_bytes
    cold.close()
    warm.close()


def test_a_refused_way_of_prefaulting_falls_back_to_the_next():
    calls = []

    def refused(address: int, length: int) -> bool:
        calls.append("refused")
        return False

    arena = SlotArena(MIB, 4, populate=(refused, populate_by_locking))
    assert arena.wait_prefault(30)
    assert calls == ["refused"]
    arena.close()


def test_without_any_way_of_prefaulting_slots_still_work():
    arena = SlotArena(MIB, 4, populate=(lambda address, length: False,))
    arena.array(3)[:] = 1
    assert not arena.wait_prefault(0)
    arena.close()


def test_close_stops_a_prefault_that_is_under_way(monkeypatch):
    monkeypatch.setattr(slots, "PREFAULT_PIECE", PAGE)
    started, go_on = threading.Event(), threading.Event()
    pieces = []

    def slow(address: int, length: int) -> bool:
        pieces.append(address)
        started.set()
        return go_on.wait(30)

    arena = SlotArena(PAGE, 1000, populate=(slow,))
    assert started.wait(30)
    closer = threading.Thread(target=arena.close)
    closer.start()
    while not arena._stop.is_set():
        pass
    go_on.set()
    closer.join(30)
    assert not closer.is_alive()
    assert len(pieces) == 1


def test_more_than_the_available_memory_is_refused_before_it_is_allocated():
    with pytest.raises(ConfigError, match=r"capacity: 4\S* TiB of slots asked for, 2\S* GiB of memory available"):
        SlotArena(GIB, 4096, available_bytes=2 * GIB)


def test_the_system_tells_its_available_memory(tmp_path):
    assert available_memory() > 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:    7 kB\n")
    assert available_memory(meminfo) == 7 * 1024
    meminfo.write_text("MemTotal:  100 kB\n")
    with pytest.raises(ConfigError, match="Linux"):
        available_memory(meminfo)


def test_without_a_device_slots_are_not_pinned_and_say_why(monkeypatch):
    monkeypatch.setattr(slots, "_DEVICE_NODES", ())
    arena = SlotArena(PAGE, 1, pin="auto")
    assert (arena.pinned, arena.pin_note) == (False, "no device")
    arena.close()


def test_required_pinning_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(slots, "_DEVICE_NODES", ())
    with pytest.raises(ConfigError, match=r"pin: required.*no device.*pin: auto"):
        SlotArena(PAGE, 1, pin="required")


def test_the_cpu_tier_has_sane_defaults_on_every_machine(monkeypatch):
    assert 0 < CpuConfig().capacity == default_capacity() <= 4 * GIB
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": GIB // PAGE}.__getitem__)
    assert CpuConfig().capacity == GIB // 4
    assert (TIER.name, TIER.volatile, TIER.is_default, TIER.make) == ("cpu", True, True, None)
    assert TIER.capacity_bytes(CpuConfig(capacity=123)) == 123


@pytest.mark.parametrize("bad", ["capacity: 4", "capacity: 4G", "pin: maybe", "required: 1", "pins: auto"])
def test_the_cpu_tier_refuses_bad_settings_by_name(bad):
    with pytest.raises(ConfigError, match=rf"tiers\[0\]\.{bad.split(':')[0]}:"):
        parse(f"tiers: [{{type: cpu, {bad}}}]", {"cpu": TIER})


def test_the_cpu_tier_reads_its_settings_from_yaml():
    config = parse("tiers: [{type: cpu, capacity: 3GiB, pin: 'off', required: true}]", {"cpu": TIER})
    assert config.settings_of("cpu") == CpuConfig(capacity=3 * GIB, pin="off", required=True)


def test_a_slot_array_is_uint8_and_contiguous(arena):
    array = arena.array(1)
    assert (array.dtype, array.shape, array.flags.c_contiguous) == (np.uint8, (SLOT,), True)
