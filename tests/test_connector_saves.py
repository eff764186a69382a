"""What the connector saves, and when: under cut prompts, preemption, few slots and an engine that stops stepping."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from load_faults import disk_client
from made_up import tok
from stub_engine import DEADLINE, Lab, StubEngine


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


@pytest.mark.parametrize("chunk", [16, 48])
def test_b27_every_full_chunk_is_stored_once_however_the_prompt_is_cut(lab: Lab, chunk: int) -> None:
    rng = random.Random(chunk)
    engine = lab.engine(chunk=chunk, cpu=8192)
    prompts = [tok(rng.randint(1, 400), 100 + number) for number in range(50)]
    total = 0
    for prompt in prompts:
        engine.add(prompt)
        engine.run([rng.randint(1, len(prompt)) for _ in range(400)])
        total += len(prompt) // chunk
    engine.settle()
    assert engine.count("stored_chunks_total", tier="cpu") == total
    assert engine.count("stored_chunks_total", tier="disk") == total == len(lab.files())
    assert engine.count("skipped_chunks_total") == engine.count("failed_stores_total") == 0
    lab.end(engine)
    engine = lab.engine(chunk=chunk, cpu=8192)
    for prompt in prompts:
        assert engine.lookup([*prompt, 7]) == len(prompt) // chunk * chunk
        engine.generate([*prompt, 7])
    assert engine.count("delivered_tokens_total", tier="disk") == total * chunk
    assert len(lab.files()) == total + sum(len(prompt) % chunk == chunk - 1 for prompt in prompts)


def test_chunks_of_requests_that_were_preempted_are_stored_and_right(lab: Lab) -> None:
    engine = lab.engine(blocks=24)
    ids = [engine.add(tok(80, number), max_tokens=60) for number in range(3)]
    requests = [engine.scheduler.requests[request_id] for request_id in ids]
    engine.run()
    engine.settle()
    assert sum(request.num_preemptions for request in requests) > 0
    for number in range(3):
        engine.generate([*tok(80, number), 7])
    assert engine.count("delivered_tokens_total") >= 3 * 80
    assert engine.free_blocks == 23


def test_decoded_tokens_are_stored_only_where_asked(lab: Lab) -> None:
    engine = lab.engine()
    engine.generate(tok(40, 1), max_tokens=60)
    engine.settle()
    assert len(lab.files()) == 2
    lab.end(engine)
    engine = lab.engine(more="save: {decode: true}\n")
    request_id = engine.generate(tok(40, 1), max_tokens=60)
    engine.settle()
    # The last token was sampled and never computed.
    assert len(lab.files()) == 99 // 16
    tokens = tok(40, 1) + engine.outputs[request_id]
    assert engine.lookup(tokens) == 96
    engine.generate(tokens)


def test_two_slots_serve_prompts_that_are_longer(lab: Lab) -> None:
    engine = lab.engine(cpu=2)
    for _ in range(6):
        engine.generate(tok(81, 1))
        engine.generate(tok(81, 2))
    engine.settle()
    assert len(lab.files()) >= 2
    assert engine.lookup(tok(81, 1)) >= 16
    assert engine.planner.state.slots.free + engine.planner.state.slots.evictable == 2


def test_without_a_cpu_tier_chunks_go_through_staging_slots_to_disk_and_back(lab: Lab) -> None:
    tokens = lab.stored(cpu=0)
    assert len(lab.files()) == 5
    engine = lab.engine(cpu=0)
    engine.generate([*tokens, 7])
    engine.settle()
    assert engine.count("delivered_tokens_total", tier="disk") == 80
    assert engine.count("stored_chunks_total", tier="disk") == 0
    assert engine.planner.state.slots.free == engine.planner.state.slots.count


def test_the_chain_to_disk_ends_without_another_step(lab: Lab) -> None:
    engine = lab.engine()
    request_id = engine.add(tok(81, 1))
    engine.until(lambda: bool(engine.outputs[request_id]))
    _wait_without_steps(lambda: len(lab.files()) == 5)


def test_bursts_after_idle_do_not_decay(lab: Lab) -> None:
    engine = lab.engine(cpu=32)
    saved, written = [0], [0]
    for burst in range(5):
        request_id = engine.add(tok(31 * 16 + 1, burst))
        engine.until(lambda name=request_id: bool(engine.outputs[name]))
        _wait_without_steps(lambda: _side(engine).executor.pending_jobs == 0)
        saved.append(int(_side(engine).counters.value("copied_in_bytes_total")) // 4096)
        written.append(len(lab.files()))
    assert [after - before for before, after in pairwise(saved)] == [31] * 5
    grown = [after - before for before, after in pairwise(written)]
    # Pending lower writes hold a quarter of the slots; the rest of a burst is skipped and counted.
    assert min(grown) >= 8


def test_a_slot_that_a_write_reads_is_not_filled_under_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lab.engine(cpu=8)
    client, release = disk_client(engine), threading.Event()
    write = client.write

    def held(*arguments: Any) -> Any:
        release.wait(DEADLINE)
        return write(*arguments)

    monkeypatch.setattr(client, "write", held)
    for number in range(4):
        engine.generate(tok(129, number))
    release.set()
    engine.settle()
    assert engine.count("skipped_chunks_total", tier="cpu", reason="slot_busy") > 0
    lab.end(engine)
    assert len(lab.files()) >= 2
    engine = lab.engine()
    for number in range(4):
        engine.generate(tok(129, number))
    engine.settle()
    assert engine.count("failed_tokens_total") == 0
    assert engine.count("delivered_tokens_total") >= 16


def _side(engine: StubEngine) -> Any:
    return engine.workers[0].connector.worker_side


def _wait_without_steps(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_whose_reports_are_lost_delays_a_hit_and_never_makes_one(lab: Lab) -> None:
    engine = lab.engine(ranks=2)
    engine.silent_ranks = {1}
    request_id = engine.add(tok(81, 1))
    while not engine.outputs[request_id]:
        engine.silent_ranks = {1}
        engine.step()
    assert engine.count("stored_chunks_total") == 0
    engine.settle()
    assert engine.count("stored_chunks_total", tier="cpu") == engine.count("stored_chunks_total", tier="disk") == 5
    engine.generate(tok(81, 1))
    assert engine.count("delivered_tokens_total", tier="cpu") == 80


def test_after_a_reset_nothing_old_is_found_here_and_everything_elsewhere(lab: Lab) -> None:
    tokens = tok(81, 1)
    engine = lab.engine()
    engine.generate(tokens)
    engine.settle()
    assert engine.scheduler.reset_connector_cache()
    assert engine.lookup(tokens) == 0
    engine.generate(tokens)
    engine.settle()
    assert engine.lookup(tokens) == 80
    assert engine.scheduler.reset_connector_cache()
    assert engine.lookup(tokens) == 0
    lab.end(engine)
    other = lab.engine()
    other.generate(tokens)
    assert other.count("delivered_tokens_total", tier="disk") == 80
