"""What the connector promises and delivers: cases of the catalogue at the level of a stub engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import tok
from stub_engine import Lab

TABLE = list(range(300, 330))
"""Blocks that nothing else uses, out of the order in which an engine gives them out."""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


def test_b22_a_promise_leaves_at_least_one_token_to_compute(lab: Lab) -> None:
    engine = lab.engine()
    engine.generate(tok(64, 1))
    engine.settle()
    tokens = tok(64, 1) + tok(1, 2)
    assert engine.lookup(tokens[:64]) == 48
    assert engine.lookup(tokens) == 64
    assert engine.lookup(tokens[:63]) == 48
    assert engine.lookup(tokens[:64], local=48) == 0
    assert engine.lookup(tokens[:16]) == 0
    engine.generate(tokens[:64])
    assert engine.count("delivered_tokens_total") == 48


@pytest.mark.parametrize(("local", "promise"), [(0, 64), (8, 56), (24, 40), (40, 24), (56, 8), (64, 0), (72, 0)])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_b24_a_local_prefix_that_ends_inside_a_chunk_is_not_overwritten(
    lab: Lab, tier: str, local: int, promise: int
) -> None:
    tokens = tok(64, 1) + tok(16, 2)
    engine = lab.engine(block=8)
    engine.generate(tokens[:64])
    engine.settle()
    if tier == "disk":
        lab.end(engine)
        engine = lab.engine(block=8)
    assert engine.deliver(tokens, TABLE, local) == promise
    pages = engine.workers[0].pages
    assert pages.is_untouched(TABLE, 0, local)
    assert pages.holds(tokens[: local + promise], TABLE, local)
    assert pages.is_untouched(TABLE, local + promise, 240)
    assert engine.count("delivered_tokens_total", tier=tier) == promise


def test_b29_nothing_is_loaded_where_the_engine_has_more_than_the_store(lab: Lab) -> None:
    tokens = tok(80, 1)
    engine = lab.engine()
    engine.generate(tokens[:32])
    engine.settle()
    before = engine.count("queried_tokens_total"), engine.count("local_tokens_total")
    assert engine.deliver(tokens, TABLE, local=48) == 0
    assert engine.connector.build_connector_meta(_Idle()).plan.loads == ()
    assert engine.count("queried_tokens_total") - before[0] == 80
    assert engine.count("local_tokens_total") - before[1] == 48
    assert engine.count("hit_tokens_total") == engine.count("delivered_tokens_total") == 0
    assert engine.planner.lookup.leased_slots == 0
    engine.planner.check()


class _Idle:
    num_scheduled_tokens: dict[str, int] = {}  # noqa: RUF012
    has_sync_kv_loads = False


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["inline_from_cpu", "lane_from_disk", "staged_without_cpu"])
def test_b33_every_promised_position_is_copied_on_every_rank(lab: Lab, mode: str, ranks: int) -> None:
    tokens, cpu = tok(160, 1) + tok(1, 2), 0 if mode == "staged_without_cpu" else 512
    engine = lab.engine(ranks=ranks, cpu=cpu)
    engine.generate(tokens[:160])
    engine.settle()
    if mode != "inline_from_cpu":
        lab.end(engine)
        engine = lab.engine(ranks=ranks, cpu=cpu)
    assert engine.deliver(tokens, TABLE) == 160
    for worker in engine.workers:
        assert worker.pages.holds(tokens[:160], TABLE)
        assert worker.pages.is_untouched(TABLE, 160, 480)
        assert worker.invalid == []
    source = "cpu" if mode == "inline_from_cpu" else "disk"
    assert engine.count("delivered_tokens_total", tier=source) == 160


def test_a_hit_in_slots_is_delivered_by_the_step_that_ordered_it(lab: Lab) -> None:
    engine = lab.engine()
    engine.generate(tok(80, 1))
    engine.settle()
    engine.add([*tok(80, 1), 5])
    assert engine.step() == 0
    assert engine.workers[0].finished == ["r2"]
    assert engine.step() == 1


def test_another_salt_and_none_never_hit(lab: Lab) -> None:
    tokens = tok(81, 1)
    engine = lab.engine()
    engine.generate(tokens, salt="a/b@c%\n")
    engine.settle()
    assert engine.lookup(tokens, salt="a/b@c%\n") == 80
    assert engine.lookup(tokens, salt="other") == engine.lookup(tokens) == 0


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(lab: Lab) -> None:
    tokens = tok(81, 1)
    consumer = lab.engine(role="kv_consumer")
    consumer.generate(tokens)
    consumer.settle()
    assert lab.files() == []
    lab.end(consumer)
    producer = lab.engine(role="kv_producer")
    producer.generate(tokens)
    producer.settle()
    assert len(lab.files()) == 5
    assert producer.lookup(tokens) == 0
    lab.end(producer)
    assert lab.engine(role="kv_consumer").lookup(tokens) == 80


def test_the_accounts_add_up_over_mixed_traffic(lab: Lab) -> None:
    engine = lab.engine(blocks=40, caching=True)
    for number in range(12):
        engine.add(tok(48 + 16 * (number % 3), number % 4) + tok(number, 99), max_tokens=1 + number)
    engine.run()
    engine.settle()
    parts = ("local_tokens_total", "hit_tokens_total", "miss_tokens_total")
    assert engine.count("requests_total") == 12
    assert engine.count("queried_tokens_total") == sum(map(engine.count, parts))
    assert engine.count("hit_tokens_total") == engine.count("delivered_tokens_total")
