"""Weights and adapter digests: content decides, the cache never lies."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvstore.errors import ConfigError
from kvstore.transfer import weights
from kvstore.transfer.weights import adapter_digest, hash_open_file, weight_files, weights_digest

A, B = b"a" * 100_000, b"b" * 5_000


class CountingHash:
    """Hashes as the real one does and counts the files that were read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self, fd: int, threads: int) -> str:
        self.reads += 1
        return hash_open_file(fd, threads)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(A)
    (folder / "model-2.safetensors").write_bytes(B)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def digest(folder: Path, cache_dir: Path | None = None, hash_file: CountingHash | None = None) -> str:
    return weights_digest(weight_files(folder), cache_dir, hash_file=hash_file)


def test_a_digest_is_of_names_and_contents_in_any_order_and_any_directory(model, tmp_path):
    files = weight_files(model)
    expected = weights_digest(files, None)
    assert weights_digest(files[::-1], None, threads=1) == expected
    moved = tmp_path / "elsewhere"
    model.rename(moved)
    assert digest(moved) == expected


def test_the_combination_of_files_is_as_documented(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(A)
    content = b"blake3:" + blake3(A).hexdigest().encode()
    fields = (5).to_bytes(4, "little") + len(A).to_bytes(8, "little") + len(content).to_bytes(4, "little")
    whole = b"kvstore weights 1\0" + (1).to_bytes(4, "little") + fields + b"m.bin" + content
    assert weights_digest([path], None) == "blake3:" + blake3(whole).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: (m / "model-1.safetensors").rename(m / "model-3.safetensors"),
        lambda m: (m / "model-2.safetensors").unlink(),
        lambda m: (m / "model-2.safetensors").write_bytes(B + b"b"),
        lambda m: (m / "model-3.safetensors").write_bytes(b""),
        lambda m: ((m / "model-1.safetensors").write_bytes(B), (m / "model-2.safetensors").write_bytes(A)),
    ],
    ids=["renamed", "removed", "longer", "one more", "swapped"],
)
def test_another_set_of_files_has_another_digest(model, cache, change):
    before = digest(model, cache)
    change(model)
    assert digest(model, cache) != before


def test_one_flipped_byte_under_the_same_size_and_mtime_is_noticed(model, cache):
    path = model / "model-1.safetensors"
    before, stat = digest(model, cache), path.stat()
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert digest(model, cache) != before


def test_a_file_is_not_trusted_before_its_timestamps_have_settled(tmp_path, cache, monkeypatch):
    waited = []
    monkeypatch.setattr(weights.time, "sleep", waited.append)
    path = tmp_path / "m.bin"
    path.write_bytes(A)
    monkeypatch.setattr(weights.time, "time", lambda: path.stat().st_ctime_ns / 1e9 + 0.01)
    weights_digest([path], cache)
    assert waited == [pytest.approx(0.09, abs=1e-3)]


def test_a_known_file_is_not_read_again(model, cache):
    count = CountingHash()
    first = digest(model, cache, count)
    assert count.reads == 2
    assert digest(model, cache, count) == first
    assert count.reads == 2
    (model / "model-1.safetensors").write_bytes(A[::-1])
    digest(model, cache, count)
    assert count.reads == 3


def test_without_a_cache_every_file_is_read(model):
    count = CountingHash()
    assert digest(model, None, count) == digest(model, None, count)
    assert count.reads == 4


def test_the_cache_is_private_and_has_no_path_in_it(model, cache):
    digest(model, cache)
    file = cache / "weights.json"
    assert (file.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    assert "model" not in file.read_text()
    assert sorted(p.name for p in cache.iterdir()) == ["weights.json", "weights.lock"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"digests": 3}', '{"digests": {"k": 3}}', "[" * 100_000, "\xff\xfe"]
)
def test_a_damaged_cache_is_ignored_and_replaced(model, cache, text):
    expected = digest(model, cache)
    (cache / "weights.json").write_text(text, encoding="latin-1")
    count = CountingHash()
    assert digest(model, cache, count) == expected
    assert count.reads == 2
    assert len(json.loads((cache / "weights.json").read_text())["digests"]) == 2


def test_a_cache_that_others_may_write_is_ignored(model, cache):
    digest(model, cache)
    file = cache / "weights.json"
    lie = json.loads(file.read_text())
    lie["digests"] = dict.fromkeys(lie["digests"], "blake3:" + "0" * 64)
    file.write_text(json.dumps(lie))
    file.chmod(0o666)
    assert digest(model, cache) == digest(model, None)


def test_an_unusable_cache_costs_the_cache_and_not_the_digest(model, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert digest(model, in_the_way / "cache") == digest(model, None)


def test_the_cache_is_bounded_and_forgets_what_was_not_used_for_longest(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(weights, "CACHE_ENTRIES", 3)
    files = [tmp_path / f"{i}.bin" for i in range(4)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i]) * 10)
    for path in files[:3]:
        weights_digest([path], cache)
    weights_digest([files[0]], cache)  # used again: the second is the oldest now
    weights_digest([files[3]], cache)
    assert len(json.loads((cache / "weights.json").read_text())["digests"]) == 3
    count = CountingHash()
    for path in (files[0], files[2], files[3]):
        weights_digest([path], cache, hash_file=count)
    assert count.reads == 0
    weights_digest([files[1]], cache, hash_file=count)
    assert count.reads == 1


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, cache):
    path = tmp_path / "m.bin"
    path.write_bytes(A)
    calls = []

    def disturbed(fd: int, threads: int) -> str:
        found = hash_open_file(fd, threads)
        calls.append(found)
        if len(calls) == 1:
            path.write_bytes(B)
        return found

    assert weights_digest([path], cache, hash_file=disturbed) == weights_digest([path], None)
    assert len(calls) == 2


def test_a_file_that_never_stands_still_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SETTLE_SECONDS", 0)
    path = tmp_path / "m.bin"
    path.write_bytes(A)

    def growing(fd: int, threads: int) -> str:
        with path.open("ab") as file:
            file.write(b"x")
        return hash_open_file(fd, threads)

    with pytest.raises(ConfigError, match=r"m\.bin keeps changing"):
        weights_digest([path], None, hash_file=growing)


def test_a_missing_file_and_no_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.bin"):
        weights_digest([tmp_path / "gone.bin"], None)
    with pytest.raises(ConfigError, match="no weight files"):
        weights_digest([], None)


def _lfs_model(root: Path, content: bytes) -> Path:
    name = hashlib.sha256(content).hexdigest()
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / name).write_bytes(content)
    snapshot = root / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_hugging_face_blob_is_taken_at_its_name_and_not_read(tmp_path, cache):
    count = CountingHash()
    first = digest(_lfs_model(tmp_path / "one", A), cache, count)
    assert count.reads == 0
    assert digest(_lfs_model(tmp_path / "two", A), None, count) == first
    assert digest(_lfs_model(tmp_path / "three", B), None, count) != first
    assert count.reads == 0


def test_a_link_that_only_looks_like_a_blob_is_read(tmp_path):
    name = "0" * 64
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / name).write_bytes(A)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(A)
    count = CountingHash()
    for number, target in enumerate((f"elsewhere/{name}", "blobs/0123")):
        link = tmp_path / f"{number}.bin"
        link.symlink_to(target)
        weights_digest([link], None, hash_file=count)
    assert count.reads == 2


def test_a_broken_blob_link_is_an_error(tmp_path):
    link = tmp_path / "m.bin"
    link.symlink_to("blobs/" + "0" * 64)
    with pytest.raises(ConfigError, match=r"m\.bin"):
        weights_digest([link], None)


def test_weight_files_prefers_safetensors_and_knows_the_others(tmp_path):
    assert weight_files(tmp_path) == []
    for name in ("b.bin", "a.pt", "c.pth", "d.gguf", "config.json", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["a.pt", "b.bin", "c.pth", "d.gguf"]
    (tmp_path / "m.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["m.safetensors"]
    assert weight_files(tmp_path / "d.gguf") == [tmp_path / "d.gguf"]


def test_files_are_hashed_in_parallel(model):
    both = threading.Barrier(2)

    def meet(fd: int, threads: int) -> str:
        both.wait(30)
        return hash_open_file(fd, threads)

    assert weights_digest(weight_files(model), None, threads=2, hash_file=meet) == digest(model)


def test_a_file_is_hashed_to_its_end_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "READ_BYTES", 1000)
    for size in (0, 1, 999, 1000, 1001, 12_345):
        path = tmp_path / "m.bin"
        path.write_bytes(os.urandom(size))
        with path.open("rb") as file:
            assert hash_open_file(file.fileno(), 2) == "blake3:" + blake3(path.read_bytes()).hexdigest()


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(ConfigError, match="not an adapter"):
        adapter_digest(folder)
    (folder / "adapter_model.safetensors").write_bytes(A)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "README.md").write_text("one")
    before = adapter_digest(folder)
    (folder / "README.md").write_text("two")
    assert adapter_digest(folder) == before
    (folder / "adapter_config.json").write_text('{"r": 16}')
    second = adapter_digest(folder)
    (folder / "adapter_model.safetensors").write_bytes(B)
    assert len({before, second, adapter_digest(folder)}) == 3


def _in_process(folder: Path, cache_dir: Path, seams: tuple[Any, ...]) -> None:
    start, hashing, go_on, found = seams
    count = CountingHash()

    def announced(fd: int, threads: int) -> str:
        hashing.release()
        go_on.wait(60)
        return count(fd, threads)

    start.wait(60)
    found.put((weights_digest(weight_files(folder), cache_dir, hash_file=announced), count.reads))


def test_a_second_process_waits_for_the_first_ones_result(model, cache):
    spawn = multiprocessing.get_context("spawn")
    start, hashing, go_on, found = spawn.Barrier(3), spawn.Semaphore(0), spawn.Event(), spawn.Queue()
    workers = [spawn.Process(target=_in_process, args=(model, cache, (start, hashing, go_on, found))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in weight_files(model):
        assert hashing.acquire(timeout=60)
    assert not hashing.acquire(timeout=0.5), "another process hashes what one is hashing already"
    go_on.set()
    results = [found.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert {result for result, _ in results} == {digest(model)}
    assert sorted(reads for _, reads in results) == [0, 0, 2]
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
