"""Snapshots: whole documents or none, from a directory that only we can write to, merged by instance."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.metrics import Counters
from kvstore.snapshots import (
    SnapshotWriter,
    collect_garbage,
    read_all,
    resolve_dir,
    start_of,
)

NOW = 1_000_000.0
DAY = 86400.0


def publish(directory: Path, instance: str, role: str, time: float = NOW, **document: Any) -> SnapshotWriter:
    writer = SnapshotWriter(directory, instance, role, clock=lambda: time)
    assert writer.publish(document)
    return writer


def rewrite(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **changes}), encoding="utf-8")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_auto_is_the_runtime_directory_then_the_disk_root_then_nothing(tmp_path: Path) -> None:
    runtime, root = tmp_path / "run", tmp_path / "deep" / "root"
    runtime.mkdir()
    assert resolve_dir("auto", root, {"XDG_RUNTIME_DIR": str(runtime)}) == runtime / "kvstore"
    assert resolve_dir("auto", root, {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == root / ".stats"
    assert resolve_dir("auto", root, {}) == root / ".stats"
    assert resolve_dir("auto", None, {}) is None
    assert resolve_dir("off", root, {}) is None
    assert resolve_dir(str(tmp_path / "own"), root, {}) == tmp_path / "own"
    assert {mode(p) for p in (runtime / "kvstore", root.parent, root, root / ".stats", tmp_path / "own")} == {0o700}


def test_directories_are_0700_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        resolve_dir(str(tmp_path / "a" / "b"), None, {})
    finally:
        os.umask(before)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_a_reader_makes_no_directory(tmp_path: Path) -> None:
    assert resolve_dir("auto", tmp_path / "root", {}, create=False) == tmp_path / "root" / ".stats"
    assert resolve_dir(str(tmp_path / "own"), None, {}, create=False) == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, bits: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(bits)
    with pytest.raises(ConfigError, match=r"stats\.snapshot_dir: others may write .*chmod go-w"):
        resolve_dir(str(shared), None, {})


def test_a_link_a_file_and_a_foreign_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "file/below", "link"):
        with pytest.raises(ConfigError, match="not a directory"):
            resolve_dir(str(tmp_path / name), None, {})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        resolve_dir(str(tmp_path / "real"), None, {})


def test_a_published_document_comes_back(tmp_path: Path) -> None:
    counters = Counters()
    counters.add("hit_tokens_total", 12, tier="fast")
    counters.add("miss_tokens_total", 3, reason="absent")
    tiers = [{"name": "fast", "capacity_bytes": 10, "used_bytes": 5, "chunks": 1, "state": "open", "notes": ["n"]}]
    publish(tmp_path, "i1", "store", engine={"model": "m"}, tiers=tiers, counters=counters.snapshot())
    (snapshot,) = read_all(tmp_path, NOW)
    assert (snapshot.instance, snapshot.roles, snapshot.time, snapshot.alive) == ("i1", ("store",), NOW, True)
    assert snapshot.engine == {"model": "m"}
    assert [(t.name, t.capacity_bytes, t.used_bytes, t.chunks, t.state, t.notes) for t in snapshot.tiers] == [
        ("fast", 10, 5, 1, "open", ("n",))
    ]
    assert list(snapshot.counters) == counters.snapshot()
    assert snapshot.value("hit_tokens_total", tier="fast") == 12
    assert snapshot.value("miss_tokens_total", reason="other") == 0
    assert snapshot.value("miss_tokens_total") == 3


def test_the_file_is_private_and_the_only_one(tmp_path: Path) -> None:
    writer = publish(tmp_path, "i1", "store")
    assert writer.publish({"engine": {"model": "again"}})
    (file,) = tmp_path.iterdir()
    assert (file.name, mode(file)) == ("i1.store.json", 0o600)
    writer.retire()
    writer.retire()
    assert list(tmp_path.iterdir()) == []


def test_parts_of_an_instance_are_merged(tmp_path: Path) -> None:
    fast = {"name": "fast", "capacity_bytes": 100, "used_bytes": None, "chunks": 7, "state": "open", "notes": ["a"]}
    slow = {"name": "slow", "capacity_bytes": None, "used_bytes": None, "chunks": 9, "state": None}
    publish(
        tmp_path, "i1", "rank0", NOW - 1,
        engine={"model": "rank's", "ranks": 2},
        tiers=[{"name": "slow", "capacity_bytes": 50, "used_bytes": 40, "state": "down", "notes": ["a", "b"]}],
        counters=[["read_bytes_total", "slow", "", 5], ["tier_errors_total", "slow", "EIO", 1]],
    )  # fmt: skip
    publish(tmp_path, "i1", "rank1", NOW - 2, counters=[["read_bytes_total", "slow", "", 6]])
    publish(tmp_path, "i1", "scheduler", NOW, engine={"model": "m", "ranks": None}, tiers=[fast, slow])
    publish(tmp_path, "i2", "scheduler", NOW - 9)
    first, second = read_all(tmp_path, NOW)
    assert (first.roles, first.time, second.instance) == (("scheduler", "rank0", "rank1"), NOW, "i2")
    assert first.engine == {"model": "m", "ranks": 2}
    assert [(t.name, t.capacity_bytes, t.used_bytes, t.chunks, t.state, t.notes) for t in first.tiers] == [
        ("fast", 100, None, 7, "open", ("a",)),
        ("slow", 50, 40, 9, "down", ("a", "b")),
    ]
    assert first.value("read_bytes_total", tier="slow") == 11


def test_torn_and_foreign_files_are_skipped_and_left_alone(tmp_path: Path) -> None:
    publish(tmp_path, "good", "store")
    whole = (tmp_path / "good.store.json").read_bytes()
    (tmp_path / "torn.store.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "renamed.store.json").write_bytes(whole)
    (tmp_path / "list.store.json").write_text("[1]")
    (tmp_path / "deep.store.json").write_text("[" * 100_000)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link.store.json").symlink_to(tmp_path / "good.store.json")
    (tmp_path / "dir.store.json").mkdir()
    os.mkfifo(tmp_path / "fifo.store.json")
    for name, changes in {
        "future": {"version": 2},
        "nan": {"time": float("nan")},
        "rows": {"counters": [["a", "b"]]},
        "huge": {"tiers": [{"name": "t", "chunks": float("inf")}]},
    }.items():
        publish(tmp_path, name, "store")
        rewrite(tmp_path / f"{name}.store.json", **changes)
    before = sorted(tmp_path.iterdir())
    assert [snapshot.instance for snapshot in read_all(tmp_path, NOW)] == ["good"]
    assert collect_garbage(tmp_path, NOW) == 0
    assert sorted(tmp_path.iterdir()) == before
    assert read_all(tmp_path / "absent") == []


def test_a_counter_of_a_newer_version_does_not_hide_the_rest(tmp_path: Path) -> None:
    publish(tmp_path, "i", "store", counters=[["new_total", "t", "", 4], ["requests_total", "", "", 1]])
    (snapshot,) = read_all(tmp_path)
    assert snapshot.value("requests_total") == 1


def test_an_ended_part_is_told_from_a_reused_process_id(tmp_path: Path) -> None:
    publish(tmp_path, "i", "store")
    assert read_all(tmp_path, NOW)[0].alive
    rewrite(tmp_path / "i.store.json", pid_start=1)
    assert not read_all(tmp_path, NOW)[0].alive


def test_a_killed_part_is_seen_as_ended_with_its_last_figures(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvstore.snapshots import SnapshotWriter\n"
        "w = SnapshotWriter(Path(sys.argv[1]), 'k', 'rank0')\n"
        "w.publish({'counters': [['requests_total', '', '', 8]]}); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert read_all(tmp_path)[0].alive
    finally:
        child.kill()
        child.communicate()
    (snapshot,) = read_all(tmp_path)
    assert (snapshot.alive, snapshot.value("requests_total")) == (False, 8)


def test_a_part_in_another_container_is_judged_by_age(tmp_path: Path) -> None:
    publish(tmp_path, "i", "store")
    rewrite(tmp_path / "i.store.json", pid_namespace="pid:[1]", pid_start=1)
    assert read_all(tmp_path, NOW + 4)[0].alive
    assert not read_all(tmp_path, NOW + 6)[0].alive


def test_garbage_is_what_ended_more_than_a_day_ago(tmp_path: Path) -> None:
    for name, age, ended in (("old", DAY + 1, True), ("recent", DAY - 1, True), ("running", DAY + 1, False)):
        publish(tmp_path, name, "store", NOW - age)
        if ended:
            rewrite(tmp_path / f"{name}.store.json", pid_start=1)
    left = tmp_path / ".gone.store.123.tmp"
    left.touch()
    os.utime(left, (NOW - DAY - 1, NOW - DAY - 1))
    kept = tmp_path / ".other.tmp"
    kept.touch()
    os.utime(kept, (0, 0))
    assert collect_garbage(tmp_path, NOW) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.tmp", "recent.store.json", "running.store.json"]


def test_a_failed_publication_stops_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    writer = publish(directory, "i", "store")
    (directory / "i.store.json").unlink()
    directory.rmdir()
    assert not writer.publish({})
    assert not writer.publish({})
    writer.retire()
    assert [record.message.split()[0] for record in caplog.records] == ["snapshots_stopped"]
    directory.mkdir()
    assert writer.publish({})


def test_a_reader_never_sees_half_a_document(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvstore.snapshots import SnapshotWriter\n"
        "w = SnapshotWriter(Path(sys.argv[1]), 'i', 'store')\n"
        "for n in range(300):\n"
        "    w.publish({'counters': [[f'c{k}', '', '', n] for k in range(500)]})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    seen: list[set[float]] = []
    while child.poll() is None:
        snapshots = read_all(tmp_path)
        # Half a document would be skipped as foreign: once there is one, there always has to be one.
        assert len(snapshots) == 1 or not seen
        for snapshot in snapshots:
            assert len(snapshot.counters) == 500
            seen.append({row[3] for row in snapshot.counters})
    assert child.returncode == 0
    assert seen
    assert all(len(values) == 1 for values in seen)


@pytest.mark.parametrize(("instance", "role"), [("", "store"), ("a/b", "store"), ("a", "../x"), ("a.b", "store")])
def test_a_name_that_could_leave_the_directory_is_refused(tmp_path: Path, instance: str, role: str) -> None:
    with pytest.raises(ValueError, match="can not be the name"):
        SnapshotWriter(tmp_path, instance, role)


def test_the_start_of_a_process_survives_a_strange_name(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    rest = " ".join(["S", *(str(n) for n in range(4, 60))])
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c)) {rest}")
    assert start_of(7, tmp_path) == 22
    (tmp_path / "7" / "stat").write_text(f"7 (x) Z {rest}")
    assert start_of(7, tmp_path) is None
    assert start_of(8, tmp_path) is None
