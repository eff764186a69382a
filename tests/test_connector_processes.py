"""B17: the connector's roles in processes of their own, which share nothing but what vLLM carries between them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from made_up import tok
from stub_engine import DEADLINE, Lab, StubEngine
from stub_setup import Setup
from stub_worker import StubWorker, Work


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


class RemoteWorker:
    """A `StubWorker` behind a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def _ask(self, verb: str, *arguments: Any) -> Any:
        self._pipe.send((verb, arguments))
        assert self._pipe.poll(DEADLINE), f"a worker does not answer {verb}"
        return self._pipe.recv()

    def handshake(self) -> Any:
        return self._ask("handshake")

    def step(self, work: Work) -> Any:
        return self._ask("step", work)

    def close(self) -> None:
        self._ask("close")


def serve_worker(setup: Setup, rank: int, pipe: Connection) -> None:
    """A worker's process."""
    worker = StubWorker(setup, rank)
    verb = ""
    while verb != "close":
        verb, arguments = pipe.recv()
        pipe.send(getattr(worker, verb)(*arguments))


def run_scheduler(setup: Setup, pipes: list[Connection], answer: Connection) -> None:
    """The scheduler's process: stores 80 tokens through the workers, then asks."""
    engine = StubEngine(setup, [RemoteWorker(pipe) for pipe in pipes]).warm()
    before = engine.lookup(tok(81, 1))
    engine.generate(tok(80, 1))
    engine.settle()
    after = engine.lookup(tok(81, 1))
    # The forward in each worker's process asserts that the loaded bytes are right.
    engine.generate(tok(81, 1))
    answer.send((os.getpid(), before, after, engine.count("delivered_tokens_total")))
    engine.close()


def test_b17_scheduler_and_workers_in_separate_processes_agree(lab: Lab) -> None:
    setup, spawn = lab.setup(ranks=2), multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    answer, asked = spawn.Pipe()
    processes = [
        spawn.Process(target=serve_worker, args=(setup, rank, theirs)) for rank, (_, theirs) in enumerate(pipes)
    ]
    processes.append(spawn.Process(target=run_scheduler, args=(setup, [ours for ours, _ in pipes], asked)))
    for process in processes:
        process.start()
    try:
        assert answer.poll(3 * DEADLINE), "no answer"
        pid, before, after, delivered = answer.recv()
        for process in processes:
            process.join(DEADLINE)
    finally:
        for process in processes:
            process.kill()
    assert pid != os.getpid()
    assert (before, after, delivered) == (0, 80, 80)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    # Five records of each shard.
    assert len(lab.files()) == 10
