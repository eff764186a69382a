"""Cases of the catalogue about single files: damaged, gone, unreadable, of another release, not for direct I/O."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_cases import CHUNKS, PROMPT, record_of
from disk_faults import NEVER, Bench
from made_up import tok
from stub_store import StoreLab

from kvstore import keys
from kvstore.engine import Store
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import aligned_buffer, sample_address, sample_scope, sealed_record
from kvstore.tiers import record as record_module
from kvstore.tiers.os_calls import OsCalls

FORMAT_1 = Path(__file__).parent / "data" / "format-1"
NOBODY = 65534


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path / "store")
    yield lab
    lab.close()


def _missed(store: Store, reason: str) -> float:
    return store.counters.value("missed_records_total", tier="disk", reason=reason)


# -- b21: releases ---------------------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> StoreLab:
    """A copy of the folder that the first release wrote: the 5 chunks of `PROMPT`, by `StoreLab.save`."""
    root = tmp_path / "store"
    shutil.copytree(FORMAT_1, root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return StoreLab(root)


def test_b21_this_release_reads_what_the_first_one_wrote(old: StoreLab) -> None:
    store = old.store(cpu=0)
    assert store.lookup(PROMPT) == 80
    assert old.loaded(store, PROMPT) == 80
    old.close()


def test_b21_the_next_release_finds_nothing_and_evicts_the_old_records(
    old: StoreLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name for path in old.files()}
    assert len(before) == CHUNKS
    monkeypatch.setattr(keys, "FORMAT_VERSION", 2)
    monkeypatch.setattr(record_module, "FORMAT_VERSION", 2)
    store = old.store(cpu=0, disk=8)
    assert store.lookup(PROMPT) == 0
    assert old.loaded(store, PROMPT) == 0
    assert {path.name for path in old.files()} == before
    old.save(store, tok(80, 2))
    left = {path.name for path in old.files()}
    assert len(left) <= 8
    assert len(left - before) == CHUNKS
    assert len(left & before) < CHUNKS
    assert old.loaded(store, tok(80, 2)) == 80
    old.close()


def test_b21_a_record_of_the_next_release_in_place_is_a_miss_that_a_store_replaces(old: StoreLab) -> None:
    store = old.store(cpu=0)
    path = record_of(old.root, store.addresses(PROMPT)[2])
    page = path.read_bytes()
    path.write_bytes(page.replace(b'"format":"1"', b'"format":"2"'))
    assert old.loaded(store, PROMPT) == 32
    assert _missed(store, "version") == 1
    assert path.exists()
    assert b'"format":"2"' in path.read_bytes()[:HEADER_BYTES]
    assert old.save(store, PROMPT).tiers == {"disk": CHUNKS}
    assert path.read_bytes() == page
    assert old.loaded(store, PROMPT) == 80
    old.close()


# -- b71, b73: damaged and gone --------------------------------------------------------------------------------------


def _resize(change: Callable[[int], int]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        os.truncate(path, change(path.stat().st_size))

    return apply


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _unreadable(path: Path) -> None:
    path.chmod(0)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _link_to_a_good_one(path: Path) -> None:
    path.rename(path.with_name("good"))
    path.symlink_to("good")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_resize(lambda size: 0), "size"),
    "half": (_resize(lambda size: size // 2), "size"),
    "one byte short": (_resize(lambda size: size - 1), "size"),
    "one byte long": (_resize(lambda size: size + 1), "size"),
    "a directory": (_directory, "not_a_file"),
    "unreadable": (_unreadable, "mode"),
    "a dangling link": (_dangling, "symlink"),
    "a link to a good record": (_link_to_a_good_one, "symlink"),
}


def break_the_third_chunk(root: Path, kind: str) -> None:
    """The whole case, also for a child that is another user."""
    lab = StoreLab(root)
    store = lab.store(cpu=0)
    lab.save(store, PROMPT)
    change, reason = BROKEN[kind]
    change(record_of(root, store.addresses(PROMPT)[2]))
    assert lab.loaded(store, PROMPT) == 32
    assert _missed(store, reason) == 1
    assert store.lookup(PROMPT) == 32
    assert lab.loaded(lab.store(cpu=0), PROMPT) == 32
    assert lab.save(store, PROMPT).tiers == {"disk": CHUNKS}
    assert lab.loaded(store, PROMPT) == 80
    assert lab.loaded(lab.store(cpu=0), PROMPT) == 80
    assert record_of(root, store.addresses(PROMPT)[2]).is_file()
    lab.close()


@pytest.mark.parametrize("kind", BROKEN)
def test_b71_a_file_that_is_no_whole_record_is_a_miss_with_its_reason_and_repaired(tmp_path: Path, kind: str) -> None:
    break_the_third_chunk(tmp_path / "store", kind)


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_disk_cases_files import break_the_third_chunk
os.setgroups([]); os.setgid({user}); os.setuid({user})
break_the_third_chunk(Path({root!r}) / "store", "unreadable")
print("repaired")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user; the case above covers this one")
def test_b71_an_unreadable_file_is_a_miss_for_an_ordinary_user_too() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
        text = AS_NOBODY.format(path=here, user=NOBODY, root=name)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HOME": name}
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=environment
        )
    assert done.stdout == "repaired\n", done.stderr


def test_b73_a_file_that_was_removed_is_a_miss_and_forgotten(lab: StoreLab) -> None:
    store = lab.store(cpu=0)
    lab.save(store, PROMPT)
    assert store.lookup(PROMPT) == 80
    record_of(lab.root, store.addresses(PROMPT)[3]).unlink()
    assert lab.loaded(store, PROMPT) == 48
    assert _missed(store, "absent") == 1
    assert store.lookup(PROMPT) == 48


def test_b73_a_file_that_is_removed_while_it_is_read_is_read_or_missed(
    lab: StoreLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = lab.store(cpu=0)
    lab.save(store, PROMPT)
    path = record_of(lab.root, store.addresses(PROMPT)[3])
    number, real = path.stat().st_ino, OsCalls.read

    def read(calls: OsCalls, fd: int, buffer: memoryview, offset: int) -> int:
        if os.fstat(fd).st_ino == number and path.exists():
            subprocess.run(["rm", str(path)], check=True)
        return real(calls, fd, buffer, offset)

    monkeypatch.setattr(OsCalls, "read", read)
    assert lab.loaded(store, PROMPT) in (48, 80)
    assert not path.exists()
    assert lab.loaded(store, PROMPT) == 48


# -- b82: direct I/O -------------------------------------------------------------------------------------------------


def _refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OsCalls.open

    def refuse(calls: OsCalls, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(calls, name, flags, mode, dir_fd)

    monkeypatch.setattr(OsCalls, "open", refuse)


def _refuse_at_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = OsCalls.write, []

    def refuse(calls: OsCalls, fd: int, buffer: memoryview | bytes, offset: int) -> int:
        if not refused and len(buffer) >= 4096:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(calls, fd, buffer, offset)

    monkeypatch.setattr(OsCalls, "write", refuse)


@pytest.mark.parametrize("refuse", [_refuse_at_open, _refuse_at_first_write])
def test_b82_without_direct_io_everything_works_and_it_is_said_once(
    lab: StoreLab,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch], None],
) -> None:
    refuse(monkeypatch)
    with caplog.at_level(logging.INFO):
        store = lab.store(cpu=0)
        assert lab.save(store, PROMPT).tiers == {"disk": CHUNKS}
    said = [r.message for r in caplog.records if r.message.startswith("disk buffered")]
    assert len(said) == 1
    status = store._executor.tier_status(0)
    assert status is not None
    assert "buffered" in status.notes
    assert lab.loaded(store, PROMPT) == 80


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
@pytest.mark.parametrize("size", [1, 511, 513, 3840, 4096, 4097, 10**6 + 1])
def test_b82_payloads_of_any_size_are_kept_in_both_modes(bench: Bench, size: int, flags: int) -> None:
    layer = LayerGeometry("layer", "uint8", "N", (size,), size)
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", 1, "N", (layer,)), 1)
    scope = sample_scope(f"b82-{size}", geometry)
    bench.calls.refuse_flags = flags
    tier, address = bench.open(scope), sample_address(1)
    stored = sealed_record(scope, address, size)
    assert tier.write([address], [stored], NEVER) == [Outcome.STORED]
    assert bench.record(address).stat().st_size == geometry.slot_bytes
    buffer = aligned_buffer(geometry.slot_bytes)
    assert bench.open(scope).read([address], [buffer], NEVER) == [Outcome.HIT]
    assert np.array_equal(np.frombuffer(buffer, np.uint8), np.frombuffer(stored, np.uint8))
