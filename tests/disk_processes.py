"""What runs in processes of its own in the tests of the disk tier."""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

from disk_faults import Bench, read, write

from kvstore.messages import Outcome


def bench_at(root: Path, capacity: int, refuse_flags: int = 0) -> Bench:
    """A bench on a directory that others use as well, with the real clocks' pace in lock waits."""
    bench = Bench(root, capacity=capacity)
    bench.calls.refuse_flags = refuse_flags
    return bench


def share(root: Path, capacity: int, seed: int, prompts: int, rounds: int, pipe: Connection) -> None:
    """Random stores and reads of the same prompts as everybody else; sends how many of each, or the exception."""
    try:
        bench, choose = bench_at(root, capacity), random.Random(seed)
        tier = bench.open()
        stored = hits = 0
        for _ in range(rounds):
            number = choose.randrange(prompts)
            if choose.random() < 0.5:
                (outcome,) = write(tier, [number])
                assert outcome in (Outcome.STORED, Outcome.SKIPPED), outcome
                stored += outcome == Outcome.STORED
            else:
                (outcome,) = read(tier, [number])  # compares the bytes of a hit
                assert outcome in (Outcome.HIT, Outcome.MISS), outcome
                hits += outcome == Outcome.HIT
        pipe.send((stored, hits))
    except BaseException as error:
        pipe.send(repr(error))
        raise


def write_until_killed(root: Path, capacity: int, first: int, refuse_flags: int, pipe: Connection) -> None:
    """Stores one record after the other, and sends the number of each that was reported stored."""
    tier = bench_at(root, capacity, refuse_flags).open()
    number = first
    while True:
        assert write(tier, [number]) == [Outcome.STORED]
        pipe.send(number)
        number += 1


def write_slowly(root: Path, capacity: int, number: int, pipe: Connection) -> None:
    """Stores one record by a named draft, and stands still in mid-write until it is told to go on."""
    bench = bench_at(root, capacity, os.O_TMPFILE)
    tier = bench.open()

    def wait() -> None:
        bench.calls.before.clear()
        pipe.send("in mid-write")
        pipe.recv()

    bench.calls.before["write"] = wait
    pipe.send(write(tier, [number]))
    pipe.recv()
    tier.close()
