"""Which directory may be the root of a store, and what is published in it once for everyone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disk_faults import NEVER, SCOPE, Bench, read, write

from kvstore.errors import ConfigError, TierUnavailable
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sample_scope
from kvstore.tiers.disk import TIER, DiskConfig
from kvstore.tiers.disk_root import REFUSED_FILE_SYSTEMS, namespace_directory

NOBODY = 65534


def _file(root: Path) -> None:
    root.write_text("")


def _below_a_file(root: Path) -> None:
    root.parent.rmdir()
    root.parent.write_text("")


def _link(root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    root.symlink_to("elsewhere")


def _group_writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)


def _world_writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o1777)


def _home(root: Path) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("")


def _other_format(root: Path) -> None:
    root.mkdir()
    (root / ".kvstore").write_text("kvstore disk format 2\n")


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file": (_file, "not a directory.*name a directory"),
    "below a file": (_below_a_file, "not a directory.*name a directory"),
    "a link": (_link, "symbolic link.*name the directory"),
    "group-writable": (_group_writable, "writable by its group.*chmod go-w"),
    "world-writable": (_world_writable, "writable by its group or by everyone.*chmod go-w"),
    "not a store": (_home, "not a store.*thesis.txt.*name an empty directory"),
    "another format": (_other_format, "another format.*name another directory"),
}


@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.parametrize("read_only", [False, True])
def test_an_unusable_root_is_refused_with_the_key_the_path_and_a_remedy(
    tmp_path: Path, case: str, read_only: bool
) -> None:
    prepare, message = UNUSABLE[case]
    bench = Bench(tmp_path / "place" / "store", read_only=read_only)
    bench.root.parent.mkdir()
    prepare(bench.root)
    with pytest.raises(ConfigError, match=message) as caught:
        bench.client()
    assert f"tiers[disk].path: {bench.root} " in str(caught.value)


@pytest.mark.parametrize("magic", REFUSED_FILE_SYSTEMS)
def test_network_and_cluster_file_systems_are_refused_by_name(bench: Bench, magic: int) -> None:
    bench.calls.magic = magic
    with pytest.raises(ConfigError, match=f"kind {REFUSED_FILE_SYSTEMS[magic]}; .*local disk, or use the redis tier"):
        bench.client()
    assert not (bench.root / ".kvstore").exists()


def test_the_real_kind_of_file_system_is_asked(bench: Bench) -> None:
    bench.client()
    found = bench.calls.file_system_magic(bench.tiers[0]._space._ledger.root.fd)
    by_stat = subprocess.run(["stat", "-f", "-c", "%t", bench.root], check=True, capture_output=True, text=True)
    assert found == int(by_stat.stdout, 16)


def test_a_new_root_is_made_with_its_parents_and_marked(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a" / "b" / "store")
    write(bench.open(), [1])
    assert (bench.root / ".kvstore").read_text() == "kvstore disk format 1\n"
    assert bench.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["lost+found", ".stats"])
def test_a_directory_with_no_more_than_what_belongs_there_becomes_a_store(bench: Bench, name: str) -> None:
    (bench.root / name).mkdir(parents=True)
    bench.root.chmod(0o755)
    assert write(bench.open(), [1]) == [Outcome.STORED]


def test_other_namespaces_are_not_foreign(bench: Bench) -> None:
    write(bench.open(sample_scope("one")), [1], sample_scope("one"))
    assert write(bench.open(), [1]) == [Outcome.STORED]


def test_a_read_only_client_makes_nothing_and_serves(bench: Bench) -> None:
    write(bench.open(), [1])
    before = sorted(bench.root.rglob("*"))
    bench.read_only = True
    tier = bench.open()
    assert read(tier, [1, 2]) == [Outcome.HIT, Outcome.MISS]
    assert write(tier, [2]) == [Outcome.UNAVAILABLE]
    assert tier.delete([sample_address(1)]) == [Outcome.UNAVAILABLE]
    tier.touch([sample_address(1)])
    assert bench.calls.utimes == []
    assert "read-only" in tier.status().notes
    with pytest.raises(TierUnavailable, match="nothing is stored for this namespace"):
        bench.client().attach(sample_scope("another"))
    assert sorted(bench.root.rglob("*")) == before


def test_a_read_only_client_of_nothing_is_a_mistake(bench: Bench) -> None:
    bench.read_only = True
    with pytest.raises(ConfigError, match="does not exist; remove read_only: true"):
        bench.client()
    assert not bench.root.exists()


def test_a_namespace_file_that_differs_stops_the_tier_and_names_the_fields(bench: Bench) -> None:
    write(bench.open(), [1])
    place = bench.root / namespace_directory(SCOPE.namespace) / "namespace.json"
    place.write_bytes(SCOPE.namespace.canonical.replace(b"suite/model", b"suite/mode1"))
    with pytest.raises(TierUnavailable, match=r"differs in model; remove that directory"):
        bench.client().attach(SCOPE)
    place.write_bytes(b"{")
    with pytest.raises(TierUnavailable, match="is damaged"):
        bench.client().attach(SCOPE)


def test_a_namespace_directory_that_is_a_link_is_not_followed(bench: Bench, tmp_path: Path) -> None:
    bench.client()
    (tmp_path / "elsewhere").mkdir()
    (bench.root / namespace_directory(SCOPE.namespace)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierUnavailable):
        bench.client().attach(SCOPE)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_everyone_who_starts_at_once_gets_one_epoch(bench: Bench) -> None:
    start = threading.Barrier(8)
    epochs: list[str] = []

    def begin(writer: bool) -> None:
        start.wait()
        epochs.append(bench.open(writer=writer).published_epoch())

    threads = [threading.Thread(target=begin, args=(n % 2 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(epochs) == 8
    assert len(set(epochs)) == 1
    assert bench.leftovers() == []


def test_a_damaged_epoch_file_is_replaced_by_a_new_epoch(bench: Bench) -> None:
    tier = bench.open()
    first = tier.published_epoch()
    write(tier, [1])
    (bench.root / namespace_directory(SCOPE.namespace) / "epoch").write_bytes(b"")
    second = bench.open().published_epoch()
    assert second != first
    assert bench.open().published_epoch() == second
    assert bench.open().contains([sample_address(1)], NEVER) == [Outcome.MISS]


AS_NOBODY = """
import os
from pathlib import Path
from kvstore.errors import ConfigError
from kvstore.metrics import Counters
from kvstore.tiers.disk import DiskConfig, DiskTier
os.setgroups([]); os.setgid({user}); os.setuid({user})
try:
    DiskTier(DiskConfig(path=Path({path!r}), read_only={read_only}), Counters(), True)
    print("opened")
except ConfigError as error:
    print(error)
"""


def _as_nobody(path: Path, read_only: bool = False) -> str:
    """What an ordinary user is told who opens ``path``; root may write everywhere and can not see it."""
    text = AS_NOBODY.format(user=NOBODY, path=str(path), read_only=read_only)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A directory that every user may pass through; the one of pytest is for its owner only."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@needs_root
def test_a_directory_of_another_user_is_refused(shared_place: Path) -> None:
    (shared_place / "store").mkdir(mode=0o755)
    told = _as_nobody(shared_place / "store")
    assert "belongs to user 0, not to user 65534" in told
    assert "name a directory of your own" in told


@needs_root
def test_a_directory_that_can_not_be_written_is_refused_unless_read_only(shared_place: Path) -> None:
    root = shared_place / "store"
    root.mkdir()
    (root / ".kvstore").write_text("kvstore disk format 1\n")
    for path in (root / ".kvstore", root):
        os.chown(path, NOBODY, NOBODY)
    root.chmod(0o555)
    told = _as_nobody(root)
    assert "can not be written" in told
    assert "set read_only: true" in told
    assert _as_nobody(root, read_only=True) == "opened\n"


@needs_root
def test_a_root_that_can_not_be_made_is_refused(shared_place: Path) -> None:
    told = _as_nobody(shared_place / "store")
    assert "can not be opened or made" in told
    assert "read_only: true" in told


def test_the_kind_of_tier_is_registered_with_the_defaults_of_the_settings() -> None:
    config = DiskConfig()
    assert (TIER.name, TIER.order, TIER.is_default, TIER.volatile) == ("disk", 20, True, False)
    assert TIER.capacity_bytes(config) == 20 * 2**30
    assert config.path.is_absolute()
    assert config.path.parts[-2:] == (".cache", "kvstore")
    assert (config.min_free, config.write, config.sync, config.read_only, config.required) == (
        0.05,
        "through",
        False,
        False,
        False,
    )
    assert replace(config, capacity=1).capacity == 1
