"""Ways in which the read of one record can go wrong, under a running stub engine."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from stub_engine import Lab, StubEngine

from connectors.vllm.requests import LiveRequest
from kvstore.messages import Outcome
from kvstore.tiers.os_calls import OsCalls

Undo = Callable[[], None]

KINDS = ("damaged", "short_read", "io_error", "unavailable", "exception_in_the_lane", "deadline", "gone")


def addresses(engine: StubEngine, tokens: Sequence[int]) -> list[bytes]:
    """Addresses of the full chunks of a prompt."""
    side = engine.side
    live = LiveRequest(engine.request(tokens), "")
    return list(live.addresses(side._addresser_of(live), side._hashes_per_chunk))


def disk_client(engine: StubEngine, rank: int = 0) -> Any:
    """The disk tier of a worker."""
    channels = engine.workers[rank].connector.worker_side.executor._space.channels
    return next(channel.client for channel in channels if channel is not None)


class ReadFault:
    """Makes reads of one address fail on one rank, in the way that ``kind`` names."""

    def __init__(
        self, kind: str, lab: Lab, engine: StubEngine, address: bytes, monkeypatch: pytest.MonkeyPatch, rank: int = 0
    ) -> None:
        self._release = threading.Event()
        self._engine, self._rank, self._address = engine, rank, address
        self._stuck = threading.Event()
        shard = f"s{rank}of{engine.setup.ranks}"
        (self._file,) = [path for path in lab.files() if path.stem == address.hex() and shard in path.parts]
        self._monkeypatch = monkeypatch
        getattr(self, f"_{kind}")()

    def _damaged(self) -> None:
        raw = bytearray(self._file.read_bytes())
        raw[5000] ^= 1
        self._file.write_bytes(raw)

    def _gone(self) -> None:
        self._file.unlink()

    def _on_file(self, do: Callable[[OsCalls, int, memoryview, int], int]) -> None:
        real = OsCalls.read

        def read(calls: OsCalls, fd: int, buffer: memoryview, offset: int) -> int:
            if Path(f"/proc/self/fd/{fd}").readlink() == self._file:
                return do(calls, fd, buffer, offset)
            return real(calls, fd, buffer, offset)

        self._monkeypatch.setattr(OsCalls, "read", read)

    def _short_read(self) -> None:
        real = OsCalls.read
        self._on_file(lambda calls, fd, buffer, offset: 0 if offset else real(calls, fd, buffer[:4096], 0))

    def _io_error(self) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self._on_file(fail)

    def _on_tier(self, do: Callable[[], list[Outcome]]) -> None:
        client = disk_client(self._engine, self._rank)
        real = client.read

        def read(asked: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
            outcomes = do() if self._address in asked else []
            return outcomes or list(real(asked, buffers, deadline))

        self._monkeypatch.setattr(client, "read", read)

    def _unavailable(self) -> None:
        self._on_tier(lambda: [Outcome.UNAVAILABLE])

    def _exception_in_the_lane(self) -> None:
        def fail() -> list[Outcome]:
            raise RuntimeError("a bug in a tier")

        self._on_tier(fail)

    def _deadline(self) -> None:
        def hang() -> list[Outcome]:
            self._stuck.set()
            self._release.wait(60)
            return []

        self._on_tier(hang)

    def pass_deadline(self) -> None:
        """For ``deadline``: once nothing but the stuck read runs, the executor's clock jumps behind the deadline."""
        executor = self._engine.workers[self._rank].connector.worker_side.executor
        self._engine.until(lambda: self._stuck.is_set() and executor.pending_jobs == 1)
        # One step more takes what the other reads have brought.
        self._engine.step()
        executor._space.clock = lambda: monotonic() + 1000

    def release(self) -> None:
        """Lets a stuck read go on, as late as it is."""
        self._release.set()
