"""What the connector promises and delivers, in cases of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import tok
from stub_engine import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


def test_b22_a_promise_leaves_at_least_one_token_to_compute(lab: Lab) -> None:
    engine = lab.engine()
    engine.generate(tok(64, 1))
    engine.settle()
    tokens = tok(64, 1) + tok(1, 2)
    assert engine.lookup(tokens[:64]) == 48
    assert engine.lookup(tokens) == 64
    assert engine.lookup(tokens[:63]) == 48
    assert engine.lookup(tokens[:64], local=48) == 0
    assert engine.lookup(tokens[:16]) == 0
    engine.generate(tokens[:64])
    assert engine.count("delivered_tokens_total") == 48
