"""Cases of the catalogue about names, layouts and formats: what is different is apart, and what is odd fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_cases import PROMPT, has_seed, save_seeded
from disk_faults import NEVER, Bench
from stub_store import BLOCK, StoreLab

from kvstore.assembly import Topology, blueprint
from kvstore.config import parse
from kvstore.engine import Store
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.messages import Outcome
from kvstore.metrics import Counters
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers.base import Scope, tier_types
from kvstore.tiers.disk_root import namespace_directory
from kvstore.transfer.copies import PagedMemory

PAIRS = [
    ("a/b", "a-SEP-b"),
    ("a/b", "a_b"),
    ("a--b", "a/b"),
    ("A", "a"),
    ("..", "."),
    ("a/../b", "b"),
    ("@@a", "a"),
    ("a b", "a-b"),
]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_b10_models_whose_names_look_alike_do_not_share_a_record(tmp_path: Path, one: str, two: str) -> None:
    lab = StoreLab(tmp_path / "store")
    first, second = (lab.store(cpu=0, namespace=Namespace({"model": model})) for model in (one, two))
    assert save_seeded(lab, first, PROMPT, 1) == 5
    assert second.lookup(PROMPT) == 0
    assert save_seeded(lab, second, PROMPT, 2) == 5
    assert has_seed(lab, first, PROMPT, 1)
    assert has_seed(lab, second, PROMPT, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    lab.close()


def test_b10_a_salt_is_not_a_part_of_a_models_name(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path / "store")
    first, second = (lab.store(cpu=0, namespace=Namespace({"model": model})) for model in ("a@b", "a"))
    assert save_seeded(lab, first, PROMPT, 1) == 5
    assert second.lookup(PROMPT, salt="b") == 0
    assert save_seeded(lab, second, PROMPT, 2, salt="b") == 5
    assert has_seed(lab, first, PROMPT, 1)
    assert has_seed(lab, second, PROMPT, 2, salt="b")
    lab.close()


def _geometry(axes: str, shape: tuple[int, ...], layers: int) -> RecordGeometry:
    page = 2 * int(np.prod(shape))
    rows = tuple(LayerGeometry(f"layer.{i}", "bfloat16", axes, shape, page) for i in range(layers))
    return RecordGeometry(GroupGeometry(0, "full_attention", BLOCK, axes, rows), BLOCK)


LAYOUTS = {
    "NHD": _geometry("NHD", (BLOCK, 2, 8), 2),
    "HND": _geometry("HND", (2, BLOCK, 8), 2),
    "other heads": _geometry("NHD", (BLOCK, 4, 4), 2),
    "more layers": _geometry("NHD", (BLOCK, 1, 8), 4),
}


@pytest.mark.parametrize("other", [name for name in LAYOUTS if name != "NHD"])
def test_b12_another_layout_of_the_same_size_finds_nothing(bench: Bench, other: str) -> None:
    mine, theirs = sample_scope("b12", LAYOUTS["NHD"]), sample_scope("b12", LAYOUTS[other])
    size = mine.geometries[0].slot_bytes
    assert theirs.geometries[0].slot_bytes == size
    address = sample_address(1)
    assert bench.open(mine).write([address], [sealed_record(mine, address, 1)], NEVER) == [Outcome.STORED]
    tier = bench.open(theirs)
    assert tier.contains([address], NEVER) == [Outcome.MISS]
    assert tier.read([address], [aligned_buffer(size)], NEVER) == [Outcome.MISS]


@pytest.mark.parametrize("other", [name for name in LAYOUTS if name != "NHD"])
def test_b12_a_layout_that_its_namespace_does_not_name_is_not_served(bench: Bench, other: str) -> None:
    namespace = Namespace({"model": "b12"})
    mine, theirs = (Scope(namespace, (LAYOUTS[name],)) for name in ("NHD", other))
    address = sample_address(1)
    bench.open(mine).write([address], [sealed_record(mine, address, 1)], NEVER)
    buffer = aligned_buffer(theirs.geometries[0].slot_bytes)
    assert bench.open(theirs, writer=False).read([address], [buffer], NEVER) == [Outcome.DAMAGED]
    assert bench.counters.value("missed_records_total", tier="disk", reason="geometry") == 1


def _store(place: Path, namespace: Namespace, geometry: RecordGeometry, arrays: dict[str, Any]) -> Store:
    text = (
        f"chunk_tokens: {BLOCK}\ntiers: [{{type: disk, path: {place}, capacity: 64MiB, min_free: 0%}}]\n"
        "limits: {probe_timeout: 30s, load_timeout: 30s}\nstats: {snapshot_dir: 'off'}\n"
    )
    return Store(parse(text, tier_types()), namespace, geometry, PagedMemory.from_arrays(geometry, arrays))


@pytest.mark.parametrize("dtype", ["uint8", "fp8_e4m3"])
def test_b13_scales_inside_a_page_travel_with_its_numbers(tmp_path: Path, dtype: str) -> None:
    content = 2 * 8 + 4 * 2  # K and V of one byte, and a float32 scale for each
    page = 2 * BLOCK * content
    layers = tuple(LayerGeometry(f"layer.{i}", dtype, "HNC", (2, BLOCK, content), page) for i in range(2))
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", BLOCK, "LBHNC", layers), BLOCK)
    arrays = {layer.name: np.zeros((16, 2, BLOCK, content), np.uint8) for layer in layers}
    for seed, array in enumerate(arrays.values()):
        array[...] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
    before = {name: array[:5].copy() for name, array in arrays.items()}

    def namespace(scale: float) -> Namespace:
        return Namespace({"model": "b13", "k_scale": scale, "groups": [geometry.group.identity()]})

    with _store(tmp_path / "store", namespace(1.0), geometry, arrays) as store:
        assert store.store(PROMPT, range(5)).tiers == {"disk": 5}
        for array in arrays.values():
            array[...] = 0xA5  # numbers and scales that are somebody else's
        assert store.retrieve(PROMPT, range(8, 13)) == 80
        for name, array in arrays.items():
            assert np.array_equal(array[8:13], before[name])
            assert (array[:8] == 0xA5).all()
            assert (array[13:] == 0xA5).all()
    with _store(tmp_path / "store", namespace(0.5), geometry, arrays) as store:
        assert store.lookup(PROMPT) == 0


def _latent() -> RecordGeometry:
    rows = tuple(LayerGeometry(f"layer.{i}", "float32", "NC", (BLOCK, 576), BLOCK * 576 * 4) for i in range(3))
    return RecordGeometry(GroupGeometry(0, "mla", BLOCK, "LBNC", rows), BLOCK)


def test_b38_latent_kv_without_heads_is_kept_over_a_restart(tmp_path: Path) -> None:
    geometry, namespace = _latent(), Namespace({"model": "b38"})
    arrays = {f"layer.{i}": np.zeros((16, BLOCK, 576), np.float32) for i in range(3)}
    for seed, array in enumerate(arrays.values()):
        array[:5] = np.random.default_rng(seed).random((5, BLOCK, 576), np.float32)
    with _store(tmp_path / "store", namespace, geometry, arrays) as store:
        assert store.store(PROMPT, range(5)).tiers == {"disk": 5}
    with _store(tmp_path / "store", namespace, geometry, arrays) as store:
        assert store.retrieve(PROMPT, range(8, 13)) == 80
    for array in arrays.values():
        assert np.array_equal(array[8:13], array[:5])
        assert not array[13:].any()


def test_b38_ranks_with_the_same_latent_kv_are_one_shard_that_one_rank_writes(tmp_path: Path) -> None:
    geometry, namespace = _latent(), Namespace({"model": "b38"})
    config = parse(f"chunk_tokens: {BLOCK}\ntiers: [{{type: disk, path: {tmp_path / 'store'}}}]", tier_types())
    alone = blueprint(config, geometry)
    both = blueprint(config, geometry, Topology(shards=(0, 0), shard_count=1, local_ranks=2))
    assert both.scope(namespace, 0) == alone.scope(namespace, 0)
    executors = [both.executor(rank, both.arena(), Counters()) for rank in (0, 1)]
    assert [executor.spec.is_writer for executor in executors] == [True, False]
    for executor in executors:
        executor.close(1.0)


def test_b81_a_root_that_does_not_exist_and_a_name_with_slashes_make_no_other_folder(tmp_path: Path) -> None:
    root = tmp_path / "x" / "y" / "z"
    lab = StoreLab(root)
    namespace = Namespace({"model": "org/name:tag v2"})
    store = lab.store(cpu=0, namespace=namespace)
    assert save_seeded(lab, store, PROMPT, 1) == 5
    assert has_seed(lab, store, PROMPT, 1)
    lab.close()
    assert (root / namespace_directory(namespace)).is_dir()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert all(root in path.parents for path in files)


def test_b81_a_root_that_is_a_file_is_named_at_start(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.write_text("")
    with pytest.raises(ConfigError, match=str(root)):
        StoreLab(root).store()
    assert root.read_text() == ""
