"""Rounds of SIGKILL under two processes that save, load, delete and evict in one directory.

After every kill a new client opens the directory, and `judge` looks: no wrong bytes, nothing that was reported stored
is gone without an eviction, no file of a dead process, a ledger that equals the real usage, and never over capacity
in any sample under the lock.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, soon
from tests.crash import judge, worker

_LIVE = 2


@dataclass
class Tally:
    """What happened in all rounds."""

    rounds: int = 0
    kills: int = 0
    with_claims: int = 0
    in_removal: int = 0
    verified: int = 0
    stores: int = 0
    evictions: int = 0
    seconds: float = 0.0
    holds: list[int] = field(default_factory=list)
    verdicts: judge.Verdicts = field(default_factory=judge.Verdicts)

    def rows(self) -> list[tuple[str, str]]:
        """The table, row by row."""
        holds = sorted(self.holds) or [0]
        verdicts = self.verdicts
        return [
            ("rounds", str(self.rounds)),
            ("kills", str(self.kills)),
            ("  of these in mid-write (claims open)", str(self.with_claims)),
            ("  of these in mid-removal (ledger dirty)", str(self.in_removal)),
            ("records reported stored", str(self.stores)),
            ("records evicted or deleted", str(self.evictions)),
            ("records verified after a restart", str(self.verified)),
            ("samples under the lock", str(verdicts.samples)),
            ("highest use of the capacity", f"{verdicts.highest / worker.CAPACITY:.1%}"),
            ("lock held p50 / p99 / max", " / ".join(f"{us / 1000:.3f} ms" for us in _quantiles(holds))),
            ("seconds", f"{self.seconds:.0f}"),
            ("violations", str(len(verdicts.violations))),
        ]


def _quantiles(ordered: list[int]) -> tuple[int, int, int]:
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


class Arena:
    """A directory, its live workers and what is known about them."""

    def __init__(self, place: Path, seed: int) -> None:
        self.root = place / "store"
        self.log = place / "log"
        self.tally = Tally()
        self._choose = random.Random(seed)
        self._seeds = itertools.count(seed * 1000)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.crash.worker"])
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._calls = worker.LoggedCalls(worker.Log(self.log), is_named=False)
        worker.opened(self.root, self._calls).close()
        self._history = judge.History(self.log)
        self._records = [worker.record_of(number) for number in range(worker.NUMBERS)]

    def _start(self) -> None:
        while len(self._workers) < _LIVE:
            # One in four can not make files without a name: its drafts have names and locks.
            is_named = self._choose.random() < 0.25
            process = self._context.Process(
                target=worker.run, args=(self.root, self.log, next(self._seeds), is_named), daemon=True
            )
            process.start()
            self._workers.append(process)

    def _sample_until(self, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            judge.sample(self.root, worker.CAPACITY, self.tally.verdicts)

    def play(self) -> None:
        """One round: everybody works for a moment, some are killed, and a restart is judged."""
        tally = self.tally
        self._start()
        before = self.log.stat().st_size
        stop = threading.Event()
        sampler = threading.Thread(target=self._sample_until, args=(stop,))
        sampler.start()
        # At least a few operations of somebody, then a moment by chance.
        end = time.monotonic() + 30
        while self.log.stat().st_size < before + 2000 and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(self._choose.uniform(0, 0.15))
        stop.set()
        sampler.join()
        for _ in range(self._choose.choice((1, 1, 2))):
            victim = self._workers.pop(self._choose.randrange(len(self._workers)))
            tally.verdicts.check(victim.is_alive(), "a worker ended by itself")
            victim.kill()
            victim.join()
            tally.kills += 1
        with judge.locked(self.root) as fd:
            sight = judge.look(self.root, fd)
        tally.with_claims += sight.owed > 0
        tally.in_removal += sight.is_dirty
        tally.verdicts.check(sight.record_bytes + sight.claimed <= worker.CAPACITY, "over capacity after a kill")
        self._restart()
        tally.rounds += 1

    def _restart(self) -> None:
        tier = worker.opened(self.root, self._calls)
        tier.measure()
        sight = judge.settle(self.root, worker.CAPACITY, self._history, self.tally.verdicts)
        buffer = aligned_buffer(worker.SLOT)
        for number, (address, record) in enumerate(self._records):
            if f"{address.hex()}.safetensors" not in sight.names:
                continue
            outcome = tier.read([address], [buffer], soon())[0]
            is_good = outcome == Outcome.MISS or (outcome == Outcome.HIT and buffer == record)
            self.tally.verdicts.check(is_good, f"record {number}: {outcome.name}")
            self.tally.verified += outcome == Outcome.HIT
        tier.close()

    def finish(self) -> Tally:
        """Ends everybody and counts what the log has."""
        for process in self._workers:
            process.kill()
            process.join()
        self._workers.clear()
        self._restart()
        history = self._history
        history.close()
        self.tally.stores, self.tally.evictions, self.tally.holds = history.stores, history.removals, history.holds
        return self.tally


def play(place: Path, rounds: int, seed: int) -> Tally:
    """Plays ``rounds`` rounds in a new directory below ``place``; stops at the first one with a violation."""
    begun = time.monotonic()
    arena = Arena(place, seed)
    try:
        while arena.tally.rounds < rounds and not arena.tally.verdicts.violations:
            arena.play()
    finally:
        tally = arena.finish()
    tally.seconds = time.monotonic() - begun
    return tally
