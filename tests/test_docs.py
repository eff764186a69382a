"""The documents tell the truth: what they link to, name, quote and compute is what is there."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.cases import CASES
from kvstore.cli import main
from kvstore.cli.report import engine_report
from kvstore.cli.table import render
from kvstore.config import Config, parse
from kvstore.errors import ConfigError
from kvstore.keys import Addresser, Namespace, chunk_hashes, request_identity
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry
from kvstore.snapshots import Snapshot, TierRow
from kvstore.tiers.base import tier_types
from kvstore.tiers.record import RecordFormat, parse_header
from scripts import readme_table
from tests.house_rules import MACHINE_PATH

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")


def blocks(page: Path, info: str) -> list[str]:
    """Contents of the fenced blocks of ``page`` whose info string is ``info``."""
    return [match[3] for match in _BLOCK.finditer(page.read_text()) if match[2].strip() == info]


def block(page: Path, info: str) -> str:
    (only,) = blocks(page, info)
    return only


def spans(page: Path) -> list[str]:
    return _SPAN.findall(_BLOCK.sub("", page.read_text()))


def lines_of_commands(page: Path) -> list[str]:
    """What the page tells people to type: console lines after ``$``, and code spans."""
    typed = [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    return [line.split("  #")[0].strip() for line in [*typed, *spans(page)]]


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def setting_names() -> dict[str, Any]:
    """Every key of the configuration by its full name, with its default."""
    config = Config()
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
        else:
            found[field.name] = value
    for name, kind in tier_types().items():
        settings = kind.config()
        found |= {
            f"tiers[{name}].{inner.name}": getattr(settings, inner.name) for inner in dataclasses.fields(settings)
        }
    return found


# -- what is named exists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(_BLOCK.sub("", page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(path), f"{target} names no heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_kvstore_command_and_option_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in lines_of_commands(page):
        words = line.split()
        if words[0] != "kvstore" or len(words) == 1:
            continue
        with pytest.raises(SystemExit) as stopped:
            main([words[1], "--help"])
        assert stopped.value.code == 0, f"{line}: there is no such command"
        shown = capsys.readouterr().out
        for option in words[2:]:
            assert not option.startswith("-") or re.search(rf"{re.escape(option)}\b", shown), f"{line}: {option}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_target_selection_module_and_path_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    sources = {path.stem: path.read_text() for path in ROOT.glob("tests/*.py")}
    tests = " ".join([*sources, *re.findall(r"def (test_\w+)", "".join(sources.values()))])
    for line in lines_of_commands(page):
        if target := re.match(r"make ([a-z]+)", line):
            assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), f"{line}: no such target"
        if selected := re.search(r'-k (\w+)"', line):
            assert selected[1] in tests, f"{line}: selects no test"
        if module := re.match(r"python -m ((?:benchmarks|demo)[\w.]*)", line):
            path = ROOT / module[1].replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{line}: no such module"
        if re.fullmatch(r"(?:kvstore|connectors|configs|benchmarks|demo|scripts|tests|docs)/[\w./-]+", line):
            assert (ROOT / line).exists(), f"{line}: no such file"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_configuration_key_that_is_named_exists(page: Path) -> None:
    known = setting_names()
    sections = {name.split(".")[0] for name in known if "." in name and "[" not in name}
    for span in spans(page):
        if re.fullmatch(rf"(?:{'|'.join(sections)}|tiers\[\w+\])\.\w+", span):
            assert span in known, f"{span} is no key"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_example_configuration_is_accepted(page: Path) -> None:
    for text in blocks(page, "yaml"):
        parse(text, tier_types())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_no_path_of_one_machine(page: Path) -> None:
    assert MACHINE_PATH.findall(page.read_text()) == []


def test_every_named_module_of_the_store_exists() -> None:
    for page in PAGES:
        for span in spans(page):
            if match := re.fullmatch(r"((?:kvstore|connectors)(?:\.[a-z_]+)+)(?:\.[A-Z]\w*)?", span):
                path = ROOT / match[1].replace(".", "/")
                is_event = f'"{span}' in "".join(p.read_text() for p in ROOT.glob("connectors/vllm/*.py"))
                is_entry_point = f'entry-points."{span}"' in (ROOT / "pyproject.toml").read_text()
                assert path.is_dir() or path.with_suffix(".py").is_file() or is_event or is_entry_point, span


# -- what is told is so ----------------------------------------------------------------------------------------------


def rows(page: Path) -> Iterator[list[str]]:
    """Cells of every row of every table of the page."""
    for line in page.read_text().splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_configuration_document_has_every_key_with_its_default() -> None:
    told = {cells[0].strip("`"): cells[2] for cells in rows(DOCS / "configuration.md") if len(cells) == 4}
    known = setting_names()
    assert told.keys() - {"key", "---"} == known.keys()
    machine_dependent = {"tiers", "tiers[cpu].capacity"}
    for name in known.keys() - machine_dependent:
        shown = told[name]
        text = shown.replace("null", "~").replace("True", "true")
        section, _, key = name.rpartition(".")
        if section.startswith("tiers["):
            kind = section[6:-1]
            value = parse(f"tiers: [{{type: {kind}, {key}: {text}}}]", tier_types()).settings_of(kind)
            assert getattr(value, key) == known[name], name
        else:
            value = parse(f"{section}: {{{key}: {text}}}" if section else f"{key}: {text}", tier_types())
            assert (getattr(getattr(value, section), key) if section else getattr(value, key)) == known[name], name


def test_the_wrong_example_is_reported_as_the_configuration_document_says() -> None:
    page = DOCS / "configuration.md"
    with pytest.raises(ConfigError) as caught:
        parse(block(page, "yaml wrong"), tier_types(), origin="kvstore.yaml")
    assert str(caught.value) == block(page, "text report").rstrip()


def test_the_operations_document_explains_every_line_of_the_table() -> None:
    counters = (("hook_errors_total", "", "hook", 1.0), ("probe_timeouts_total", "", "", 1.0))
    snapshot = Snapshot("x", ("store",), 0.0, True, {}, (TierRow("tier"),), counters)
    page = DOCS / "operations.md"
    explained = {name for cells in rows(page) for name in _SPAN.findall(cells[0])}
    shown = [re.split(r"  +|: ", line)[0] for line in render(engine_report(snapshot, 0.0)).splitlines()[5:] if line]
    assert len(shown) > 20
    assert [label for label in shown if label not in explained] == []
    sample = next(text for text in blocks(page, "text") if "instance" in text)
    for label in set(shown) - {"errors in hooks", "probe timeouts"}:
        assert re.search(rf"^{re.escape(label)}", sample, re.MULTILINE), f"{label} is not in the example"


def test_the_operations_document_names_reasons_and_events_of_the_code() -> None:
    text = (DOCS / "operations.md").read_text()
    code = "".join(p.read_text() for folder in ("kvstore", "connectors") for p in (ROOT / folder).rglob("*.py"))
    events = _SPAN.findall("".join(re.findall(r"^\| .*", text.split("## Log lines")[1].split("## ")[0], re.MULTILINE)))
    reasons = re.findall(r"^\| `(\w+)` \|", text.split("| miss reason |")[1].split("\n## ")[0], re.MULTILINE)
    assert len(events) > 8
    assert len(reasons) == 10
    for name in events:
        assert f'"{name}' in code, f"nothing logs {name}"
    for name in reasons:
        assert f'"{name}"' in code, f"nothing counts {name}"


def test_the_record_document_has_every_field_and_kind_of_difference() -> None:
    from kvstore.tiers import record

    told = {name for cells in rows(DOCS / "record.md") for name in _SPAN.findall(cells[0])}
    kinds = set(re.findall(r"``(\w+)``", (record.__doc__ or "").split("Kinds of difference")[1]))
    assert kinds - told == {"short"}  # a file of another length is ``size`` before its page is looked at
    assert set(json.loads(block(DOCS / "record.md", "json header"))["__metadata__"]) <= told


# -- what is computed is right ---------------------------------------------------------------------------------------


def golden() -> dict[str, Any]:
    return json.loads(block(DOCS / "addresses.md", "json golden"))  # type: ignore[no-any-return]


def test_the_golden_example_of_the_addresses_document_is_what_the_code_computes() -> None:
    example = golden()
    namespace = Namespace(example["fields"])
    hashes = chunk_hashes(namespace.digest, example["tokens"], example["fields"]["chunk_tokens"])
    identity = request_identity(salt=example["salt"])
    assert namespace.canonical.decode() == example["canonical"]
    assert namespace.digest.hex() == example["namespace_digest"]
    assert f"{namespace.slug}-{namespace.ns16}" == example["directory"]
    assert [h.hex() for h in hashes] == example["prefix_hashes"]
    assert [a.hex() for a in Addresser(namespace.digest).addresses(hashes)] == example["addresses"]
    assert identity.hex() == example["identity"]
    salted = Addresser(namespace.digest, 0, identity).addresses(hashes)
    assert [a.hex() for a in salted] == example["salted_addresses"]


def test_the_python_of_the_addresses_document_computes_its_golden_example_alone() -> None:
    source = block(DOCS / "addresses.md", "python spec")
    assert "kvstore" not in re.sub(r'b?"[^"]*"', "", source)
    spec: dict[str, Any] = {}
    exec(source, spec)
    example = golden()
    digest = spec["namespace_digest"](example["fields"])
    hashes = spec["prefix_hashes"](digest, example["tokens"], example["fields"]["chunk_tokens"])
    identity = spec["identity"](example["salt"])
    assert digest.hex() == example["namespace_digest"]
    assert [h.hex() for h in hashes] == example["prefix_hashes"]
    assert [spec["address"](digest, h).hex() for h in hashes] == example["addresses"]
    assert [spec["address"](digest, h, identity).hex() for h in hashes] == example["salted_addresses"]


@pytest.fixture
def record() -> bytes:
    """The record of record.md's example."""
    example = golden()
    names = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    layers = tuple(LayerGeometry(name, "float32", "HNC", (2, 4, 16), 512) for name in names)
    geometry = RecordGeometry(GroupGeometry(0, "full_attention", 4, "LBHNC", layers), 4)
    form = RecordFormat(Namespace(example["fields"]), geometry)
    buffer = memoryview(bytearray(form.slot_bytes))
    payload = (np.arange(form.payload_bytes) % 256).astype(np.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + form.payload_bytes] = payload.tobytes()
    form.seal(bytes.fromhex(example["addresses"][0]), buffer)
    return bytes(buffer)


def test_the_example_of_the_record_document_is_what_the_code_writes(record: bytes) -> None:
    told = block(DOCS / "record.md", "json header").replace("\n", "")
    assert record[8:HEADER_BYTES].decode().rstrip() == told
    assert parse_header(record[:HEADER_BYTES]).record_bytes == len(record) == 8192
    for line in block(DOCS / "record.md", "text hexdump").splitlines():
        if line != "...":
            at, content = int(line[:8], 16), bytes.fromhex(line[8:59])
            assert record[at : at + 16] == content
            assert line[61:77] == "".join(chr(b) if 32 <= b < 127 else "." for b in content)


def test_the_reader_of_the_record_document_reads_a_record(record: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.safetensors"
    path.write_bytes(record)
    scope: dict[str, Any] = {"path": path}
    exec(block(DOCS / "record.md", "python reader"), scope)
    assert [len(layer) for layer in scope["layers"]] == [512, 512]
    assert b"".join(layer.tobytes() for layer in scope["layers"]) == record[HEADER_BYTES : HEADER_BYTES + 1024]


def test_measurements_in_decisions_run() -> None:
    results: dict[str, Any] = {}
    for page in sorted((DOCS / "decisions").glob("*.md")):
        assert "**Measured.**" in page.read_text()
        for source in blocks(page, "python run"):
            exec(source, results)
    assert results["bytes_a_chunk"] < 400
    assert results["refused"] is True
    assert len(results["digest"]) == len("blake3:") + 64


# -- the demo's table ------------------------------------------------------------------------------------------------


def test_the_table_of_the_readme_has_the_demos_cases() -> None:
    results = {
        case: {"ttft_s": 0.1 * (n + 1), "external_tokens": n, "identical": n != 4} for n, case in enumerate(CASES)
    }
    lines = readme_table.table(results).splitlines()
    assert list(readme_table.LABELS) == list(CASES)
    assert len(lines) == 2 + len(CASES)
    assert lines[2] == "| cold prefill | 100.0 ms | 0.50x | 0 | yes |"
    assert lines[6].endswith("| 4 | no |")


def test_only_what_is_between_the_marks_of_the_readme_is_replaced() -> None:
    text = (ROOT / "README.md").read_text()
    once = readme_table.filled(text, "| new |")
    assert readme_table.filled(once, "| new |") == once
    before, after = text.split(readme_table.BEGIN)[0], text.split(readme_table.END)[1]
    assert once == f"{before}{readme_table.BEGIN}\n| new |\n{readme_table.END}{after}"
    with pytest.raises(ValueError, match="once each"):
        readme_table.filled("no marks", "| new |")
