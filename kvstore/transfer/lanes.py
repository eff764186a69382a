"""Lanes: the only threads that do I/O.

A lane serves one tier of one executor: a bounded queue, loads before stores, a few threads. What a job raises stops
here: the lane logs it and calls the job's ``failed``, so that every job ends exactly once, in its own callback or in
that one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Set
from time import monotonic

log = logging.getLogger(__name__)

Job = tuple[Callable[[], None], Callable[[], None]]


def contain(what: str, call: Callable[[], None]) -> bool:
    """Calls ``call`` on a background thread of ours and logs what it raises; whether it returned."""
    try:
        call()
    except Exception:
        log.exception("%s failed", what)
        return False
    return True


class Lane:
    """A bounded queue with its threads. `submit` never blocks; may be called from any thread.

    Args:
        name: for the threads and the log.
        threads: number of threads; daemons, so that a hung tier can not keep the process from ending.
        depth: jobs that may wait; loads have as much again for themselves.
        cpus: cores for the threads; None keeps those of the caller. An engine pins its worker to the cores that
            compute, and a thread inherits that.
    """

    def __init__(self, name: str, threads: int, depth: int, cpus: Set[int] | None = None) -> None:
        self.name = name
        self._depth = depth
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._running = 0
        self._is_open = True
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(cpus,), name=f"kvstore-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[], None], failed: Callable[[], None], *, is_load: bool) -> bool:
        """Queues a job; False if the queue is full or the lane closed, and then nothing of it was called."""
        with self._wake:
            queue = self._loads if is_load else self._stores
            if not self._is_open or len(queue) >= self._depth:
                return False
            queue.append((run, failed))
            self._wake.notify()
            return True

    @property
    def pending(self) -> int:
        """Jobs that wait or run."""
        with self._wake:
            return len(self._loads) + len(self._stores) + self._running

    def close(self, timeout: float) -> int:
        """Takes no more jobs, finishes the queued ones for ``timeout`` seconds; the number that was dropped."""
        deadline = monotonic() + timeout
        with self._wake:
            self._is_open = False
            self._wake.notify_all()
            while self._loads or self._stores or self._running:
                left = deadline - monotonic()
                if left <= 0:
                    break
                self._wake.wait(left)
            dropped = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._wake.notify_all()
        for _run, failed in dropped:
            failed()
        return len(dropped)

    def _work(self, cpus: Set[int] | None) -> None:
        if cpus:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                log.debug("lane.affinity lane=%s error=%s", self.name, error)
        while True:
            with self._wake:
                while not self._loads and not self._stores:
                    if not self._is_open:
                        return
                    self._wake.wait()
                run, failed = self._loads.popleft() if self._loads else self._stores.popleft()
                self._running += 1
            if not contain(f"lane.job lane={self.name}", run):
                failed()
            with self._wake:
                self._running -= 1
                self._wake.notify_all()
