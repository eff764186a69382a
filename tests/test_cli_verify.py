"""``kvstore verify``: every kind of damage is named, nothing else is called damage, and looking
changes nothing."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_faults import Bench, FaultyCalls
from sample_store import ALPHA, BETA, BusyCalls, LookingCalls, Sample, command, flip, make_sample, state

from kvstore.cli import main
from kvstore.layout import HEADER_BYTES, Shard
from kvstore.testing.tier_suite import sample_address, sample_geometry, sample_scope, sealed_record
from kvstore.tiers.disk_check import Expected, RecordChecker
from kvstore.tiers.disk_tools import DiskTools
from kvstore.tiers.os_calls import OsCalls
from kvstore.tiers.tools import Finding, Verdict

PAYLOAD_END = HEADER_BYTES + ALPHA.geometries[0].payload_bytes


@pytest.fixture
def sample(bench: Bench) -> Sample:
    return make_sample(bench)


def findings(root: Path, calls: OsCalls | None = None) -> list[Finding]:
    """What verify finds that is not in order."""
    return [found for found in DiskTools(root, calls).verify() if found.verdict != Verdict.OK]


def _edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def _replace_by_link(path: Path) -> None:
    target = path.rename(path.parent / ".moved")
    path.symlink_to(target)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_shard(path: Path) -> None:
    number = next(n for n in range(5) if path.name.startswith(sample_address(n).hex()))
    other = sample_scope("alpha/model", sample_geometry(shard=Shard(0, 2)))
    path.write_bytes(bytes(sealed_record(type(other)(ALPHA.namespace, other.geometries), sample_address(number), 1)))


def _take_name_of_another(path: Path) -> None:
    name = "0" * 62 + "ff.safetensors"
    path.rename(path.parent / (path.parent.name + name[2:]))


def _misplace(path: Path) -> None:
    other = path.parent.parent / ("00" if path.parent.name != "00" else "01")
    other.mkdir()
    path.rename(other / path.name)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: os.truncate(p, 0), "short"),
    "cut in the header": (lambda p: os.truncate(p, 4095), "short"),
    "cut at the header": (lambda p: os.truncate(p, 4096), "size"),
    "cut by a byte": (lambda p: os.truncate(p, p.stat().st_size - 1), "size"),
    "too long": (lambda p: os.truncate(p, p.stat().st_size + 4096), "size"),
    "all zeros": (lambda p: p.write_bytes(bytes(p.stat().st_size)), "header_length"),
    "first payload byte": (lambda p: flip(p, HEADER_BYTES), "checksum"),
    "last payload byte": (lambda p: flip(p, PAYLOAD_END - 1, 128), "checksum"),
    "first pad byte": (lambda p: flip(p, PAYLOAD_END), "pad"),
    "last pad byte": (lambda p: flip(p, -1), "pad"),
    "header length": (lambda p: flip(p, 0), "header_length"),
    "header text": (lambda p: flip(p, 8), "json"),
    "header padding": (lambda p: flip(p, 4095), "json"),
    "layout in the header": (lambda p: _edit(p, b'"layout":"HTC"', b'"layout":"HTD"'), "geometry"),
    "layers in the header": (lambda p: _edit(p, b'"3x3072"', b'"3x3073"'), "geometry"),
    "block in the header": (lambda p: _edit(p, b'"block_tokens":"16"', b'"block_tokens":"17"'), "geometry"),
    "group in the header": (lambda p: _edit(p, b'"group":"0"', b'"group":"1"'), "geometry"),
    "codec in the header": (lambda p: _edit(p, b'"codec":"raw"', b'"codec":"rav"'), "codec"),
    "wrong shard": (_replace_by_shard, "geometry"),
    "wrong name": (_take_name_of_another, "address"),
    "wrong directory": (_misplace, "misplaced"),
    "a link to itself": (_replace_by_link, "symlink"),
    "a directory": (_replace_by_directory, "not_a_file"),
    "a fifo": (_replace_by_fifo, "not_a_file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_names_each_kind_of_damage_and_nothing_else(
    sample: Sample, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind = DAMAGE[name]
    damage(sample.records()[2])
    (found,) = findings(sample.root)
    assert (found.verdict, found.kind) == (Verdict.DAMAGED, kind)
    assert main(["verify", str(sample.root)]) == 1
    text = capsys.readouterr().out
    assert f"damaged ({kind})  {found.place}" in text
    assert "1 damaged, 7 ok" in text


@pytest.mark.parametrize("name", DAMAGE)
def test_delete_removes_damaged_records_and_what_is_no_record_stays(sample: Sample, name: str) -> None:
    damage, kind = DAMAGE[name]
    damage(sample.records()[2])
    (found,) = findings(sample.root)
    assert main(["verify", str(sample.root), "--delete"]) == 1
    is_kept = kind in ("symlink", "not_a_file")
    assert os.path.lexists(sample.root / found.place) == is_kept
    assert main(["verify", str(sample.root)]) == (1 if is_kept else 0)
    assert len(DiskTools(sample.root).inspect("", 99) or list(DiskTools(sample.root).records())) == 7 + is_kept


def _future(path: Path) -> None:
    _edit(path, b'"format":"1"', b'"format":"2"')


def _from_beta(path: Path, sample: Sample) -> None:
    stranger = sample.records(BETA)[0]
    fan = path.parent.parent / stranger.parent.name
    fan.mkdir(exist_ok=True)
    shutil.copy(stranger, fan / stranger.name)


def test_another_version_and_another_namespace_are_no_damage_and_are_left_alone(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    _future(sample.records()[0])
    _from_beta(sample.records()[1], sample)
    last = ALPHA.namespace.digest.hex()[-1].encode()
    _edit(sample.records()[2], last + b'","group"', (b"0" if last != b"0" else b"1") + b'","group"')
    assert Counter((f.verdict, f.kind) for f in findings(sample.root)) == {
        (Verdict.FOREIGN, "version"): 1,
        (Verdict.FOREIGN, "namespace"): 2,
    }
    before = state(sample.root)
    assert main(["verify", str(sample.root), "--delete"]) == 0
    assert state(sample.root) == before
    assert "3 foreign, 6 ok; 0 removed" in capsys.readouterr().out


def test_what_no_store_writes_is_named_and_is_no_damage(sample: Sample) -> None:
    record = sample.records()[0]
    (record.parent / "notes.txt").write_text("mine")
    (sample.root / "folder").mkdir()
    (sample.root / ("linked-" + "0" * 16)).symlink_to(record.parent)
    (record.parent / (".tmp-" + "0" * 16)).write_text("a writer's")
    found = findings(sample.root)
    assert {(f.verdict, Path(f.place).name) for f in found} == {
        (Verdict.STRANGE, "notes.txt"),
        (Verdict.STRANGE, "folder"),
        (Verdict.STRANGE, "linked-" + "0" * 16),
    }
    before = state(sample.root)
    assert main(["verify", str(sample.root), "--delete"]) == 0
    assert state(sample.root) == before


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"a":NaN}', b"[" * 5000])
def test_a_namespace_that_is_not_described_is_damage(sample: Sample, content: bytes | None) -> None:
    file = sample.records()[0].parents[3] / "namespace.json"
    file.unlink() if content is None else file.write_bytes(content)
    (found,) = findings(sample.root)
    assert (found.verdict, found.kind, found.record) == (Verdict.DAMAGED, "description", None)
    assert main(["verify", str(sample.root), "--delete"]) == 1
    assert main(["ls", str(sample.root)]) == 0


def test_no_flipped_bit_of_a_header_is_in_order(sample: Sample) -> None:
    path = sample.records()[0]
    scope = ALPHA.namespace
    expected = Expected(path.stem, scope.digest.hex(), "s0of1", None, json.loads(scope.canonical))
    content = bytearray(path.read_bytes())
    checker = RecordChecker(OsCalls())
    kinds: Counter[str] = Counter()
    with path.open("r+b", buffering=0) as file:
        for at in range(HEADER_BYTES):
            os.pwrite(file.fileno(), bytes([content[at] ^ 1 << at % 8]), at)
            kinds[checker.check(str(path), None, expected).kind] += 1
            os.pwrite(file.fileno(), bytes([content[at]]), at)
    assert not kinds[""]
    assert checker.check(str(path), None, expected).kind == ""
    assert kinds["namespace"] + kinds["version"] <= 65


@pytest.mark.parametrize("call", ["read", "open"])
def test_what_can_not_be_read_is_said_and_never_removed(sample: Sample, call: str) -> None:
    calls = FaultyCalls()
    tools = DiskTools(sample.root, calls)
    calls.fail[call] = errno.EIO
    found = list(tools.verify())
    assert found
    assert {(f.verdict, f.kind) for f in found} == {(Verdict.UNREADABLE, "EIO")}


class _ShortReads(OsCalls):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return super().read(fd, buffer[: self.limit], offset)


@pytest.mark.parametrize(("limit", "verdict"), [(5000, Verdict.OK), (100, Verdict.UNREADABLE)])
def test_a_short_read_is_no_damage(sample: Sample, limit: int, verdict: Verdict) -> None:
    path = sample.records()[0]
    checker = RecordChecker(_ShortReads(limit))
    if verdict == Verdict.OK:
        assert checker.check(str(path), None, Expected()).kind == ""
    else:
        with pytest.raises(OSError, match="stays at"):
            checker.check(str(path), None, Expected())


def test_verify_works_where_direct_reads_are_refused(sample: Sample) -> None:
    calls = FaultyCalls()
    calls.refuse_flags = os.O_DIRECT
    flip(sample.records()[0], HEADER_BYTES)
    assert [f.kind for f in findings(sample.root, calls)] == ["checksum"]


def test_a_record_that_vanishes_meanwhile_is_no_finding(sample: Sample) -> None:
    found = list(DiskTools(sample.root, BusyCalls(sample.records())).verify())
    assert [f.verdict for f in found] == [Verdict.OK] * 3


def test_a_directory_that_vanishes_meanwhile_is_no_finding(sample: Sample) -> None:
    walk = DiskTools(sample.root).verify()
    assert next(walk).verdict == Verdict.OK
    shutil.rmtree(sample.root / sample.records(BETA)[0].relative_to(sample.root).parts[0])
    assert {f.verdict for f in walk} == {Verdict.OK}


def test_looking_changes_nothing(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    flip(sample.records()[0], HEADER_BYTES)
    before = state(sample.root)
    tools = DiskTools(sample.root, LookingCalls())
    list(tools.records()), list(tools.verify()), tools.namespaces(), tools.inspect("", 9)
    for arguments in (["ls"], ["ls", "--records", "--json"], ["verify"], ["clear"], ["inspect", "0", "--path"]):
        main([*arguments, str(sample.root)])
    assert state(sample.root) == before


def test_a_damaged_record_is_named_before_it_is_removed(sample: Sample) -> None:
    """With nobody to read the name, the record stays."""
    flip(sample.records()[0], HEADER_BYTES)
    reader, writer = os.pipe()
    os.close(reader)
    run = "import sys; from kvstore.cli import main; sys.exit(main())"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for flags in ([], ["--json"]):
        subprocess.run(
            [sys.executable, "-c", run, "verify", str(sample.root), "--delete", *flags],
            stdout=writer, stderr=subprocess.DEVNULL, check=False, timeout=60, env=buffered,
        )  # fmt: skip
        assert len(sample.records()) == 5
    os.close(writer)


def test_verify_as_json_is_one_document_with_every_finding(sample: Sample) -> None:
    flip(sample.records()[1], HEADER_BYTES)
    _future(sample.records()[3])
    done = command("verify", sample.root, "--json", "--delete")
    assert (done.returncode, done.stderr) == (1, "")
    (store,) = json.loads(done.stdout)["stores"]
    assert store["verdicts"] == {"ok": 6, "damaged": 1, "foreign": 1, "strange": 0, "unreadable": 0}
    assert [(f["verdict"], f["kind"], f["outcome"]) for f in store["findings"]] == [
        ("damaged", "checksum", "removed"),
        ("foreign", "version", ""),
    ]
    assert store["removed"] == 1


def test_a_terminal_gets_a_progress_bar_and_nothing_else_does(sample: Sample) -> None:
    master, slave = pty.openpty()
    run = "import sys; from kvstore.cli import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", run, "verify", str(sample.root)],
        stdout=subprocess.PIPE, stderr=slave, text=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(slave)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # EIO: the other side is closed
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    pictures = drawn.decode().split("\r\x1b[K")
    assert len(pictures) > 2
    assert "] 100 %  8 of 8 records, 128 KiB at " in pictures[-1]
    assert pictures[-1].startswith("[####")
    assert "\r" not in text
    done = command("verify", sample.root)
    assert (done.stdout, done.stderr) == (text, "")


def test_authenticated_records_are_no_damage_to_who_has_no_key_and_delete_leaves_them(sample: Sample) -> None:
    keyed = sample_scope("keyed/model", secret="a secret of enough characters")
    tier = sample.bench.open(keyed)
    numbers = range(20, 23)
    tier.write(
        [sample_address(n) for n in numbers], [sealed_record(keyed, sample_address(n), n) for n in numbers], 1e18
    )
    assert len(sample.records(keyed)) == 3
    assert findings(sample.root) == []
    assert command("verify", sample.root, "--delete").returncode == 0
    assert len(sample.records(keyed)) == 3
