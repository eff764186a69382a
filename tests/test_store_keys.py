"""Authenticated records through the library: found with their key, a miss with another, and told apart by name."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from disk_cases import PROMPT
from made_up import DIM, HEADS, LAYERS
from stub_store import BLOCK, NAMESPACE, geometry

from kvstore.config import describe, parse
from kvstore.engine import Store
from kvstore.layout import HEADER_BYTES
from kvstore.tiers.base import tier_types
from kvstore.tiers.record import parse_header
from kvstore.tiers.record_key import KEYED_CHECKSUM, RecordKey
from kvstore.transfer.copies import PagedMemory

SECRET = "0123456789abcdef"


def _store(root: Path, secret: str | None) -> Store:
    key = "null" if secret is None else "'${KEY}'"
    text = (
        f"chunk_tokens: {BLOCK}\ntiers: [{{type: disk, path: {root}, capacity: 1MiB, min_free: 0%}}]\n"
        f"identity: {{auth_key: {key}}}\n"
        "limits: {probe_timeout: 30s, load_timeout: 30s}\nstats: {snapshot_dir: 'off'}\n"
    )
    config = parse(text, tier_types(), environ={"KEY": secret or ""})
    assert SECRET not in str(describe(config))
    arrays = {f"layer.{i}": np.zeros((64, HEADS, BLOCK, 2 * DIM), np.float32) for i in range(LAYERS)}
    for seed, array in enumerate(arrays.values()):
        array[:5] = np.random.default_rng(seed).random(array[:5].shape, np.float32)
    return Store(config, NAMESPACE, geometry(), PagedMemory.from_arrays(geometry(), arrays))


@pytest.mark.parametrize("other", [None, "another secret of mine"])
def test_records_are_found_with_their_key_and_with_no_other(
    tmp_path: Path, other: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with _store(tmp_path / "store", SECRET) as store:
            assert store.namespace.fields["key_id"] == RecordKey(SECRET).key_id
            assert store.store(PROMPT, range(5)).tiers == {"disk": 5}
        written = list(tmp_path.rglob("*.safetensors"))
        pages = [parse_header(path.read_bytes()[:HEADER_BYTES]) for path in written]
        assert [page.fields["checksum_algorithm"] for page in pages] == [KEYED_CHECKSUM] * 5
        with _store(tmp_path / "store", other) as store:
            assert store.lookup(PROMPT) == 0
            assert store.store(PROMPT, range(5)).tiers == {"disk": 5}
        with _store(tmp_path / "store", SECRET) as store:
            assert store.retrieve(PROMPT, range(8, 13)) == 80
            assert store.counters.value("missed_records_total", tier="disk") == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 10
    assert SECRET not in caplog.text
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_without_a_key_a_namespace_is_what_it_was(tmp_path: Path) -> None:
    with _store(tmp_path / "store", None) as store:
        assert store.namespace.digest == NAMESPACE.digest
