"""The short version of ``make crash``: real kills of real processes that share one directory."""

from __future__ import annotations

from pathlib import Path

from tests.crash.rounds import play


def test_killed_processes_leave_a_directory_that_is_whole_exact_and_within_its_capacity(tmp_path: Path) -> None:
    tally = play(tmp_path, rounds=10, seed=7)
    assert tally.verdicts.violations == []
    assert tally.rounds == 10
    assert tally.kills >= 10
    assert tally.verified > 50
    assert tally.evictions > 0
    assert tally.verdicts.samples > 10
