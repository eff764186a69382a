"""What the planner promises, one promise a test."""

from __future__ import annotations

import pytest

from kvstore.messages import Outcome, Plan
from kvstore.planner.planner import TierSpec
from tests.planner_stage import EPOCH, FAR, NEAR, Stage, chain

# -- eviction ---------------------------------------------------------------------------------------------------------


def test_b48_the_end_of_a_prompt_goes_before_its_start() -> None:
    stage = Stage(4, (NEAR,))
    a, b, c = chain("a", 4), chain("b", 1), chain("c", 2)
    stage.store("a", a)
    stage.store("b", b)
    assert stage.found(a) == 48
    stage.load("again", a)
    stage.step()
    stage.planner.close("again")
    stage.store("c", c)
    assert stage.found(a) == 32
    assert stage.resident(a) == [0, 1] and stage.resident(b) == [] and stage.resident(c) == [0, 1]


def test_head_outlives_tail_when_a_prompt_is_saved_over_several_steps() -> None:
    stage = Stage(6, (NEAR,))
    a = chain("a", 6)
    for count in (2, 4, 6):
        stage.offer("a", a, count)
        stage.step()
    for index in range(1, 5):
        stage.store(f"b{index}", chain(f"b{index}", 1))
        assert stage.resident(a) == list(range(6 - index))


@pytest.mark.parametrize("tiers", [(NEAR,), (NEAR, FAR)], ids=["no lower tier", "lower writes unreported"])
def test_prompt_longer_than_the_tier_keeps_its_head_over_several_steps(tiers: tuple[TierSpec, ...]) -> None:
    stage = Stage(8, tiers)
    a = chain("a", 20)
    for count in (5, 10, 15, 20):
        stage.offer("a", a, count)
        stage.step(ends=False)
    assert stage.resident(a) == list(range(8))


def test_what_a_newer_request_used_is_not_aged_by_an_older_one() -> None:
    stage = Stage(3, (NEAR,))
    a, b = chain("a", 2), chain("b", 1)
    old = stage.planner.track("old")
    stage.store("a", a)
    stage.store("b", b)
    stage.load("new", a)
    stage.step()
    stage.planner.offer(old, a, 32, stage.blocks)
    stage.store("c", chain("c", 1))
    assert stage.resident(a) == [0, 1] and stage.resident(b) == []


def test_a_read_never_evicts_what_the_same_promise_loads_from_a_slot() -> None:
    stage = Stage(4)
    a, x = chain("a", 3), chain("x", 2)
    for index in (0, 2):
        stage.store(f"{index}", [a[index]])
    stage.store("x", x)
    stage.planner.learn(1, [a[1]])
    stage.rank.store[1, EPOCH].add(a[1])
    assert stage.match("other", x).tokens == 32, "all that leases may hold"
    # The engine has chunk 0; chunk 1 has to be read, and chunk 2 is in a slot that nothing but its use protects.
    assert stage.load("b", a, local=16) == 32
    plan = stage.step()
    assert [fetch[2] for fetch in plan.fetches] == [a[1]]
    assert stage.resident(a) == [1, 2]


# -- lookup -----------------------------------------------------------------------------------------------------------


def test_pending_chunk_is_asked_again_until_the_probe_deadline_and_then_missed() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 2)
    stage.offer("a", a)
    assert (stage.match("b", a).tokens, stage.match("b", a).reason) == (None, "pending")
    stage.now += 0.019
    assert stage.match("b", a).tokens is None
    stage.now += 0.002
    assert stage.match("b", a).tokens is None, "the step that brings the report is still to come"
    stage.step(reports=False)
    stage.step(reports=False)
    assert (stage.match("b", a).tokens, stage.match("b", a).reason) == (0, "probe_deadline")
    assert stage.counters.value("probe_timeouts_total") == 1
    stage.step()
    assert stage.match("b", a).tokens == 32


def test_pending_chunk_is_missed_without_any_step_once_a_load_would_have_timed_out() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 2)
    stage.offer("a", a)
    assert stage.match("b", a).tokens is None
    stage.now += 0.021 + stage.planner.spec.load_timeout
    assert (stage.match("b", a).tokens, stage.match("b", a).reason) == (0, "probe_deadline")


def test_unknown_chunks_are_probed_once_and_an_answer_ends_the_wait() -> None:
    stage = Stage(8)
    a = chain("a", 3)
    match = stage.match("a", a)
    assert match.tokens is None and match.probe == tuple(a)
    stage.planner.learn(1, a[:2])
    stage.planner.answer(stage.planner.track("a"), 2)
    match = stage.match("a", a)
    assert (match.tokens, match.tiers, match.reason) == (32, (1, 1), "never_stored")


def test_pending_chunk_is_awaited_although_a_probe_did_not_find_it() -> None:
    stage = Stage(8)
    a = chain("a", 2)
    stage.offer("a", a)
    stage.planner.answer(stage.planner.track("b"), 0)
    assert stage.match("b", a).reason == "pending"
    stage.step()
    assert stage.match("b", a).tokens == 32


def test_record_that_is_listed_while_its_save_is_on_the_way_is_pending() -> None:
    stage = Stage(8)
    a = chain("a", 1)
    stage.offer("a", a)
    stage.planner.learn(1, a)
    assert stage.match("b", a).reason == "pending", "a commit could neither read the slot nor take another"
    stage.step()
    assert stage.load("b", a) == 16


def test_eviction_from_another_epoch_says_nothing_about_this_one() -> None:
    stage = Stage(8)
    stage.planner.set_epoch(1, "00000000000000e2")
    stage.planner.learn(1, a := chain("a", 1))
    stage.rank.evict(1, EPOCH, a)
    stage.step()
    assert stage.found(a) == 16
    stage.rank.evict(1, "00000000000000e2", a)
    stage.step()
    assert stage.found(a) == 0


def test_verdict_is_cached_and_asking_again_changes_nothing() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 3)
    stage.store("a", a)
    first = stage.match("b", a)
    pins = list(stage.planner.state.slots.pins)
    assert all(stage.match("b", a) is first for _ in range(65))
    assert list(stage.planner.state.slots.pins) == pins
    stage.store("other", chain("other", 1))
    assert stage.match("b", a) == first and list(stage.planner.state.slots.pins) == pins


def test_own_lease_does_not_shorten_the_promise_when_asked_again() -> None:
    stage = Stage(8)
    a = chain("a", 6)
    stage.store("a", a)
    stage.planner.learn(1, more := chain("more", 2))
    assert stage.match("b", a + more).tokens == 128
    stage.planner.learn(1, [b"something else"])
    assert stage.match("b", a + more).tokens == 128


def test_lease_protects_until_its_deadline_and_then_ends() -> None:
    stage = Stage(4, (NEAR,))
    a = chain("a", 2)
    stage.store("a", a)
    assert stage.match("b", a).tokens == 32
    stage.store("c", chain("c", 4))
    assert stage.resident(a) == [0, 1]
    stage.now += 5.0
    stage.step()
    assert stage.planner.lookup.leased_slots == 0
    stage.store("d", chain("d", 4))
    assert stage.resident(a) == []


def test_leases_hold_at_most_half_of_the_slots() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 8)
    stage.store("a", a)
    for name in ("b", "c", "d"):
        assert stage.match(name, a).tokens == 128
    assert stage.planner.lookup.leased_slots == 4


def test_promise_ends_a_token_before_the_prompt_rounded_down_to_a_block() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 2)
    stage.store("a", a)
    assert stage.match("whole", a, tokens=32).tokens == 24
    assert stage.match("one more", a, tokens=33).tokens == 32
    assert stage.match("all local", a, local=24, tokens=32).tokens == 0
    assert stage.match("short", [], tokens=15).tokens == 0
    assert stage.match("empty", [], tokens=0).tokens == 0


@pytest.mark.parametrize(("local", "promise"), [(24, 40), (8, 56), (40, 24), (56, 8)])
def test_b24_local_prefix_inside_a_chunk_loads_only_the_missing_blocks(local: int, promise: int) -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 5)
    stage.store("a", a[:4])
    assert stage.match("b", a, local=local, tokens=80).tokens == promise
    stage.planner.commit(stage.planner.track("b"), a, local, promise, stage.blocks)
    ((_, request, _, parts, lost),) = stage.step().loads
    assert request == "b" and lost == ()
    assert parts[0][1] == a[local // 16] and parts[0][3] == local % 16 // 8
    assert [block for part in parts for block in part[4]] == list(range(local // 8, 8))
    assert all(part[3] == 0 for part in parts[1:])


def test_commit_with_fewer_tokens_than_promised_loads_just_these() -> None:
    stage = Stage(8, (NEAR,))
    a = chain("a", 4)
    stage.store("a", a)
    stage.load("b", a, tokens=24)
    ((*_, parts, lost),) = stage.step().loads
    assert [part[4] for part in parts] == [(0, 1), (2,)] and lost == ()
    assert stage.planner.lookup.leased_slots == 0 and not any(stage.planner.state.slots.pins)


def test_commit_of_nothing_orders_nothing() -> None:
    stage = Stage(8, (NEAR,))
    stage.planner.commit(stage.planner.track("a"), chain("a", 2), 0, 0, stage.blocks)
    assert stage.step().is_empty


# -- load -------------------------------------------------------------------------------------------------------------


def lost_record(stage: Stage, addresses: list[bytes], index: int) -> None:
    """A persistent tier lost a record, and nobody knows."""
    stage.planner.learn(1, addresses)
    stage.rank.store[1, EPOCH] = set(addresses) - {addresses[index]}


def test_failed_chunk_is_a_miss_for_that_request_for_good() -> None:
    stage = Stage(8)
    a = chain("a", 4)
    lost_record(stage, a, 2)
    stage.load("b", a)
    stage.step()
    assert stage.counters.value("delivered_tokens_total") == 32
    assert stage.counters.value("failed_tokens_total", reason="miss") == 32
    stage.rank.store[1, EPOCH].add(a[2])
    stage.planner.learn(1, a)
    match = stage.match("b", a)
    assert (match.tokens, match.reason) == (32, "failed_before")
    assert stage.match("c", a).tokens == 64


def test_promised_chunk_that_is_gone_at_commit_is_reported_lost_from_its_first_block_on() -> None:
    stage = Stage(2, (NEAR,))
    a = chain("a", 2)
    stage.store("a", a)
    assert stage.match("b", a).tokens == 32
    stage.store("c", chain("c", 1))
    stage.planner.commit(stage.planner.track("b"), a, 0, 32, stage.blocks)
    ((*_, parts, lost),) = stage.step().loads
    assert [part[1] for part in parts] == a[:1] and lost == (2, 3)
    assert stage.match("b", a).reason == "failed_before"


def test_two_requests_wait_for_one_read() -> None:
    stage = Stage(8)
    a = chain("a", 2)
    lost_record(stage, [*a, b"x"], 2)
    stage.load("b", a)
    first = stage.step(ends=False)
    stage.load("c", a)
    second = stage.step(ends=False)
    assert (len(first.fetches), len(second.fetches)) == (2, 0)
    assert {part[2] for part in second.loads[0][3]} == {fetch[0] for fetch in first.fetches}
    stage.step()
    assert [request for request, *_ in stage.rank.delivered] == ["b", "b", "c", "c"]
    assert not any(stage.planner.state.slots.pins)


def test_slot_is_readable_only_when_every_rank_reported() -> None:
    stage = Stage(4, (NEAR,), ranks=2)
    a = chain("a", 1)
    stage.offer("a", a)
    stage.step(reports=False)
    stage.planner.absorb(stage.ranks[1].report())
    assert stage.match("b", a).reason == "pending"
    stage.planner.absorb(stage.ranks[1].report())
    assert stage.match("b", a).reason == "pending"
    stage.planner.absorb(stage.ranks[0].report())
    assert stage.match("b", a).tokens == 16


def test_a_hint_that_one_rank_refutes_is_dropped_whatever_kept_the_other_from_looking() -> None:
    stage = Stage(4, ranks=2)
    stage.planner.learn(1, a := chain("a", 1))
    stage.load("b", a)
    stage.step(ends=False)
    stage.ranks[0].end_read(0, Outcome.MISS)
    stage.ranks[1].end_read(0, Outcome.UNAVAILABLE)
    stage.report()
    assert stage.planner.catalog.tiers(a[0]) == 0


# -- fallback and reset -----------------------------------------------------------------------------------------------


def test_fallback_plan_has_nothing_but_the_failure_of_every_unsent_load() -> None:
    stage = Stage(8)
    a = chain("a", 2)
    stage.store("a", a)
    stage.load("b", a)
    stage.offer("c", chain("c", 2))
    plan = stage.planner.fallback_plan()
    assert not (plan.saves or plan.writes or plan.fetches)
    ((_, request, _, parts, lost),) = plan.loads
    assert (request, parts, lost) == ("b", (), (0, 1, 2, 3))
    assert not any(stage.planner.state.slots.pins)
    assert stage.match("b", a).tokens == 32, "nothing is known to have failed before the ranks say so"
    stage.rank.plans.append(plan)
    stage.rank.execute()
    stage.report()
    assert stage.match("b", a).reason == "failed_before"


def test_reset_drops_everything_and_late_reports_of_the_old_generation_have_no_effect() -> None:
    stage = Stage(8)
    a, b = chain("a", 2), chain("b", 2)
    stage.store("a", a)
    stage.offer("b", b)
    old: Plan = stage.step(ends=False, reports=False)
    stage.planner.reset()
    assert len(stage.planner.catalog) == 0 and stage.planner.state.generation == old.generation + 1
    stage.rank.end_everything()
    stage.report()
    assert len(stage.planner.catalog) == 0
    slots = stage.planner.state.slots
    assert slots.free == slots.count and stage.planner.orders.open == 0
    stage.offer("b", chain("b", 4))
    assert stage.step().is_empty, "KV from before a reset must not be saved after it"
    stage.store("c", c := chain("c", 2))
    assert stage.found(c) == 32


OTHER_EPOCH = "00000000000000e2"


def test_another_epoch_of_a_tier_forgets_what_that_tier_had_and_no_more() -> None:
    stage = Stage(2, tiers=(NEAR, FAR, TierSpec("third", False, 1000)))
    a, b = chain("a", 2), chain("b", 2)
    stage.store("a", a)
    stage.store("b", b)
    stage.planner.set_epoch(1, EPOCH)
    assert stage.planner.catalog.hint_counts == [0, 4, 4]
    stage.planner.set_epoch(1, OTHER_EPOCH)
    assert stage.planner.catalog.hint_counts == [0, 0, 4]
    assert stage.match("slots", b).tiers == (0, 0)
    stage.planner.close("slots")
    assert stage.match("third", a).tiers == (2, 2)
    stage.planner.close("third")
    stage.planner.set_epoch(2, OTHER_EPOCH)
    assert stage.found(b) == 32
    assert stage.found(a) == 0


def test_a_write_that_was_sent_in_another_epoch_is_not_believed() -> None:
    stage = Stage(8)
    a = chain("a", 2)
    stage.offer("a", a)
    stage.step(ends=False)
    stage.planner.set_epoch(1, OTHER_EPOCH)
    stage.rank.end_everything()
    stage.report()
    assert stage.planner.catalog.hint_counts == [0, 0]
    assert stage.found(a) == 32, "the slots hold it all the same"
    stage.planner.close("a")
    stage.store("again", a)
    assert stage.rank.store[1, OTHER_EPOCH] == set(a)
    assert stage.planner.catalog.hint_counts == [0, 2]


def test_a_write_that_was_not_sent_yet_is_done_in_the_new_epoch() -> None:
    stage = Stage(8)
    a = chain("a", 2)
    stage.offer("a", a)
    stage.planner.set_epoch(1, OTHER_EPOCH)
    stage.step()
    assert stage.rank.store == {(1, OTHER_EPOCH): set(a)}
    assert stage.planner.catalog.hint_counts == [0, 2]


def test_a_read_that_was_sent_in_another_epoch_fills_no_slot() -> None:
    stage = Stage(2)
    a, b = chain("a", 2), chain("b", 2)
    stage.store("a", a)
    stage.store("b", b)
    stage.load("again", a)
    stage.step(ends=False)
    stage.planner.set_epoch(1, OTHER_EPOCH)
    stage.rank.end_everything()
    stage.report()
    assert stage.found(a) == 0
    slots = stage.planner.state.slots
    assert slots.free == slots.count and stage.planner.orders.open == 0
    stage.planner.check()
