"""The demo's engine processes: they answer, and however they end, nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.child import EngineFailed, EngineProcess, Identified, is_running, kill_tree, shared_memory_of, tree_of

TREE = """
import subprocess, sys, multiprocessing.shared_memory as shm
block = shm.SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import sys, time; print('up', flush=True); time.sleep(600)"])
print(block.name, flush=True)
child.wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_tree_is_gone_with_grandchildren_and_its_shared_memory_is_found(
    parent: subprocess.Popen[str],
) -> None:
    assert parent.stdout is not None
    names = {parent.stdout.readline().strip() for _ in range(2)} - {"up"}
    tree = tree_of(parent.pid)
    leftovers = shared_memory_of(tree)
    # multiprocessing's own tracker is a third process of the tree.
    assert len(tree) >= 2
    assert all(is_running(process) for process in tree)
    assert {path.name for path in leftovers} == names
    assert kill_tree(tree) == []
    assert not any(is_running(process) for process in tree)
    for path in leftovers:
        path.unlink(missing_ok=True)


FAKE_ENGINE = """
import os, time
from types import SimpleNamespace as Value
time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0")))
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.count = max_tokens
class LLM:
    def __init__(self, offset):
        print("not an answer")
        self.llm_engine, self.offset, self.left = self, offset, []
    def add_request(self, name, prompt, sampling):
        first = prompt["prompt_token_ids"][0] + self.offset
        self.done, self.left = [], [first + number for number in range(sampling.count)]
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        self.done.append(self.left.pop(0))
        return [Value(outputs=[Value(token_ids=list(self.done))])]
    def reset_prefix_cache(self):
        return self.offset == 5
"""


def _fake_engine(folder: Path, source: str) -> dict[str, str]:
    """An environment in which ``vllm`` is ``source``: the engine's process without the engine."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(source)
    (folder / "vllm" / "config.py").write_text("KVTransferConfig = dict\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def _engines_running() -> list[int]:
    return [p.pid for p in tree_of(os.getpid()) if b"demo.engine" in _command(p.pid)]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_an_engine_process_answers_and_closes(tmp_path: Path) -> None:
    environment = _fake_engine(tmp_path, FAKE_ENGINE)
    with EngineProcess({"offset": 5}, environment, tmp_path / "log") as engine:
        answer = engine.generate([10, 11], 3)
        engine.forget()
        assert answer.tokens == (15, 16, 17)
        assert answer.ttft_s > 0
        assert len(_engines_running()) == 1
    assert _engines_running() == []
    assert (tmp_path / "log").read_text() == "not an answer\n"


def test_an_engine_that_keeps_its_prefix_cache_is_a_failure_and_is_killed(tmp_path: Path) -> None:
    environment = _fake_engine(tmp_path, FAKE_ENGINE)
    with (
        pytest.raises(EngineFailed, match="prefix cache"),
        EngineProcess({"offset": 6}, environment, tmp_path / "log") as engine,
    ):
        engine.forget()
    assert _engines_running() == []


def test_an_engine_that_can_not_start_fails_with_the_end_of_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    environment = _fake_engine(tmp_path, "import sys; sys.exit('no engine: the words of the log')\n")
    with pytest.raises(EngineFailed, match="the words of the log"):
        EngineProcess({"model": "none"}, environment, tmp_path / "log")
    assert _engines_running() == []


def _grown_tree(pid: int) -> list[Identified]:
    """The tree of ``pid`` once its engine runs in it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        tree = tree_of(pid)
        if any(b"demo.engine" in _command(process.pid) for process in tree):
            return tree
        time.sleep(0.01)
    raise AssertionError("no engine was started")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    environment = _fake_engine(tmp_path, FAKE_ENGINE)
    (tmp_path / "temporary").mkdir()
    environment |= {"FAKE_START_SECONDS": "600", "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-m", "demo"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stderr is not None
            lines = iter(demo.stderr.readline, "")
            assert any("starting vLLM" in line for line in lines)
            tree = _grown_tree(demo.pid)
            demo.send_signal(number)
            assert demo.wait(30) == 130
            assert demo.stderr.read().splitlines()[-1] == "demo: interrupted"
        finally:
            demo.kill()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not any(is_running(process) for process in tree)
