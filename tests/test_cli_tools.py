"""``kvstore ls`` and ``clear``: the truth about what is there, and nothing removed that nobody asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_faults import Bench, read, write
from sample_store import ALPHA, BETA, NOW, BusyCalls, Sample, command, make_sample, other_weights, state

from kvstore.cli import main
from kvstore.cli.clear import clear
from kvstore.cli.document import JsonWriter
from kvstore.cli.stores import OpenStore
from kvstore.errors import TierUnavailable
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_scope
from kvstore.tiers.disk_tools import DiskTools
from kvstore.tiers.tools import StoredRecord, Verdict
from kvstore.units import format_bytes


@pytest.fixture
def sample(bench: Bench) -> Sample:
    return make_sample(bench)


def config_of(sample: Sample, directory: Path) -> Path:
    file = directory / "store.yaml"
    file.write_text(f"tiers: [{{type: cpu}}, {{type: disk, path: '{sample.root}'}}]")
    return file


def test_b136_ls_tells_what_is_there_by_model_and_namespace(sample: Sample) -> None:
    hollow, size = sample.records()[0], sample.records()[0].stat().st_size
    os.truncate(hollow, 4096)
    os.truncate(hollow, size)
    os.utime(hollow, (NOW, NOW))
    before = state(sample.root)
    done = command("ls", sample.root, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (store,) = json.loads(done.stdout)["stores"]
    assert (store["tier"], store["place"], store["others"]) == ("disk", str(sample.root), {})
    used = [sum(p.stat().st_blocks * 512 for p in sample.records(scope)) for scope in (ALPHA, BETA)]
    assert store["records"] == 8
    assert store["bytes"] == sum(used) == sample.bench.used_bytes()
    spaces = {space["namespace"]: space for space in store["namespaces"]}
    for size, (scope, model, slug, records) in zip(
        used, ((ALPHA, "alpha/model", "alpha-model", 5), (BETA, "beta", "beta", 3)), strict=True
    ):
        space = spaces.pop(scope.namespace.ns16)
        figures = {"records": records, "bytes": size, "oldest_use": NOW, "newest_use": NOW}
        epoch = sample.records(scope)[0].parts[-4]
        assert (space["model"], space["slug"]) == (model, slug)
        assert {key: space[key] for key in figures} == figures
        assert space["epochs"] == [{"epoch": epoch, "is_published": True, **figures}]
        assert space["shards"] == [{"shard": "s0of1", **figures}]
        assert {"model": model, "records": records, "bytes": size} in store["models"]
    assert not spaces
    assert state(sample.root) == before


def test_b136_a_missing_store_is_no_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for name in ("none", "other", "other/file", "link"):
        for arguments in (["ls"], ["verify"], ["clear", "--yes"]):
            assert main([*arguments, str(tmp_path / name), "--json"]) == 2
            shown = capsys.readouterr()
            assert json.loads(shown.out)["stores"] == []
            assert shown.err.startswith(f"kvstore: {tmp_path / name}: ")
    assert (tmp_path / "other" / "file").read_text() == "mine"


def test_b136_verify_lists_broken_records(sample: Sample) -> None:
    os.truncate(sample.records()[0], 4096)
    done = command("verify", sample.root, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    (finding,) = json.loads(done.stdout)["stores"][0]["findings"]
    assert (finding["kind"], finding["address"]) == ("size", sample.records()[0].stem)


def test_the_store_of_the_configuration_is_found_without_its_path(sample: Sample, tmp_path: Path) -> None:
    done = command("ls", "--config", config_of(sample, tmp_path), "--json")
    assert json.loads(done.stdout)["stores"][0]["records"] == 8
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    sample.root.rename(home / ".cache" / "kvstore")
    done = command("ls", "--json", environ={"HOME": str(home)})
    assert json.loads(done.stdout)["stores"][0]["records"] == 8
    done = command("ls", tmp_path, "--config", tmp_path / "store.yaml")
    assert (done.returncode, done.stdout) == (2, "")


def test_ls_shows_every_epoch_and_which_is_in_use(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    record = sample.records()[0]
    old = record.parents[3] / ("0" * 16) / "s0of1" / record.parent.name
    old.mkdir(parents=True)
    record.rename(old / record.name)
    assert main(["ls", str(sample.root)]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("alpha/model")]
    assert row.split()[:3] == ["alpha/model", ALPHA.namespace.ns16, "0" * 16]
    assert f"{sample.records()[1].parts[-4]} *" in text
    size = format_bytes(sample.bench.used_bytes())
    assert f"8 records, {size} in 2 namespaces of 2 models" in text


def test_ls_lists_every_record_on_request(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(sample.root), "--records", "--json"])
    (store,) = json.loads(capsys.readouterr().out)["stores"]
    assert {r["address"] for r in store["all_records"]} == {p.stem for p in sample.bench.records()}
    assert all((sample.root / r["place"]).is_file() for r in store["all_records"])
    main(["ls", str(sample.root), "--records"])
    text = capsys.readouterr().out
    assert all(path.stem in text for path in sample.bench.records())


def test_ls_diff_names_the_fields_in_which_namespaces_of_a_model_differ(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_weights()
    write(sample.bench.open(other), [1], other)
    main(["ls", str(sample.root), "--diff", "--json"])
    (difference,) = json.loads(capsys.readouterr().out)["stores"][0]["differences"]
    assert difference == {
        "model": "alpha/model",
        "namespaces": sorted([ALPHA.namespace.ns16, other.namespace.ns16]),
        "fields": {"weights_digest": {ALPHA.namespace.ns16: None, other.namespace.ns16: "ab" * 32}},
    }
    main(["ls", str(sample.root), "--diff"])
    text = capsys.readouterr().out
    assert "alpha/model: 2 namespaces, 1 field different\n" in text
    assert "\nweights_digest  " in text


def test_names_in_a_store_can_not_steer_the_terminal(sample: Sample) -> None:
    evil = os.fsencode(sample.records()[0].parent) + b"/\x1b[2J\xff\n.txt"
    Path(os.fsdecode(evil)).write_text("")
    done = command("verify", sample.root)
    assert "?[2J??.txt" in done.stdout
    assert "\x1b" not in done.stdout
    done = command("verify", sample.root, "--json")
    (finding,) = json.loads(done.stdout.encode("utf-8"))["stores"][0]["findings"]
    assert finding["verdict"] == "strange"
    finding["place"].encode("utf-8")


def test_a_document_is_valid_wherever_it_ends() -> None:
    pieces: list[str] = []
    with pytest.raises(KeyboardInterrupt), JsonWriter(pieces.append) as document:
        document.list("stores")
        document.object()
        document.put("a", [1, {"b": "ä"}])
        document.list("empty")
        raise KeyboardInterrupt
    assert json.loads("".join(pieces)) == {"stores": [{"a": [1, {"b": "ä"}], "empty": []}]}


def test_b85_clear_without_yes_counts_and_removes_nothing(sample: Sample) -> None:
    before = state(sample.root)
    done = command("clear", sample.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"would remove 8 records, {format_bytes(sample.bench.used_bytes())}\n" in done.stdout
    assert "alpha/model " + ALPHA.namespace.ns16 + ": would remove 5 records" in done.stdout
    assert "Add --yes" in done.stdout
    document = json.loads(command("clear", sample.root, "--json").stdout)
    assert document["is_dry_run"] is True
    assert document["stores"][0]["matched"] == {"records": 8, "bytes": sample.bench.used_bytes()}
    assert document["stores"][0]["removed"] == {"records": 0, "bytes": 0}
    assert state(sample.root) == before


def test_b85_clear_of_one_tier_removes_its_records_only(sample: Sample, tmp_path: Path) -> None:
    file = config_of(sample, tmp_path)
    others = {path for path in state(sample.root) if not path.endswith(".safetensors")}
    done = command("clear", "--config", file, "--tier", "disk", "--yes", "--json")
    assert done.returncode == 0
    (store,) = json.loads(done.stdout)["stores"]
    assert store["removed"] == store["matched"]
    assert store["removed"]["records"] == 8
    assert set(state(sample.root)) == others


@pytest.mark.parametrize("tier", ["tape", "cpu", ""])
def test_b85_a_tier_that_is_unknown_or_keeps_nothing_is_an_error(sample: Sample, tmp_path: Path, tier: str) -> None:
    file = config_of(sample, tmp_path)
    done = command("clear", "--config", file, "--tier", tier, "--yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert "disk" in done.stderr
    assert len(sample.bench.records()) == 8


def test_clear_of_a_namespace_leaves_the_others(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(sample.root)
    assert main(["clear", root, "--namespace", "0" * 16, "--yes"]) == 2
    assert BETA.namespace.ns16 in capsys.readouterr().err
    assert len(sample.bench.records()) == 8
    assert main(["clear", root, "--namespace", ALPHA.namespace.ns16, "--yes"]) == 0
    assert (len(sample.records(ALPHA)), len(sample.records(BETA))) == (0, 3)
    assert main(["clear", root, "--namespace", sample.records(BETA)[0].parts[-5], "--yes"]) == 0
    assert sample.records(BETA) == []


def test_clear_by_age_goes_by_the_last_use(sample: Sample) -> None:
    records = sample.records()
    now = max(path.stat().st_ctime for path in records)
    for path in sample.bench.records():
        os.utime(path, (now, now))
    for path, days in ((records[0], 8), (records[1], 6.9), (records[2], -30)):
        os.utime(path, (now, now - days * 86400))
    assert command("clear", sample.root, "--older-than", "7").returncode == 2
    assert command("clear", sample.root, "--older-than", "7d", "--yes").returncode == 0
    assert sample.records() == records[1:]


def test_a_record_that_is_used_while_old_ones_are_cleared_is_kept(sample: Sample) -> None:
    used = sample.records()[2]
    tools = DiskTools(sample.root, BusyCalls([used], happens=lambda path: os.utime(path, (NOW + 60, NOW + 60))))
    (space,) = (space for space in tools.namespaces() if space.model == "alpha/model")
    cleared = clear(OpenStore("any", tools), space, NOW + 30, remove=True)
    assert (cleared.records, cleared.removed, cleared.failure) == (5, 4, "")
    assert sample.records() == [used]


def test_a_use_in_the_future_counts_as_now(sample: Sample) -> None:
    for path in sample.bench.records():
        os.utime(path, (NOW + 10**6, NOW + 10**6))
    tools = DiskTools(sample.root, now=lambda: NOW + 5.0)
    assert {item.used_at for item in tools.records() if isinstance(item, StoredRecord)} == {NOW + 5.0}


def test_what_was_used_or_replaced_since_it_was_listed_is_kept(sample: Sample) -> None:
    tools = DiskTools(sample.root, now=lambda: NOW + 100)
    used, replaced, gone, old, _ = (item for item in tools.records() if item.namespace.endswith(ALPHA.namespace.ns16))
    os.utime(sample.root / used.place, (NOW + 50, NOW + 50))
    content = (sample.root / replaced.place).read_bytes()
    (sample.root / ".new").write_bytes(content)
    (sample.root / ".new").rename(sample.root / replaced.place)
    os.utime(sample.root / replaced.place, (NOW, NOW))
    (sample.root / gone.place).unlink()
    assert [tools.remove(record, NOW + 50) for record in (used, replaced, gone, old)] == [False, False, False, True]
    assert [(sample.root / r.place).exists() for r in (used, replaced, gone, old)] == [True, True, False, False]


@pytest.mark.parametrize(
    "place", ["namespace.json", "../a", "a/b/c/d/e", "{ns}/epoch", "{ns}/{e}/{s}/../x.safetensors"]
)
def test_only_the_exact_name_of_a_record_is_ever_removed(sample: Sample, place: str) -> None:
    path = sample.records()[0]
    place = place.format(ns=path.parts[-5], e=path.parts[-4], s=path.parts[-3])
    record = StoredRecord("n", "e", "s", path.stem, place, 0, None)
    with pytest.raises(TierUnavailable, match="not the name of a record"):
        DiskTools(sample.root).remove(record)


def test_clearing_under_a_running_engine_is_an_ordinary_miss(bench: Bench) -> None:
    scope = sample_scope()
    tier = bench.open(scope)
    write(tier, range(4))
    assert read(tier, range(4)) == [Outcome.HIT] * 4
    assert main(["clear", str(bench.root), "--yes"]) == 0
    assert read(tier, range(4)) == [Outcome.MISS] * 4
    assert write(tier, range(4)) == [Outcome.STORED] * 4
    assert read(tier, range(4)) == [Outcome.HIT] * 4
    assert {f.verdict for f in DiskTools(bench.root).verify()} == {Verdict.OK}


def test_a_name_in_the_way_of_the_walk_is_not_followed(sample: Sample, tmp_path: Path) -> None:
    """A directory of records that is a link to somebody else's: nothing behind it is listed or removed."""
    outside = tmp_path / "outside"
    fan = sample.records()[0].parent
    fan.rename(outside)
    fan.symlink_to(outside)
    inside = len(list(outside.iterdir()))
    assert main(["clear", str(sample.root), "--yes"]) == 0
    assert len(list(outside.iterdir())) == inside > 0


def test_looking_starts_without_heavy_modules() -> None:
    loaded = "print(sorted({'torch','vllm','numpy','pydantic','yaml'} & set(sys.modules)))"
    script = f"import sys, kvstore.cli; kvstore.cli.ls, kvstore.cli.verify; {loaded}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
