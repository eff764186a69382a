"""``kvstore stats``: honest ratios, accounts that add up, one valid JSON document, and a start that is light."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore import __version__
from kvstore.cli import main
from kvstore.snapshots import SnapshotWriter

HEAVY = ("torch", "vllm", "numpy", "pydantic", "yaml", "redis")

TIERS = [
    {"name": "fast", "capacity_bytes": 4 << 30, "used_bytes": 1 << 30, "chunks": 128, "state": "open", "notes": []},
    {
        "name": "slow",
        "capacity_bytes": 20 << 30,
        "used_bytes": None,
        "chunks": 640,
        "state": "down",
        "notes": ["buffered"],
    },
]
COUNTERS: list[tuple[str, str, str, float]] = [
    ("requests_total", "", "", 5),
    ("queried_tokens_total", "", "", 8000),
    ("local_tokens_total", "", "", 800),
    ("hit_tokens_total", "fast", "", 3968),
    ("hit_tokens_total", "slow", "", 1000),
    ("miss_tokens_total", "", "absent", 2000),
    ("miss_tokens_total", "", "timeout", 232),
    ("delivered_tokens_total", "fast", "", 3968),
    ("delivered_tokens_total", "slow", "", 750),
    ("failed_tokens_total", "slow", "damaged", 250),
    ("skipped_chunks_total", "slow", "busy", 4),
    ("missed_records_total", "slow", "truncated", 2),
    ("written_bytes_total", "slow", "", 3e9),
    ("write_seconds_total", "slow", "", 2),
    ("read_bytes_total", "slow", "", 4e9),
    ("copied_in_bytes_total", "", "", 6e9),
    ("copy_seconds_total", "", "in", 2),
    ("tier_errors_total", "slow", "EIO", 1),
]
ENGINE = {"model": "tiny-llama", "namespace": "0123456789abcdef", "chunk_tokens": 32, "block_tokens": 32, "ranks": 1}


def publish(directory: Path, instance: str = "e1", **changes: Any) -> None:
    document = {"engine": ENGINE, "tiers": TIERS, "counters": COUNTERS, **changes}
    assert SnapshotWriter(directory, instance, "scheduler").publish(document)


def command(*arguments: object, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from kvstore.cli import main; sys.exit(main())", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **(environ or {})},
    )  # fmt: skip


def row(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(label + "  ")]
    return re.split(r"  +", line)[1:]


def test_a_table_has_every_figure_with_its_denominator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path)
    assert main(["stats", "--dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny-llama  instance e1  alive, snapshot ")
    assert "namespace 0123456789abcdef  chunk 32  block 32  ranks 1" in text
    assert row(text, "capacity") == ["4.00 GiB", "20.0 GiB"]
    assert row(text, "used") == ["1.00 GiB of 4.00 GiB (25.0 %)", "-"]
    assert row(text, "chunks") == ["128", "640"]
    assert row(text, "hit tokens of queried") == ["3968 of 8000 (49.6 %)", "1000 of 8000 (12.5 %)"]
    assert row(text, "delivered of hit") == ["3968 of 3968 (100.0 %)", "750 of 1000 (75.0 %)"]
    assert row(text, "failed tokens") == ["-", "damaged 250"]
    assert row(text, "skipped chunks") == ["-", "busy 4"]
    assert row(text, "missed records") == ["-", "truncated 2"]
    assert row(text, "bytes in") == ["-", "2.79 GiB at 1.50 GB/s"]
    assert row(text, "bytes out") == ["-", "3.73 GiB"]
    assert row(text, "errors") == ["-", "EIO 1"]
    assert row(text, "state") == ["open", "down"]
    assert row(text, "engine-local tokens") == ["800 of 8000 (10.0 %)"]
    assert row(text, "misses by reason") == ["absent 2000, timeout 232"]
    assert row(text, "block copies") == ["in 5.59 GiB at 3.00 GB/s, out -"]
    assert "queried = local + hits + misses: 8000 = 800 + 4968 + 2232\n" in text
    assert "MISMATCH" not in text
    assert "\x1b" not in text


def test_accounts_that_do_not_add_up_are_called_a_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, counters=[*COUNTERS, ("miss_tokens_total", "", "lost", 1)])
    main(["stats", "--dir", str(tmp_path)])
    assert "8000 = 800 + 4968 + 2233  MISMATCH" in capsys.readouterr().out
    main(["stats", "--dir", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["engines"][0]["tokens"]["adds_up"] is False


def test_no_denominator_is_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, counters=[])
    main(["stats", "--dir", str(tmp_path)])
    text = capsys.readouterr().out
    assert row(text, "hit tokens of queried") == ["-", "-"]
    assert row(text, "delivered of hit") == ["-", "-"]
    assert row(text, "engine-local tokens") == ["-"]
    main(["stats", "--dir", str(tmp_path), "--json"])
    tier = json.loads(capsys.readouterr().out)["engines"][0]["tiers"][0]
    assert tier["hit_tokens"] == {"value": 0, "of": 0, "ratio": None}


def test_json_is_one_document_with_all_of_it(tmp_path: Path) -> None:
    publish(tmp_path)
    publish(tmp_path, "e2")
    done = command("stats", "--dir", tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert sorted(engine["instance"] for engine in document["engines"]) == ["e1", "e2"]
    engine = document["engines"][0]
    assert engine["engine"] == ENGINE
    assert engine["tokens"]["hits"] == {"value": 4968, "of": 8000, "ratio": 0.621}
    assert engine["tiers"][1]["in"] == {"bytes": 3 * 10**9, "seconds": 2, "gigabytes_per_second": 1.5}
    assert engine["tiers"][1]["out"]["gigabytes_per_second"] is None
    assert {tuple(row[:3]) for row in engine["counters"]} == {row[:3] for row in COUNTERS}
    assert engine["alive"] is True


def test_each_engine_has_its_own_table_and_an_ended_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, "running")
    publish(tmp_path, "over")
    file = tmp_path / "over.scheduler.json"
    file.write_text(file.read_text().replace('"pid_start":', '"pid_start":1,"was":'))
    main(["stats", "--dir", str(tmp_path)])
    text = capsys.readouterr().out
    assert "instance running  alive" in text
    assert "instance over  ended" in text
    assert text.count("queried = local + hits + misses") == 2


def test_a_tier_that_only_has_counters_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, tiers=[])
    main(["stats", "--dir", str(tmp_path)])
    assert row(capsys.readouterr().out, "hit tokens of queried")[0] == "3968 of 8000 (49.6 %)"
    publish(tmp_path, tiers=[], counters=[])
    main(["stats", "--dir", str(tmp_path)])
    assert "no tiers" in capsys.readouterr().out


def test_a_snapshot_can_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2Jevil\r\n"
    tier = {"name": evil, "state": evil, "notes": [evil]}
    publish(
        tmp_path, engine={"model": evil, "ranks": evil}, tiers=[tier], counters=[("miss_tokens_total", "", evil, 1)]
    )
    main(["stats", "--dir", str(tmp_path)])
    text = capsys.readouterr().out
    assert "evil" in text
    assert not {"\x1b", "\r"} & set(text)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_snapshot_says_where_it_looked_and_what_to_do(tmp_path: Path, flags: list[str]) -> None:
    done = command("stats", "--dir", tmp_path / "none", *flags)
    assert done.returncode == 2
    assert f"{tmp_path / 'none'} (no such directory)" in done.stderr
    assert "stats.snapshot_dir" in done.stderr
    assert (json.loads(done.stdout)["engines"] == []) if flags else (done.stdout == "")


def test_the_directory_is_found_without_being_named(tmp_path: Path) -> None:
    runtime, home = tmp_path / "run", tmp_path / "home"
    root = home / ".cache" / "kvstore" / ".stats"
    for directory, instance in ((runtime / "kvstore", "in-run"), (root, "in-root")):
        directory.mkdir(parents=True)
        publish(directory, instance)
    both = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(home)}
    done = command("stats", "--json", environ=both)
    assert {engine["instance"] for engine in json.loads(done.stdout)["engines"]} == {"in-run", "in-root"}
    done = command("stats", "--json", environ={**both, "XDG_RUNTIME_DIR": ""})
    assert [engine["instance"] for engine in json.loads(done.stdout)["engines"]] == ["in-root"]


def test_a_configuration_file_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "snaps").mkdir()
    publish(tmp_path / "snaps", "named")
    file = tmp_path / "c.yaml"
    file.write_text(f"tiers: []\nstats: {{snapshot_dir: '{tmp_path}/snaps'}}\n")
    done = command("stats", "--config", file, "--json")
    assert [engine["instance"] for engine in json.loads(done.stdout)["engines"]] == ["named"]
    file.write_text("stats: {snapshot_dir: off}")
    done = command("stats", "--config", file)
    assert (done.returncode, "snapshot_dir is off" in done.stderr) == (2, True)
    file.write_text("stas: {}")
    done = command("stats", "--config", file)
    assert done.returncode == 2
    assert 'c.yaml:1: stas: unknown key; did you mean "stats"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_watch_shows_again_and_ends_after_its_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path)
    assert main(["stats", "--dir", str(tmp_path), "--watch", "0.001", "--count", "3"]) == 0
    assert capsys.readouterr().out.count("instance e1") == 3
    assert main(["stats", "--dir", str(tmp_path / "none"), "--watch", "0.001", "--count", "1"]) == 2


def test_watch_waits_for_a_first_engine_and_ends_well_on_interrupt(tmp_path: Path) -> None:
    code = "import sys; from kvstore.cli import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "stats", "--dir", str(tmp_path), "--watch", "0.05"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert "No engine" in child.stdout.readline()
        publish(tmp_path)
        deadline = time.monotonic() + 30
        while "instance e1" not in child.stdout.readline():
            assert time.monotonic() < deadline
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    finally:
        child.kill()
    assert (child.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "--watch"],
        ["--count", "2"],
        ["--watch", "0"],
        ["--watch", "soon"],
        ["--dir", "a", "--config", "b"],
        ["--colour"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["stats", *arguments])
    assert caught.value.code == 2
    assert "usage: kvstore" in capsys.readouterr().err


def test_colour_is_for_terminals_and_not_where_it_is_unwanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["stats", "--dir", str(tmp_path)])
    assert "\x1b[1mtiny-llama" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["stats", "--dir", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path: Path) -> None:
    for number in range(60):
        publish(tmp_path, f"e{number}")
    code = "import sys; from kvstore.cli import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "stats", "--dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(timeout=30) == 0


@pytest.mark.parametrize("statement", ["import kvstore", "import kvstore.cli", "HELP", "STATS"])
def test_starting_is_light(tmp_path: Path, statement: str) -> None:
    publish(tmp_path)
    runs = {"HELP": ["--help"], "STATS": ["stats", "--dir", str(tmp_path)]}
    run = "import kvstore.cli\ntry:\n    kvstore.cli.main({})\nexcept SystemExit as end:\n    assert not end.code"
    code = run.format(runs[statement]) if statement in runs else statement
    code += f"\nimport sys\nprint('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvstore {__version__}\n"
