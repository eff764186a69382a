"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_faults import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A disk tier whose operating system and clocks the test controls."""
    bench = Bench(tmp_path / "store")
    yield bench
    bench.calls.fail.clear()
    bench.close()
