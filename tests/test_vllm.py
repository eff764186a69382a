"""The main job on a real vLLM: hits change nothing but the time, across resets, kills and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.record import parse_header, payload_checksum
from tests.engines import BLOCK, Engine, counter, settings, tiny_model, tok

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ANSWER = 16
BURSTS = 5
BURST_PROMPTS = 24
BURST_TOKENS = 15 * BLOCK + 7


def shared_prefix_prompts() -> list[list[int]]:
    """60 prompts whose prefixes are shared in groups, of random lengths 1..200."""
    stems = [tok(200, seed) for seed in range(6)]
    prompts = []
    for number in range(60):
        length = 1 + tok(1, 1000 + number)[0] % 200
        prompts.append(stems[number % 6][:length] + tok(1 + number % 40, 2000 + number))
    return prompts


def burst(number: int) -> list[list[int]]:
    """Prompts that no other burst has."""
    return [tok(BURST_TOKENS, 10_000 + 100 * number + i) for i in range(BURST_PROMPTS)]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Polls; the bound only catches a hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def records(folder: Path) -> list[Path]:
    """All records below a store."""
    return sorted((folder / "store").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine says without the connector."""
    with Engine(tmp_path_factory.mktemp("plain"), model, None, "plain") as engine:
        return {
            "shared": engine.batch(shared_prefix_prompts(), ANSWER),
            "exact": engine.batch([tok(64, 7)], ANSWER, logprobs=1),
            "bursts": [engine.batch(burst(number), ANSWER) for number in range(BURSTS)],
            "idle": [engine.batch([tok(31 * BLOCK + 1, 500 + i)], 1) for i in range(BURSTS)],
        }


@pytest.fixture(scope="module")
def warm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """One engine with slots and disk, for the tests that do not kill it."""
    folder = tmp_path_factory.mktemp("warm")
    with Engine(folder, model, settings(folder), "warm") as engine:
        yield engine, folder


def tokens_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def delivered(folder: Path, at_least: float) -> float:
    """Our count of delivered tokens, once it has reached what the test is about."""
    wait_until(lambda: counter(folder, "delivered_tokens_total") >= at_least, "nothing was delivered")
    return counter(folder, "delivered_tokens_total")


def test_b22_a_whole_prompt_in_the_store_leaves_a_block_to_compute(
    warm: tuple[Engine, Path], expected: dict[str, Any]
) -> None:
    engine, folder = warm
    cold = engine.batch([tok(64, 7)], ANSWER)
    wait_until(lambda: counter(folder, "stored_chunks_total", tier="cpu") >= 2, "nothing was stored")
    before = counter(folder, "delivered_tokens_total")
    hit = engine.batch([tok(64, 7)], ANSWER)
    assert delivered(folder, before + 1) - before == 32
    assert tokens_of(cold) == tokens_of(hit) == tokens_of(expected["exact"])


def test_b35_a_hit_gives_the_same_tokens_and_logprobs(warm: tuple[Engine, Path], expected: dict[str, Any]) -> None:
    engine, folder = warm
    engine.batch([tok(64, 7)], ANSWER)
    before = counter(folder, "delivered_tokens_total")
    hit = engine.batch([tok(64, 7)], ANSWER, logprobs=1)
    assert delivered(folder, before + 1) > before
    assert tokens_of(hit) == tokens_of(expected["exact"])
    assert hit[0]["logprobs"] == pytest.approx(expected["exact"][0]["logprobs"], abs=1e-4)


def test_b45_cold_and_warm_runs_of_60_prompts_equal_the_run_without_connector(
    warm: tuple[Engine, Path], expected: dict[str, Any]
) -> None:
    engine, folder = warm
    prompts = shared_prefix_prompts()
    cold = engine.batch(prompts, ANSWER)
    before = counter(folder, "delivered_tokens_total")
    again = engine.batch(prompts, ANSWER)
    assert delivered(folder, before + 1000) - before > 1000
    assert tokens_of(cold) == tokens_of(again) == tokens_of(expected["shared"])
    queried = counter(folder, "queried_tokens_total")
    parts = ("local_tokens_total", "hit_tokens_total", "miss_tokens_total")
    assert queried == sum(counter(folder, part) for part in parts)
    assert counter(folder, "hook_errors_total") == 0


def test_bursts_after_idle_each_save_all_they_can_and_the_chain_ends_without_a_step(
    model: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    # 40 slots of 36 KiB; a burst has 31 chunks and a quarter of the slots may wait for the disk.
    slots, chunks, quarter = 40, 31, 10
    with Engine(tmp_path, model, settings(tmp_path, cpu=f"{slots * 36}KiB"), "few") as engine:
        for number in range(BURSTS):
            outputs = engine.batch([tok(chunks * BLOCK + 1, 500 + number)], 1)
            assert tokens_of(outputs) == tokens_of(expected["idle"][number])
            # No request follows, so no step: what was queued must get there by itself.
            wait_until(lambda n=number: len(records(tmp_path)) >= quarter * (n + 1), "the chain did not end")
        engine.batch([tok(5, 1)], 1)
        wait_until(
            lambda: counter(tmp_path, "stored_chunks_total", tier="cpu") >= chunks * BURSTS, "a burst saved less"
        )
        assert counter(tmp_path, "stored_chunks_total", tier="cpu") == chunks * BURSTS


def test_sigkill_in_a_save_burst_leaves_whole_records_and_usable_prefixes(
    model: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    text = settings(tmp_path)
    cut_short = 0
    for number in range(BURSTS + 1):
        engine = Engine(tmp_path, model, text, f"life-{number}")
        try:
            if number:
                outputs = engine.batch(burst(number - 1), ANSWER)
                assert tokens_of(outputs) == tokens_of(expected["bursts"][number - 1])
                assert delivered(tmp_path, BLOCK) >= BLOCK
                assert counter(tmp_path, "missed_records_total") == 0
            if number < BURSTS:
                before = len(records(tmp_path))
                engine.start_batch(burst(number), ANSWER)
                wait_until(lambda n=before: len(records(tmp_path)) > n, "nothing was saved")
        finally:
            engine.kill()
        assert "ERROR" not in (tmp_path / f"life-{number}.log").read_text()
        whole = records(tmp_path)
        cut_short += number < BURSTS and len(whole) - before < BURST_PROMPTS * (BURST_TOKENS // BLOCK)
        for path in whole:
            content = path.read_bytes()
            header = parse_header(content[:4096])
            assert header.record_bytes == len(content)
            payload = memoryview(content)[4096 : 4096 + header.payload_bytes]
            assert payload_checksum(payload) == header.checksum
        stray = [p for p in (tmp_path / "store").rglob("*") if p.is_file() and ".tmp" in p.name]
        assert not stray
    assert cut_short, "no kill came in the middle of a burst"
