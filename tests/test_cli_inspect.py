"""``kvstore inspect``: all about one record, found by key or by file."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from disk_faults import Bench
from sample_store import ALPHA, Sample, flip, make_sample

from kvstore.cli import main
from kvstore.layout import HEADER_BYTES


@pytest.fixture
def sample(bench: Bench) -> Sample:
    return make_sample(bench)


def test_inspect_shows_all_about_a_record_by_key_and_by_file(
    sample: Sample, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sample.records()[0]
    seen = []
    for arguments in (
        [path.stem[:10], "--path", str(sample.root)],
        [path.stem.upper(), "--path", str(sample.root)],
        [path.name, "--path", str(sample.root)],
        [str(path)],
    ):
        assert main(["inspect", *arguments, "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)["records"]
        assert record["place"].endswith(path.name)
        seen.append({key: value for key, value in record.items() if key not in ("place", "store")})
    assert all(record == seen[0] for record in seen)
    record = seen[0]
    assert record["address"] == record["header"]["address"] == path.stem
    assert record["checksum"]["state"] == "equal"
    assert record["checksum"]["header"] == record["checksum"]["payload"]
    assert (record["model"], record["namespace"]) == ("alpha/model", ALPHA.namespace.ns16)
    assert (record["epoch"], record["is_published"], record["shard"]) == (path.parts[-4], True, "s0of1")
    assert record["content_bytes"] == path.stat().st_size
    assert record["geometry"]["kind"] == "full_attention"
    assert len(record["geometry"]["layers"]) == 3
    main(["inspect", str(path)])
    text = capsys.readouterr().out
    assert "geometry.layers            3 x bfloat16 HTC [2, 16, 24]\n" in text
    assert f"checksum                   equal: header {record['checksum']['header']}" in text


def test_inspect_of_damage_says_what_differs(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    path = sample.records()[0]
    flip(path, HEADER_BYTES)
    assert main(["inspect", path.stem, "--path", str(sample.root), "--json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)["records"]
    assert (record["kind"], record["checksum"]["state"]) == ("checksum", "different")
    os.truncate(path, 100)
    assert main(["inspect", str(path)]) == 1
    assert "damaged (short: 100 bytes)" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["", "zz", "00000000", "./nothing", "0" * 65])
def test_inspect_of_nothing_is_an_error(sample: Sample, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", key, "--path", str(sample.root)]) == 2
    assert capsys.readouterr().err.startswith("kvstore: ")


def test_a_key_of_several_addresses_is_not_guessed(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    first = Counter(path.name[0] for path in sample.bench.records()).most_common(1)[0]
    assert first[1] > 1
    assert main(["inspect", first[0], "--path", str(sample.root)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sum(line.startswith(f"  {first[0]}") for line in shown.err.splitlines()) == first[1]
