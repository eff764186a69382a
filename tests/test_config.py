"""Settings: what is written is what is meant, and everything wrong is in one report with its line and path."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
from dataclasses import field
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from kvstore.config import (
    STRICT,
    Config,
    Duration,
    Fraction,
    LimitsConfig,
    Size,
    StatsConfig,
    StorePath,
    TierConfig,
    describe,
    load,
    parse,
    store_path,
)
from kvstore.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True, slots=True, config=STRICT)
class FastConfig:
    capacity: Size = 1 << 30
    pin: Literal["auto", "required", "off"] = "auto"


@dataclass(frozen=True, slots=True, config=STRICT)
class SlowConfig:
    path: StorePath = field(default_factory=lambda: store_path("~/.cache/slow"))
    capacity: Size = 20 << 30
    min_free: Fraction = 0.05
    timeout: Duration = 2.0
    sync: bool = False
    password: str | None = field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    name: str
    config: type
    order: int
    is_default: bool


# Not in lookup order, and with one that is no default: both must be seen to matter.
TYPES = {
    "slow": Kind("slow", SlowConfig, 20, True),
    "fast": Kind("fast", FastConfig, 10, True),
    "extra": Kind("extra", FastConfig, 5, False),
}


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, TYPES, "f.yaml", environ or {})
    return list(caught.value.problems)


def slow(yaml: str, environ: dict[str, str] | None = None) -> SlowConfig:
    settings = parse(f"tiers: [{{type: slow, {yaml}}}]", TYPES, environ=environ or {}).settings_of("slow")
    assert isinstance(settings, SlowConfig)
    return settings


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n", "null", "{}", "save:\nlimits: {}\n"])
def test_an_empty_file_is_the_defaults(text: str) -> None:
    config = parse(text, TYPES)
    assert config == Config(tiers=(TierConfig("fast", FastConfig()), TierConfig("slow", SlowConfig())))
    assert (config.chunk_tokens, config.limits.probe_timeout, config.limits.load_timeout) == (256, 0.02, 5.0)
    assert (config.save.decode, config.save.partial_tail, config.policy.evict) == (False, False, "lru")
    assert (config.identity.weights_digest, config.identity.auth_key, config.identity.on_reset) == (
        "full",
        None,
        "detach",
    )
    assert (config.stats.snapshot_dir, config.stats.every) == ("auto", 1.0)


def test_no_file_is_the_defaults_and_a_missing_file_is_not(tmp_path: Path) -> None:
    assert load(None, TYPES) == parse("", TYPES)
    with pytest.raises(ConfigError, match=r"absent\.yaml: there is no such configuration file"):
        load(tmp_path / "absent.yaml", TYPES)
    with pytest.raises(ConfigError, match="can not be read"):
        load(tmp_path, TYPES)
    (tmp_path / "latin.yaml").write_bytes(b"chunk_tokens: 16 # \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.yaml", TYPES)


def test_every_key_that_is_written_is_in_the_result(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(
        "chunk_tokens: 64\nsave: {decode: true}\npolicy: {evict: lru}\n"
        "limits: {probe_timeout: 5ms, load_timeout: 1m}\nstats: {snapshot_dir: /run/x/../y/, every: 100ms}\n"
        "tiers:\n  - {type: slow, path: /data, capacity: 1.5TiB, min_free: 10%, sync: true, password: '007'}\n"
        "  - {type: extra, capacity: 0, pin: off}\n",
        encoding="utf-8",
    )
    config = load(file, TYPES)
    assert config.chunk_tokens == 64
    assert config.save.decode is True
    assert config.limits == LimitsConfig(0.005, 60.0)
    assert config.stats == StatsConfig("/run/y", 0.1)
    assert [tier.type for tier in config.tiers] == ["slow", "extra"]
    assert config.settings_of("slow") == SlowConfig(Path("/data"), 3 << 39, 0.1, 2.0, True, "007")
    assert config.settings_of("extra") == FastConfig(0, "off")
    assert config.settings_of("fast") is None


def test_no_tiers_is_a_choice() -> None:
    assert parse("tiers: []", TYPES).tiers == ()
    assert parse("tiers: []", TYPES).local_root is None


def test_b120_all_problems_are_in_one_report_with_line_path_and_suggestion() -> None:
    text = (
        "chunk_tokns: 64\n"
        "probe_timeout: 1s\n"
        "tiers:\n"
        "  - type: slow\n"
        "    pth: /x\n"
        "    capacity: 5\n"
        "  - {type: fst}\n"
        "  - {type: slow}\n"
        "  - fast\n"
        "  - {capacity: 1GiB}\n"
        "limits: {load_timeout: 0}\n"
        "limits: {}\n"
        "save: 5\n"
    )
    assert problems(text) == [
        'f.yaml:1: chunk_tokns: unknown key; did you mean "chunk_tokens"?',
        "f.yaml:2: probe_timeout: unknown key; it belongs to limits.probe_timeout",
        'f.yaml:5: tiers[0].pth: unknown key; did you mean "path"?',
        "f.yaml:6: tiers[0].capacity: 5 is not a size; write a number with its unit, such as 4GiB",
        "f.yaml:7: tiers[1].type: there is no tier 'fst'; did you mean \"fast\"?; known are slow, fast, extra",
        "f.yaml:8: tiers[2].type: there is already a tier slow; each kind may be used once",
        "f.yaml:9: tiers[3]: a tier is a mapping such as {type: slow}",
        "f.yaml:10: tiers[4]: it has no type; known are slow, fast, extra",
        "f.yaml:11: limits.load_timeout: must be more than 0, not 0",
        "f.yaml:12: limits: given twice; the first is on line 11",
        "f.yaml:13: save: must be a mapping, not 5",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "f.yaml:1: the file must be a mapping such as chunk_tokens: 256, not a list"),
        ("just text", "f.yaml:1: the file must be a mapping"),
        ("save:\n\tdecode: true\n", r"f.yaml:2: not valid YAML: .*spaces, not tabs"),
        ("a: {b: 1", "f.yaml:1: not valid YAML"),
        ("chunk_tokens: 1\n---\nchunk_tokens: 2\n", "f.yaml:2: not valid YAML: expected a single document"),
        ("save: &a {}\nlimits: *a\n", "f.yaml:2: anchors and aliases are not supported"),
        ("a: &a [*a]", "f.yaml:1: anchors and aliases are not supported"),
        ("policy: !!python/name:os.system x", r"f.yaml:1: policy: the tag .* is not supported"),
        ("? [a, b]\n: 1\n", "f.yaml:1: the file: a key must be a word"),
        ("save: {decode: \x01}", r"f.yaml:1: not valid YAML: character U\+0001"),
        ("[" * 5000 + "]" * 5000, "f.yaml:1: nested too deeply"),
        ("tiers:", r"f.yaml:1: tiers: write a list"),
        ("tiers: {type: slow}", r"f.yaml:1: tiers: write a list"),
        ("tiers: [{type: slow, sync: yes}]", r"tiers\[0\].sync: write true or false, not 'yes'"),
        ("tiers: [{type: fast, pin: maybe}]", r"tiers\[0\].pin: write 'auto', 'required' or 'off', not 'maybe'"),
        ("policy: {evict: lruu}", "f.yaml:1: policy.evict: 'lruu' is not a policy; known are .*lru"),
        ("stats: {snapshot_dir: $HOME/x}", r"stats.snapshot_dir: .* write \$\{HOME\}"),
    ],
)
def test_what_can_not_be_read_is_an_error_that_says_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, TYPES, "f.yaml", {})


@pytest.mark.parametrize("value", ["0", "-16", "16.0", "'16'", "true", "null", "1e3", "16GiB"])
def test_chunk_tokens_is_a_whole_number_above_zero(value: str) -> None:
    (problem,) = problems(f"\nchunk_tokens: {value}")
    assert problem.startswith("f.yaml:2: chunk_tokens: ")


@pytest.mark.parametrize("value", ["0.5", "5", "1e3", "-1", "five", ".nan", ".inf", "5 G B", "true", "9999999999TiB"])
def test_b124_a_size_in_a_file_needs_its_unit(value: str) -> None:
    (problem,) = problems(f"tiers: [{{type: slow, capacity: {value}}}]")
    assert problem.startswith("f.yaml:1: tiers[0].capacity: ")
    assert "4GiB" in problem or "out of range" in problem


def test_b124_sizes_with_units_and_zero_are_taken() -> None:
    sizes = {"5GB": 5 * 10**9, "5GiB": 5 * 2**30, "512MiB": 2**29, "0.5GiB": 2**29, "0": 0, "'0'": 0}
    assert {text: slow(f"capacity: {text}").capacity for text in sizes} == sizes


def test_numbers_from_code_are_in_base_units_and_still_checked() -> None:
    assert SlowConfig(capacity=4096, min_free=0.5, timeout=1).capacity == 4096
    assert SlowConfig(capacity="4KiB").capacity == 4096  # type: ignore[arg-type]
    for wrong in (
        {"capacity": -1},
        {"capacity": 1.5},
        {"capacity": True},
        {"min_free": 1.5},
        {"timeout": float("inf")},
    ):
        with pytest.raises(ValidationError):
            SlowConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("save: {partial_tail: true}", "save.partial_tail: true is not available yet"),
    ],
)
def test_a_setting_that_is_not_built_yet_is_refused_by_name(text: str, place: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"f.yaml:1: {place}")


def test_variables_in_text_are_expanded_once() -> None:
    environ = {"SIZE": "4GiB", "PASS": "a${SIZE}b", "DIR": "/data"}
    settings = slow("capacity: '${SIZE}', password: '${PASS}', path: '${DIR}/x'", environ)
    assert (settings.capacity, settings.password, settings.path) == (4 << 30, "a${SIZE}b", Path("/data/x"))
    assert slow("password: 'pa$$w'").password == "pa$$w"


def test_an_unset_or_broken_variable_is_an_error() -> None:
    assert problems("tiers:\n  - type: slow\n    path: '${NOPE}/x'\n    password: '${'\n") == [
        "f.yaml:3: tiers[0].path: the environment variable NOPE is not set",
        "f.yaml:4: tiers[0].password: '${' is not a variable; write ${NAME}",
    ]


def test_b126_spellings_of_a_path_are_one_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    spellings = {
        "~/kv c": home / "kv c",
        "file:///abs/x": Path("/abs/x"),
        "file://localhost/abs/x": Path("/abs/x"),
        "file:///abs/a%20b": Path("/abs/a b"),
        "file://~/x": home / "x",
        "./rel": here / "rel",
        "rel/../rel/": here / "rel",
        "${HOME}/x": home / "x",
        "/größe/": Path("/größe"),
    }
    assert {text: slow(f"path: {json.dumps(text)}", dict(os.environ)).path for text in spellings} == spellings
    for wrong in ("$HOME/x", "s3://bucket/x", "file://host/x", "file:", " ", "~nobody-of-that-name/x", "a\\0b"):
        (problem,) = problems(f'tiers: [{{type: slow, path: "{wrong}"}}]')
        assert problem.startswith("f.yaml:1: tiers[0].path: ")
    assert "write ${HOME}" in problems("tiers: [{type: slow, path: $HOME/x}]")[0]
    assert list(here.iterdir()) == list(home.iterdir()) == []


def test_the_description_is_resolved_json_with_units_and_without_secrets() -> None:
    text = "tiers: [{type: slow, path: /d, capacity: 4GiB, min_free: 5%, password: s3cr3t}]\nlimits: {load_timeout: 2s}"
    config = parse(text, TYPES)
    shown = describe(config)
    assert shown["tiers"] == [
        {
            "type": "slow",
            "path": "/d",
            "capacity": "4.00 GiB (4294967296)",
            "min_free": "5 %",
            "timeout": "2.00 s",
            "sync": False,
            "password": "***",
        }
    ]
    assert shown["limits"] == {"probe_timeout": "20.0 ms", "load_timeout": "2.00 s"}
    assert shown["chunk_tokens"] == 256
    assert "s3cr3t" not in json.dumps(shown) + repr(config)
    assert set(shown) == {item.name for item in dataclasses.fields(Config)}


def test_a_configuration_is_frozen_equal_by_value_and_picklable() -> None:
    config = parse("tiers: [{type: slow, path: /d}]", TYPES)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.local_root == Path("/d")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_tokens = 1  # type: ignore[misc]


def test_the_default_file_is_the_built_in_defaults() -> None:
    from kvstore.tiers.base import tier_types

    types = tier_types()
    assert load(CONFIGS / "default.yaml", types) == load(None, types)


@pytest.mark.parametrize("name", ["default.yaml", "cpu-only.yaml", "cpu-disk.yaml"])
def test_every_key_of_a_shipped_file_is_valid_and_commented(name: str) -> None:
    from kvstore.tiers.base import tier_types

    assert load(CONFIGS / name, tier_types()).tiers
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    for before, line in itertools.pairwise(lines):
        key = line.split("#")[0].strip()
        if ": " in key and not key.startswith("- type"):
            assert before.strip().startswith("#"), f"{name}: no comment before {line!r}"


def test_the_default_file_names_every_key_there_is() -> None:
    from kvstore.tiers.base import tier_types

    text = (CONFIGS / "default.yaml").read_text(encoding="utf-8")
    types = tier_types()
    config = load(None, types)
    sections = [
        value for item in dataclasses.fields(config) if dataclasses.is_dataclass(value := getattr(config, item.name))
    ]
    for owner in [config, *sections, *(tier.settings for tier in config.tiers)]:
        for item in dataclasses.fields(owner):
            assert f"{item.name}:" in text
