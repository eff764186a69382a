"""What the planner promises about saves, lower writes, accounts, and the work that all of it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvstore.messages import Outcome
from kvstore.planner.planner import TierSpec
from kvstore.planner.slot_table import SlotState
from tests.planner_stage import FAR, NEAR, Stage, chain

STAGING = (FAR,)

# -- saves ------------------------------------------------------------------------------------------------------------


def test_one_save_per_address() -> None:
    stage = Stage(8)
    a = chain("a", 3)
    for name in ("b", "c"):
        stage.offer(name, a)
    plan = stage.step()
    assert [save[2] for save in plan.saves] == a and [write[2] for write in plan.writes] == a
    stage.store("d", a)
    assert stage.counters.value("stored_chunks_total", tier="near") == 3
    assert stage.counters.value("evicted_chunks_total") == 0


def test_missing_block_ends_the_offer() -> None:
    stage = Stage(8)
    a = chain("a", 3)
    stage.blocks[3] = -1
    stage.offer("a", a)
    assert [save[2] for save in stage.step().saves] == a[:1]


def test_failed_save_is_not_readable_and_frees_its_slot() -> None:
    stage = Stage(4, (NEAR,))
    a = chain("a", 2)
    stage.offer("a", a)
    stage.rank.plans.append(stage.planner.plan(stage.now))
    stage.rank.execute(failing_saves=0b10)
    stage.report()
    assert stage.found(a) == 16 and stage.planner.state.slots.free == 3
    assert stage.counters.value("failed_stores_total", tier="near", reason="unavailable") == 1


# -- stealing ---------------------------------------------------------------------------------------------------------


def written_and_unreported(stage: Stage, addresses: list[bytes]) -> None:
    """Chunks that only lower writes pin, whose reports have not come."""
    stage.offer("old", addresses)
    stage.step(ends=False)
    slots = stage.planner.state.slots
    assert all(slots.pins[stage.planner.catalog.slot(a)] for a in addresses)


def test_slot_is_stolen_for_a_save_when_only_lower_writes_pin_it() -> None:
    stage = Stage(4)
    a = chain("a", 2)
    written_and_unreported(stage, a)
    stage.store("fill", chain("fill", 2))
    assert stage.match("reads", a[:1]).tokens == 16  # a lease: now chunk 0 has another pin than its write
    stage.rank.end_everything()
    stage.offer("new", chain("new", 4))
    plan = stage.step()
    assert stage.resident(a) == [0], "the leased one stays"
    assert len(plan.saves) == 3 and plan.saves[-1][2] == b"new/2"
    assert stage.resident(chain("new", 4)) == [0, 1, 2]


def test_what_is_stolen_is_the_tail_first() -> None:
    stage = Stage(4)
    a = chain("a", 2)
    written_and_unreported(stage, a)
    stage.offer("new", chain("new", 3))
    assert stage.resident(a) == [0]


def test_slot_whose_lower_write_really_goes_on_is_not_overwritten() -> None:
    stage = Stage(4)
    a = chain("a", 2)
    written_and_unreported(stage, a)
    stage.offer("new", new := chain("new", 4))
    stage.step(ends=False)
    assert stage.counters.value("skipped_chunks_total", reason="slot_busy") == 2
    assert stage.resident(new) == [0, 1]
    stage.rank.end_everything()
    stage.report()
    assert all(stage.planner.catalog.tiers(x) for x in a), "the write ended well although its slot was given out"
    assert stage.planner.state.slots.free == 2


def test_read_never_takes_a_slot_that_is_being_written() -> None:
    stage = Stage(4)
    written_and_unreported(stage, chain("a", 2))
    stage.planner.learn(1, b := chain("b", 4))
    assert stage.match("b", b).tokens == 32
    stage.planner.commit(stage.planner.track("b"), b, 0, 64, stage.blocks)
    ((*_, parts, lost),) = stage.planner.plan(stage.now).loads
    assert len(parts) == 2 and lost == (4, 5, 6, 7)


def test_five_bursts_that_only_their_next_step_reports_save_all_they_can() -> None:
    stage = Stage(40, write_limit=10)
    saved, written = [], []
    for burst in range(5):
        stage.offer(f"{burst}", chain(f"{burst}", 31))
        before = len(stage.rank.store.get((1, stage.planner.state.epochs[1]), ()))
        stage.step(ends=False)
        saved.append(len(stage.resident(chain(f"{burst}", 31))))
        stage.planner.close(f"{burst}")
        stage.rank.end_everything()
        written.append(len(stage.rank.store[1, stage.planner.state.epochs[1]]) - before)
    assert saved == [31] * 5
    assert written == [10] * 5


# -- lower writes -----------------------------------------------------------------------------------------------------


def test_lower_writes_are_limited_go_head_first_and_are_counted() -> None:
    stage = Stage(40)
    a = chain("a", 31)
    stage.offer("a", a)
    plan = stage.step(ends=False)
    assert [write[2] for write in plan.writes] == a[:20]
    stage.planner.close("a")
    assert stage.counters.value("skipped_chunks_total", reason="write_budget") == 11


def test_lower_write_that_was_skipped_is_offered_again_to_the_next_request() -> None:
    stage = Stage(40, write_limit=3)
    a = chain("a", 8)
    stage.store("a", a)
    assert stage.counters.value("skipped_chunks_total", tier="far") == 5
    assert [bool(stage.planner.catalog.tiers(x)) for x in a] == [True] * 3 + [False] * 5
    stage.rank.write_limit = 100
    stage.offer("b", a)
    plan = stage.step()
    assert plan.saves == () and [write[2] for write in plan.writes] == a[3:]
    assert all(stage.planner.catalog.tiers(x) for x in a)


def test_write_waits_for_the_report_of_a_save_that_an_earlier_plan_ordered() -> None:
    stage = Stage(4)
    a = chain("a", 1)
    stage.rank.set_tier(1, b"")
    stage.step()
    stage.offer("a", a)
    stage.rank.set_tier(1)
    stage.report()
    stage.step(reports=False)
    stage.offer("a", a)
    stage.offer("b", a)
    assert stage.step().writes == ()
    stage.offer("b", a)
    assert [write[2] for write in stage.step().writes] == a


def test_two_lower_tiers_of_one_slot_are_one_slot_held() -> None:
    stage = Stage(40, (NEAR, FAR, TierSpec("farther", False, 1000)))
    stage.offer("a", a := chain("a", 31))
    plan = stage.step(ends=False)
    assert [(write[2], write[4]) for write in plan.writes] == [(x, tier) for x in a[:20] for tier in (1, 2)]


def test_read_only_tier_is_never_written() -> None:
    stage = Stage(4, (NEAR, TierSpec("far", False, 1000, is_writable=False)))
    stage.offer("a", chain("a", 2))
    plan = stage.step()
    assert len(plan.saves) == 2 and plan.writes == ()


def test_staging_slot_is_free_once_its_chunk_is_written_and_is_never_looked_up() -> None:
    stage = Stage(2, STAGING)
    a = chain("a", 2)
    stage.offer("a", a)
    stage.step(ends=False)
    assert stage.match("b", a).reason == "pending"
    stage.rank.end_everything()
    stage.report()
    assert stage.planner.state.slots.free == 2
    assert stage.match("b", a).tiers == (0, 0)
    stage.load("c", a)
    assert len(stage.step().fetches) == 2
    assert stage.counters.value("delivered_tokens_total", tier="far") == 32


# -- accounts ---------------------------------------------------------------------------------------------------------


def prepare(stage: Stage, reason: str) -> tuple[list[bytes], int]:
    """(addresses, tokens) of a prompt of which the match ends for ``reason`` after one chunk at most."""
    a = chain("a", 3)
    stage.store("stored", a[:1])
    asks = stage.planner.track("asks")
    if reason == "never_stored":
        stage.planner.answer(asks, 1)
    elif reason == "failed_before":
        asks.refused_from = 1
    elif reason == "tier_closed":
        stage.planner.learn(1, a)
        stage.rank.set_tier(1, b"")
        stage.step()
    elif reason == "no_slot":
        stage.planner.learn(1, a)
    elif reason == "partial_chunk":
        return a[:1], 30
    return a, 50


@pytest.mark.parametrize(
    "reason", ["never_stored", "failed_before", "tier_closed", "probe_deadline", "no_slot", "partial_chunk"]
)
def test_accounts_add_up_for_every_reason(reason: str) -> None:
    stage = Stage(1 if reason == "no_slot" else 8)
    addresses, tokens = prepare(stage, reason)
    found = stage.match("asks", addresses, tokens=tokens).tokens
    if found is None:
        stage.now += 1
        stage.step(reports=False)
        stage.step(reports=False)
        found = stage.match("asks", addresses, tokens=tokens).tokens
    assert found == 16
    track = stage.planner.track("asks")
    for _ in range(2):
        stage.planner.admit(track, tokens, 0, found)
    count = stage.counters.value
    assert count("queried_tokens_total") == tokens and count("requests_total") == 1
    assert count("hit_tokens_total", tier="near") == 16
    assert count("miss_tokens_total") == tokens - 16
    if reason != "partial_chunk":
        assert count("miss_tokens_total", reason="partial_chunk") == 2
    assert count("miss_tokens_total", reason=reason) > 0


@pytest.mark.parametrize("local", [0, 8, 24])
def test_accounts_add_up_when_the_lease_ended_and_fewer_tokens_were_taken(local: int) -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 4)
    stage.store("a", a)
    assert stage.match("b", a, local=local).tokens == 64 - local
    stage.now += 10
    stage.step()
    stage.planner.admit(stage.planner.track("b"), 65, local, 32)
    count = stage.counters.value
    assert count("local_tokens_total") == local and count("hit_tokens_total", tier="near") == 32
    assert count("miss_tokens_total") == 65 - local - 32


def test_request_that_never_asked_is_accounted_as_filtered() -> None:
    stage = Stage(8)
    stage.planner.admit(stage.planner.track("a"), 100, 8, 0)
    assert stage.counters.value("miss_tokens_total", reason="filtered") == 92


# -- work -------------------------------------------------------------------------------------------------------------


def lines_of(work: Callable[[], Any]) -> int:
    """Executed lines of ``work``. Calls into C count as nothing, so heap entries are counted apart."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def full_stage(slots: int) -> Stage:
    """A stage of one tier whose slots are all READY, made without its reports."""
    stage = Stage(slots, (NEAR,))
    for name, first in enumerate(range(0, slots, 500)):
        stage.blocks = list(range(1000))
        stage.store(f"fill{name}", [f"{index}".encode() for index in range(first, min(slots, first + 500))])
    assert stage.planner.state.slots.ready == slots
    return stage


def test_b56_work_per_store_into_a_full_tier_does_not_grow_with_the_tier() -> None:
    lines = {}
    for slots in (1_000, 100_000):
        stage = full_stage(slots)

        def stores(stage: Stage = stage) -> None:
            for index in range(2000):
                stage.offer(f"new{index}", [f"new{index}".encode()])
                plan = stage.planner.plan(stage.now)
                ((ticket, *_),) = plan.saves
                stage.planner.orders._finish(ticket, Outcome.STORED)
                stage.planner.close(f"new{index}")

        lines[slots] = lines_of(stores)
    assert lines[100_000] < 2 * lines[1_000] and lines[1_000] < 2 * lines[100_000]
    assert lines[100_000] / 2000 < 400


def test_b56_refused_store_examines_a_constant_number_of_entries() -> None:
    work = {}
    for slots in (1_000, 100_000):
        stage = full_stage(slots)
        table = stage.planner.state.slots
        for slot in range(slots):
            table.pin(slot)
        entries = len(table._policy._heap)
        work[slots] = [lines_of(lambda stage=stage, i=i: stage.offer(f"n{i}", [b"n%d" % i])) for i in range(3)]
        assert stage.planner.plan(stage.now).is_empty
        assert len(table._policy._heap) == entries, "entries of the heap were examined"
        assert table.state.count(SlotState.READY) == slots
    assert work[1_000] == work[100_000] and max(work[100_000]) < 200


def test_step_with_nothing_new_does_not_look_at_the_chunks() -> None:
    lines = []
    for chunks in (10, 400):
        stage = Stage(512, (NEAR,))
        a = chain("a", chunks)
        stage.store("warm", a)
        track = stage.offer("a", a)
        stage.step()
        lines.append(lines_of(lambda s=stage, t=track, a=a: s.planner.offer(t, a, 16 * len(a), s.blocks)))
    assert lines[0] == lines[1] < 20
