"""The prober's queue while its thread is held by a tier that hangs."""

from __future__ import annotations

from time import monotonic

from kvstore.transfer.prober import MOST_WAITING, Prober


def test_questions_and_marks_for_a_prober_that_hangs_do_not_pile_up() -> None:
    prober = Prober({}, list)  # not started: no thread takes anything
    for number in range(2 * MOST_WAITING):
        prober.ask(f"r{number}", 0, [bytes(32)], monotonic())
        prober.touch([bytes(32)])
    assert prober._tasks.qsize() == MOST_WAITING
    # What changes where it works is never dropped.
    prober.detach({}, 1)
    prober.drop([], 2)
    assert prober._tasks.qsize() == MOST_WAITING + 2
