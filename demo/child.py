"""The demo's side of an engine process: start, ask, kill, close.

Invariant: when an `EngineProcess` has ended, by whatever way, nothing of its process tree runs any more and what the
tree left in shared memory is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 240.0
ANSWER_SECONDS = 120.0
CLOSE_SECONDS = 15.0
GONE_SECONDS = 15.0


class EngineFailed(RuntimeError):
    """The engine did not start, did not answer in time or ended; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave: seconds to the first token, and all tokens."""

    ttft_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Identified:
    """A process that can not be mistaken for a later one with the same number: ``started`` is in clock ticks."""

    pid: int
    started: int


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """(parent, start) of a process that runs; None for one that is gone or a zombie, which runs no more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def tree_of(pid: int) -> list[Identified]:
    """``pid`` and all its descendants that run now."""
    found = {
        int(entry.name): seen
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (seen := _parent_and_start(int(entry.name))) is not None
    }
    wanted, tree = [pid], []
    while wanted:
        current = wanted.pop()
        if current in found:
            tree.append(Identified(current, found[current][1]))
            wanted.extend(child for child, (parent, _) in found.items() if parent == current)
    return tree


def is_running(process: Identified) -> bool:
    """Whether exactly this process still runs."""
    seen = _parent_and_start(process.pid)
    return seen is not None and seen[1] == process.started


def kill_tree(tree: Sequence[Identified], seconds: float = GONE_SECONDS) -> list[Identified]:
    """SIGKILLs every process of ``tree`` and waits until they are gone; returns those that are not."""
    for process in tree:
        if is_running(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while (left := [process for process in tree if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def shared_memory_of(tree: Sequence[Identified], folder: Path = Path("/dev/shm")) -> set[Path]:
    """Files in shared memory that processes of ``tree`` have mapped: a killed engine can not unlink them itself.

    Found by inode: a semaphore is mapped before it gets its name, so the name in the map is one that never was there.
    """
    mapped: set[int] = set()
    for process in tree:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            fields = (line.split(maxsplit=5) for line in lines)
            mapped |= {int(field[4]) for field in fields if len(field) == 6 and field[5].startswith(f"{folder}/")}
    found: set[Path] = set()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.lstat().st_ino in mapped:
                found.add(path)
    return found


class EngineProcess:
    """One engine in a process of its own. Not thread-safe; every method blocks, each with a bound.

    Args:
        arguments: of ``vllm.LLM``, with ``kv_transfer_config`` as a mapping.
        environment: the whole environment of the process.
        log: the file that gets everything the engine prints.
        module: what serves the commands in the engine's process.
    """

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path, module: str = "demo.engine"
    ) -> None:
        self._log = log
        self._buffer = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                cwd=Path(__file__).resolve().parent.parent,
                # A session of its own: Ctrl-C reaches the demo only, which then ends the engine in order.
                start_new_session=True,
            )
        try:
            self.send(arguments)
            self.receive(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def generate(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Runs one greedy request to its end.

        Raises:
            EngineFailed: no answer in time, or the engine ended.
        """
        self.send({"verb": "generate", "prompt": list(prompt), "tokens": tokens})
        answer = self.receive(ANSWER_SECONDS)
        return Answer(float(answer["ttft_s"]), tuple(answer["tokens"]))

    def forget(self) -> None:
        """Empties the engine's own prefix cache, and nothing of the store.

        Raises:
            EngineFailed: the engine refused.
        """
        self.send({"verb": "forget"})
        if not self.receive(ANSWER_SECONDS)["forgotten"]:
            raise EngineFailed("the engine did not empty its prefix cache")

    def kill(self) -> None:
        """SIGKILLs the whole tree and waits until it is gone. Idempotent.

        Raises:
            EngineFailed: a process survived.
        """
        tree = tree_of(self._process.pid)
        leftovers = shared_memory_of(tree)
        left = kill_tree(tree)
        for path in leftovers:
            path.unlink(missing_ok=True)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait(GONE_SECONDS)
        if left:
            raise EngineFailed(f"processes survived SIGKILL: {', '.join(str(p.pid) for p in left)}")

    def close(self) -> None:
        """Asks the engine to end, and kills what has not ended in time."""
        tree = tree_of(self._process.pid)
        with contextlib.suppress(BrokenPipeError, EngineFailed):
            self.send({"verb": "close"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        # The engine's own children may outlive it for a moment, and by then nobody's descendants they are.
        leftovers = shared_memory_of(tree)
        kill_tree(tree)
        for path in leftovers:
            path.unlink(missing_ok=True)
        self.kill()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one command without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            EngineFailed: none came in time, or the engine ended.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(f"did not answer within {seconds:.0f} s")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._failed("ended")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> EngineFailed:
        tail = self._log.read_text(errors="replace").splitlines()[-40:]
        return EngineFailed("\n".join([f"the engine {what}; the end of its log:", *tail]))
