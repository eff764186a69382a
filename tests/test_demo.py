"""The demo's table, JSON and expectations, its counting, its control and its settings."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from demo import cases, scenario
from demo.cases import CASES, Result, Sample, failed_expectations, to_json
from demo.counts import CountsMissing, by_tier, delivered_after, grown, records_in
from demo.progress import Progress
from demo.prompts import text_of
from demo.scenario import BLOCK_TOKENS, CHUNKS, REPETITIONS, Store, engine_arguments, engine_environment
from demo.table import render
from demo.zeros import zero_payloads
from kvstore.errors import RecordDamaged
from kvstore.keys import Namespace
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.messages import Outcome
from kvstore.snapshots import SnapshotWriter
from kvstore.tiers.record import RecordFormat

TTFT = {"cold": 3.0, "engine_prefix_hit": 0.06, "cpu_hit": 0.07, "disk_hit_after_kill": 0.11, "zero_control": 0.11}


def _results() -> dict[str, Result]:
    """Results as they should be: medians as in TTFT, 5 samples a case."""
    made = {}
    for case in CASES:
        tier = cases.TIER_OF.get(case)
        delivered = {tier: 3968} if tier else {}
        seconds = TTFT.get(case, 3.0)
        made[case] = Result(
            tuple(Sample(seconds * spread, delivered, case != "zero_control") for spread in (1, 0.5, 2, 9, 0.9))
        )
    return made


def _changed(results: dict[str, Result], case: str, change: Callable[[Sample], Sample]) -> dict[str, Result]:
    """One sample of ``case`` changed."""
    first, *others = results[case].samples
    return {**results, case: Result((change(first), *others))}


def test_good_results_meet_every_expectation() -> None:
    assert failed_expectations(_results()) == []


@pytest.mark.parametrize("case", ["cpu_hit", "disk_hit_after_kill", "zero_control"])
def test_one_hit_with_too_few_external_tokens_fails(case: str) -> None:
    bad = _changed(_results(), case, lambda s: Sample(s.ttft_s, {cases.TIER_OF[case]: 3800}, s.identical))
    (problem,) = failed_expectations(bad)
    assert case in problem
    assert "3800 external tokens" in problem


@pytest.mark.parametrize("case", ["cold", "engine_prefix_hit", "no_connector"])
def test_external_tokens_where_none_may_be_fail(case: str) -> None:
    bad = _changed(_results(), case, lambda s: Sample(s.ttft_s, {"cpu": 32}, s.identical))
    (problem,) = failed_expectations(bad)
    assert problem.startswith(f"{case}: 32 external tokens")


def test_a_cpu_hit_served_from_disk_fails() -> None:
    bad = _changed(_results(), "cpu_hit", lambda s: Sample(s.ttft_s, {"cpu": 3936, "disk": 32}, s.identical))
    (problem,) = failed_expectations(bad)
    assert "came from disk" in problem


@pytest.mark.parametrize("case", [case for case in CASES if case != "zero_control"])
def test_one_output_that_differs_fails(case: str) -> None:
    bad = _changed(_results(), case, lambda s: Sample(s.ttft_s, s.delivered, False))
    (problem,) = failed_expectations(bad)
    assert problem.startswith(f"{case}: 4 of 5")


def test_one_output_of_zeros_that_is_identical_fails() -> None:
    bad = _changed(_results(), "zero_control", lambda s: Sample(s.ttft_s, s.delivered, True))
    (problem,) = failed_expectations(bad)
    assert problem.startswith("zero_control: 1 of 5")


@pytest.mark.parametrize(("case", "limit"), [("cpu_hit", 1.5), ("disk_hit_after_kill", 3.0)])
def test_a_hit_slower_than_its_multiple_of_the_engines_own_fails(case: str, limit: float) -> None:
    def at(ratio: float) -> dict[str, Result]:
        samples = tuple(Sample(0.06 * ratio, s.delivered, True) for s in _results()[case].samples)
        return {**_results(), case: Result(samples)}

    assert failed_expectations(at(limit * 0.999)) == []
    (problem,) = failed_expectations(at(limit * 1.01))
    assert case in problem
    assert f"allowed {limit}x" in problem


def test_json_has_exactly_the_six_cases_with_three_fields() -> None:
    document = to_json(_results())
    assert list(document) == list(CASES)
    assert document["cold"] == {"ttft_s": 3.0, "external_tokens": 0, "identical": True}
    assert document["disk_hit_after_kill"] == {"ttft_s": 0.11, "external_tokens": 3968, "identical": True}
    assert document["zero_control"]["identical"] is False


def test_one_sample_that_differs_makes_the_case_not_identical() -> None:
    bad = _changed(_results(), "cpu_hit", lambda s: Sample(s.ttft_s, s.delivered, False))
    assert to_json(bad)["cpu_hit"]["identical"] is False


def test_table_has_a_row_a_case_and_its_columns_line_up() -> None:
    head, rule, *rows = render(_results()).splitlines()
    assert len(rows) == 6
    assert all(name in head for name in ("TTFT", "external tokens delivered", "identical"))
    column = head.index("identical")
    assert all(re.match(r"(yes|no) \(\d of 5\)$", row[column:]) for row in rows)
    assert "70.0 ms" in rows[2]
    assert "3968 (cpu)" in rows[2]
    assert rows[4].endswith("no (0 of 5)")
    assert set(rule) == {"-", " "}


def _publish(folder: Path, role: str, moment: float, counters: list[tuple[str, str, str, float]]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    SnapshotWriter(folder, "engine1", role, clock=lambda: moment).publish({"counters": counters})


def test_delivered_tokens_are_summed_by_tier_over_the_parts(tmp_path: Path) -> None:
    name = "delivered_tokens_total"
    _publish(tmp_path / "s", "scheduler", 100.0, [(name, "cpu", "", 64.0), ("requests_total", "", "", 1.0)])
    _publish(tmp_path / "s", "rank0", 100.0, [(name, "cpu", "", 32.0), (name, "disk", "", 32.0)])
    assert delivered_after(tmp_path / "s", 99.0) == {"cpu": 96, "disk": 32}


def test_a_snapshot_from_before_the_request_ended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.counts.UP_TO_DATE_SECONDS", 0.0)
    _publish(tmp_path / "s", "scheduler", 101.0, [])
    _publish(tmp_path / "s", "rank0", 99.0, [])
    with pytest.raises(CountsMissing, match="rank0"):
        delivered_after(tmp_path / "s", 100.0)


def test_growth_leaves_out_what_stayed() -> None:
    assert grown({"cpu": 10, "disk": 5}, {"cpu": 42, "disk": 5, "redis": 1}) == {"cpu": 32, "redis": 1}
    assert by_tier([("x", "cpu", "", 1.0), ("x", "cpu", "late", 2.0)]) == {"cpu": 3}


def _record_format() -> RecordFormat:
    # 3 x 1000 bytes: the payload needs a pad, whose place the control must leave alone.
    layer = LayerGeometry("layer", "float32", "heads tokens content", (2, 5, 25), 1000)
    group = GroupGeometry(0, "full_attention", 32, "LBHNC", (layer, layer, layer))
    return RecordFormat(Namespace({"model": "test"}), RecordGeometry(group, 32))


def test_zeroed_records_are_zeros_and_still_verify(tmp_path: Path) -> None:
    records, address = _record_format(), bytes(range(32))
    slot = memoryview(bytearray(records.slot_bytes))
    slot[HEADER_BYTES : HEADER_BYTES + records.payload_bytes] = bytes([7]) * records.payload_bytes
    records.seal(address, slot)
    path = tmp_path / "model" / "epoch" / "aa.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(slot)
    assert records_in(tmp_path) == 1
    assert zero_payloads(tmp_path) == 1
    changed = memoryview(path.read_bytes())
    assert not any(changed[HEADER_BYTES:])
    assert records.verify(address, changed) is Outcome.HIT


def test_the_control_refuses_a_file_that_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "aa.safetensors").write_bytes(bytes(8192))
    with pytest.raises(RecordDamaged):
        zero_payloads(tmp_path)


def test_the_yaml_is_accepted_and_its_slots_are_four_times_all_prompts(tmp_path: Path) -> None:
    from kvstore.config import load
    from kvstore.tiers.base import tier_types

    store = Store.under(tmp_path / "store")
    kinds = tier_types()
    settings = load(store.settings, kinds)
    assert settings.chunk_tokens == BLOCK_TOKENS
    capacity = {tier.type: kinds[tier.type].capacity_bytes(tier.settings) for tier in settings.tiers}
    head = scenario.HIDDEN // scenario.HEADS
    record = HEADER_BYTES + BLOCK_TOKENS * scenario.LAYERS * scenario.KV_HEADS * 2 * head * 4
    assert capacity["cpu"] >= 4 * CHUNKS * (REPETITIONS + 1) * record
    assert capacity["disk"] >= CHUNKS * (REPETITIONS + 1) * record


def test_only_an_engine_with_a_store_gets_the_connector(tmp_path: Path) -> None:
    store = Store.under(tmp_path / "store")
    assert "kv_transfer_config" not in engine_arguments(tmp_path, None)
    transfer = engine_arguments(tmp_path, store)["kv_transfer_config"]
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"config": str(store.settings)}
    assert engine_arguments(tmp_path, store)["block_size"] == BLOCK_TOKENS


def test_engines_are_bound_to_one_core_they_may_use() -> None:
    environment = engine_environment({"PATH": "x"})
    assert int(environment["VLLM_CPU_OMP_THREADS_BIND"]) in os.sched_getaffinity(0)
    assert environment["PATH"] == "x"


def test_prompts_are_the_same_in_every_run_and_differ_from_their_start() -> None:
    assert text_of(1, 50) == text_of(1, 50)
    assert len({text_of(number, 50)[:40] for number in range(6)}) == 6


def test_progress_off_a_terminal_is_a_line_a_step(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as out:
        progress = Progress(2, out)
        progress.step("first")
        progress.step("second")
        progress.end()
        out.seek(0)
        first, second = out.read().splitlines()
    assert first.endswith("1/2 first")
    assert second.endswith("2/2 second")
