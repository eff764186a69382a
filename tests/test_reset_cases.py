"""Resets and epochs: what everyone starts anew, what stays, and what comes too late."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_faults import Bench, read, write
from load_faults import disk_client
from made_up import tok
from stub_engine import Lab, StubEngine
from stub_setup import write_model

from connectors.vllm.weights import LoadedWeights
from kvstore.errors import TierUnavailable
from kvstore.messages import Outcome
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.os_calls import OsCalls
from kvstore.transfer import prober
from kvstore.transfer.events import Answer, Listed, take_events
from kvstore.transfer.gate import EpochGate
from tests.planner_stage import EPOCH, Stage, chain

PROMPT, MORE = tok(80, 1), tok(16, 2)
MODES = ("detach", "drop")
PRIVATE = "00000000000000f1"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.close()


def _mode(mode: str) -> str:
    return f"identity: {{on_reset: {mode}}}\nstats: {{every: 50ms, snapshot_dir: 'off'}}\n"


def _engine(lab: Lab, mode: str = "detach", **settings: Any) -> StubEngine:
    """An engine of this mode, with short pauses between two looks at the published epoch."""
    setup = _setup(lab, mode, **settings)
    engine = StubEngine(setup)
    lab._engines.append(engine)
    return engine.warm()


def _setup(lab: Lab, mode: str, **settings: Any) -> Any:
    setup = lab.setup(**settings)
    text = setup.config.read_text()
    setup.config.write_text(text.replace("stats: {snapshot_dir: 'off'}\n", _mode(mode)))
    return setup


def _published(lab: Lab) -> str:
    try:
        return next(lab.store.glob("model-*/epoch")).read_text()
    except (StopIteration, FileNotFoundError):
        return ""  # being replaced


def _epoch(engine: StubEngine) -> str:
    return str(engine.planner.state.epochs[1])


def _records(lab: Lab, epoch: str) -> list[Path]:
    # Not by a recursive glob, which fails where a directory vanishes meanwhile.
    roots = lab.store.glob(f"model-*/{epoch}")
    found = (Path(folder) / name for root in roots for folder, _below, names in os.walk(root) for name in names)
    return sorted(path for path in found if path.suffix == ".safetensors")


def _held_writes(engine: StubEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(set when a write is on its way, lets writes go on)."""
    client, started, release = disk_client(engine), threading.Event(), threading.Event()
    real = client.write

    def held(*arguments: Any) -> Any:
        started.set()
        assert release.wait(60)
        return real(*arguments)

    monkeypatch.setattr(client, "write", held)
    return started, release


def _no_io_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.get_ident()
    for name in ("open", "link", "unlink", "stat", "scandir", "read", "write"):
        real = getattr(OsCalls, name)

        def watched(*arguments: Any, _real: Callable[..., Any] = real, _name: str = name) -> Any:
            assert threading.get_ident() != here, f"a reset calls {_name}"
            return _real(*arguments)

        monkeypatch.setattr(OsCalls, name, watched)


# -- B14 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_b14_a_reset_reaches_every_tier_and_writes_that_are_on_their_way(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    other_model = write_model(lab.root / "other-model")
    other = StubEngine(dataclasses.replace(lab.setup(), model=other_model)).warm()
    other.generate(PROMPT)
    other.settle()
    other.close()
    engine = _engine(lab, mode)
    engine.generate(PROMPT)
    engine.settle()
    old = _epoch(engine)
    started, release = _held_writes(engine, monkeypatch)
    engine.generate(MORE)
    assert started.wait(60)
    with monkeypatch.context() as patch:
        _no_io_here(patch)
        assert engine.scheduler.reset_connector_cache() is True
    assert engine.planner.catalog.hint_counts == [0, 0]
    release.set()
    if mode == "drop":
        engine.until(lambda: _published(lab) not in ("", old), "no new epoch is published")
        engine.until(lambda: _epoch(engine) == _published(lab), "the new epoch is not entered")
    engine.warm().settle()
    for tokens in (PROMPT, MORE):
        assert engine.lookup([*tokens, 7]) == 0
    engine.generate(tok(48, 3))
    engine.settle()
    assert engine.lookup([*tok(48, 3), 7]) == 48
    there = _engine(lab, mode)
    found = [there.lookup([*tokens, 7]) for tokens in (PROMPT, MORE, tok(48, 3))]
    # With detach the write that had begun went on under the published epoch: it is of before the reset.
    assert found == ([0, 0, 48] if mode == "drop" else [80, 16, 0])
    other = StubEngine(dataclasses.replace(lab.setup(), model=other_model)).warm()
    assert other.lookup([*PROMPT, 7]) == 80
    other.close()


def test_b14_what_was_dropped_leaves_the_disk_late_links_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(lab, "drop")
    engine.generate(PROMPT)
    engine.settle()
    old = _epoch(engine)
    started, release = _held_writes(engine, monkeypatch)
    engine.generate(MORE)
    assert started.wait(60) and len(_records(lab, old)) == 5
    engine.scheduler.reset_connector_cache()
    engine.until(lambda: _epoch(engine) == _published(lab) != old)
    release.set()
    engine.warm().settle()
    engine.until(lambda: _records(lab, old) == [], "records of a dropped epoch are never collected")
    engine.generate(PROMPT)
    engine.settle()
    assert len(_records(lab, _published(lab))) == 5


def test_records_of_a_private_epoch_live_as_long_as_their_engine(lab: Lab) -> None:
    engine = _engine(lab)
    engine.generate(PROMPT)
    engine.settle()
    engine.scheduler.reset_connector_cache()
    engine.generate(MORE)
    engine.settle()
    private = _epoch(engine)
    assert private != _published(lab)
    other = _engine(lab)
    executor = other.workers[0].connector.worker_side.executor
    assert [executor.collect(1000) for _ in range(3)] == [0, 0, 0]
    assert len(_records(lab, private)) == 1
    lab.end(engine)
    other.until(lambda: _records(lab, private) == [], "records of a dead engine's epoch stay for ever")
    assert len(_records(lab, _published(lab))) == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_before_a_tier_opens_counts_for_what_is_in_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    lab.stored(PROMPT)
    release, real = threading.Event(), LoadedWeights.digest

    def slow(*arguments: Any) -> str:
        assert release.wait(60)
        return real(*arguments)

    monkeypatch.setattr(LoadedWeights, "digest", slow)
    engine = StubEngine(_setup(lab, mode))
    lab._engines.append(engine)
    engine.step()
    assert engine.scheduler.reset_connector_cache()
    release.set()
    engine.warm()
    assert engine.lookup([*PROMPT, 7]) == 0
    lab.end(engine)
    assert _engine(lab).lookup([*PROMPT, 7]) == (80 if mode == "detach" else 0)


def test_a_drop_that_can_not_be_published_keeps_the_tier_closed_until_it_can(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "_RETRY_SECONDS", 0.02)
    lab.stored(PROMPT)
    engine = _engine(lab, "drop")
    is_broken, tried, real = [True], threading.Event(), DiskTier.publish_epoch

    def publish(tier: DiskTier, epoch: str) -> None:
        if is_broken:
            tried.set()
            raise TierUnavailable("a disk that is full")
        real(tier, epoch)

    monkeypatch.setattr(DiskTier, "publish_epoch", publish)
    engine.scheduler.reset_connector_cache()
    assert tried.wait(60)
    assert engine.planner.state.readable == 0
    assert engine.lookup([*PROMPT, 7]) == 0
    engine.generate([*PROMPT, 7])
    is_broken.clear()
    engine.warm().settle()
    assert _epoch(engine) == _published(lab)
    assert engine.count("failed_stores_total") == engine.count("delivered_tokens_total") == 0


# -- another engine --------------------------------------------------------------------------------------------------


def test_an_engine_follows_a_drop_of_another_and_keeps_its_slots(lab: Lab) -> None:
    lab.stored(PROMPT)
    follower, dropper = _engine(lab), _engine(lab, "drop")
    own = tok(48, 4)
    follower.generate(own)
    follower.settle()
    assert follower.lookup([*PROMPT, 7]) == 80
    dropper.scheduler.reset_connector_cache()
    dropper.warm()
    assert follower.lookup([*tok(16, 5), 7]) == 0, "a question is answered in the epoch that is published"
    assert _epoch(follower) == _epoch(dropper) == _published(lab)
    assert follower.lookup([*PROMPT, 7]) == 0
    assert follower.lookup([*own, 7]) == 48, "its slots hold what it computed"
    follower.generate([*own, 7])
    assert follower.count("delivered_tokens_total", tier="cpu") == 48
    follower.settle()
    assert len(_records(lab, _published(lab))) == 3
    assert dropper.lookup([*own, 7]) == 48


def test_an_engine_that_asks_nothing_follows_all_the_same(lab: Lab) -> None:
    follower, dropper = _engine(lab), _engine(lab, "drop")
    dropper.scheduler.reset_connector_cache()
    dropper.warm()
    follower.until(lambda: _epoch(follower) == _published(lab) == _epoch(dropper), "it stays in the old epoch")


def test_an_engine_in_a_private_epoch_follows_nobody(lab: Lab) -> None:
    engine, dropper = _engine(lab), _engine(lab, "drop")
    engine.scheduler.reset_connector_cache()
    private = _epoch(engine)
    dropper.scheduler.reset_connector_cache()
    dropper.warm()
    assert engine.lookup([*PROMPT, 7]) == 0
    assert _epoch(engine) == private != _published(lab)


# -- what comes too late ---------------------------------------------------------------------------------------------


class NamedTier:
    """What a gate needs of a tier."""

    def __init__(self) -> None:
        self.epochs: list[str] = []

    def use_epoch(self, epoch: str) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("term", [("e2", 0), ("e1", 1), ("", 0)])
def test_a_job_that_was_queued_in_another_term_may_not_enter(term: tuple[str, int]) -> None:
    tier: Any = NamedTier()
    gate = EpochGate(tier)
    gate.attached()
    gate.change("e1", 0)
    queued = gate.term
    assert gate.enter(queued)
    gate.change(*term)
    assert not gate.enter(queued)
    assert tier.epochs == ["e1"], "an epoch changed under a job that is inside"
    assert not gate.enter(gate.term)
    gate.leave()
    assert not gate.enter(queued)
    assert gate.enter(gate.term) == bool(term[0])


def test_what_was_learnt_in_another_epoch_is_not_believed() -> None:
    stage = Stage(4)
    a, b = chain("a", 2), chain("b", 2)
    old = [Listed(0, 1, "older", tuple(a)), Answer(0, "r", 0, {(1, "older"): tuple(b)}, 2, 2)]
    take_events(old, stage.planner, lambda _opened: None)
    assert len(stage.planner.catalog) == 0
    new = [Listed(0, 1, EPOCH, tuple(a)), Answer(0, "r", 0, {(1, EPOCH): tuple(b)}, 2, 2)]
    take_events(new, stage.planner, lambda _opened: None)
    assert stage.planner.catalog.hint_counts == [0, 4]


# -- the epochs of a directory ---------------------------------------------------------------------------------------


def test_only_abandoned_epochs_are_collected_piece_by_piece(bench: Bench) -> None:
    published, private, collector = bench.open(), bench.open(), bench.open()
    write(published, range(3))
    private.use_epoch(PRIVATE)
    write(private, range(10, 15))
    assert collector.collect(100) == 0
    private.close()
    assert [collector.collect(2) for _ in range(4)] == [2, 2, 1, 0]
    assert len(bench.records()) == 3
    assert not list(bench.root.glob(f"*/{PRIVATE}")), "empty directories stay"
    assert read(published, range(3)) == [Outcome.HIT] * 3


def test_a_record_that_is_linked_after_its_epoch_was_collected_goes_with_the_next_collection(bench: Bench) -> None:
    late, collector = bench.open(), bench.open()
    write(late, [1])
    collector.publish_epoch(PRIVATE)
    assert collector.collect(100) == 0, "somebody writes in it still"
    write(late, [2])
    late.close()
    assert collector.collect(100) == 2
    assert bench.records() == []


def test_a_client_that_writes_nothing_collects_nothing(bench: Bench) -> None:
    writer, reader = bench.open(), bench.open(writer=False)
    write(writer, [1])
    writer.close()
    reader.publish_epoch(PRIVATE)
    assert reader.collect(100) == 0
    assert len(bench.records()) == 1


@pytest.mark.parametrize("text", ["", "no epoch here!!!", None])
def test_nothing_is_collected_while_no_epoch_is_published(bench: Bench, text: str | None) -> None:
    writer, collector = bench.open(), bench.open()
    write(writer, [1])
    writer.close()
    (file,) = bench.root.glob("*/epoch")
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert collector.collect(100) == 0
    assert len(bench.records()) == 1


def test_a_collection_touches_no_name_that_is_not_a_records(bench: Bench) -> None:
    writer, collector = bench.open(), bench.open()
    write(writer, [1])
    (record,) = bench.records()
    stranger, link = record.with_name("notes.txt"), record.with_name("link")
    stranger.write_text("mine")
    link.symlink_to(bench.root)
    elsewhere = record.parents[3] / "00000000000000aa"
    elsewhere.symlink_to(bench.root.parent)
    writer.close()
    collector.publish_epoch(PRIVATE)
    assert collector.collect(100) == 1
    assert stranger.read_text() == "mine" and link.is_symlink() and elsewhere.is_symlink()


def test_collected_bytes_are_given_back(bench: Bench) -> None:
    writer, collector = bench.open(), bench.open()
    write(writer, range(4))
    writer.close()
    collector.measure()
    before = collector.status().used_bytes
    collector.publish_epoch(PRIVATE)
    assert collector.collect(100) == 4
    assert before and collector.status().used_bytes == bench.used_bytes() == 0


def test_an_epoch_that_is_lost_while_another_is_published_is_a_new_one_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = bench.open(), bench.open()
    old = one.published_epoch()
    real, between = bench.calls.unlink, []

    def unlink(name: str, dir_fd: int) -> None:
        real(name, dir_fd)
        if name == "epoch" and not between:
            between.append(other.published_epoch())

    monkeypatch.setattr(bench.calls, "unlink", unlink)
    one.publish_epoch(PRIVATE)
    assert between == [one.published_epoch()] == [other.published_epoch()]
    assert old not in between
    assert set(bench.leftovers()) == set()


def test_a_full_disk_keeps_the_epoch_that_was_published(bench: Bench) -> None:
    tier = bench.open()
    old = tier.published_epoch()
    bench.calls.fail["note"] = errno.ENOSPC
    with pytest.raises(TierUnavailable, match="No space left"):
        tier.publish_epoch(PRIVATE)
    bench.calls.fail.clear()
    assert tier.published_epoch() == old


_DIES_IN_A_PRIVATE_EPOCH = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from disk_faults import Bench, write
tier = Bench(Path(sys.argv[3])).open()
tier.use_epoch(sys.argv[4])
write(tier, range(3))
print(len(list(Path(sys.argv[3]).rglob("*.safetensors"))), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_private_epoch_of_a_killed_engine_is_collected_and_of_a_living_one_not(bench: Bench) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", _DIES_IN_A_PRIVATE_EPOCH, str(here), str(here.parent), str(bench.root), PRIVATE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "3\n"
        collector = bench.open()
        assert collector.collect(100) == 0
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(60) == -9
    assert collector.collect(100) == 3
    assert read(collector, range(3)) == [Outcome.MISS] * 3
