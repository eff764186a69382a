"""The house rules hold in every file, and every rule catches what it is there for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import house_rules as rules
from tests.house_rules import Rule, Source

ROOT = Path(__file__).resolve().parent.parent
DOC = '"""What it is for."""\n'


def _sources(*folders: str) -> list[Source]:
    return [
        Source.parse(path.relative_to(ROOT).as_posix(), path.read_text())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def _broken(rule: Rule, sources: list[Source]) -> list[str]:
    return [f"{source.path}:{line}: {what}" for source in sources for line, what in rule(source)]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_packages_keep_the_rule(rule: Rule) -> None:
    sources = _sources("kvstore", "connectors")
    assert len(sources) > 10
    assert _broken(rule, sources) == []


@pytest.mark.parametrize("rule", rules.COMMON_RULES, ids=lambda rule: rule.__name__)
def test_demo_and_benchmarks_keep_the_rule(rule: Rule) -> None:
    assert _broken(rule, _sources("demo", "benchmarks")) == []


TIER_IN_PLANNER = 'order = ["cpu"]\n'
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES
WIDE_CLASS = "class Wide:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(rules.MAX_PUBLIC_METHODS + 1))

BAD: list[tuple[Rule, str, str]] = [
    (rules.imports_go_down, "kvstore/keys.py", "import kvstore.planner.catalog\n"),
    (rules.imports_go_down, "kvstore/keys.py", "from kvstore import layout\n"),
    (rules.imports_go_down, "kvstore/planner/plan.py", "from ..tiers import base\n"),
    (rules.imports_go_down, "kvstore/planner/plan.py", "def f():\n    from kvstore.transfer import lanes\n"),
    (rules.imports_go_down, "kvstore/cli/__init__.py", "from connectors.vllm import connector\n"),
    (rules.imports_go_down, "kvstore/unheard_of.py", "x = 1\n"),
    (
        rules.imports_go_down,
        "kvstore/messages.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvstore.engine import Store\n",
    ),
    (rules.imports_go_down, "kvstore/keys.py", "import importlib\nimportlib.import_module('kvstore.engine')\n"),
    (rules.low_floors_are_pure, "kvstore/layout.py", "import torch\n"),
    (rules.low_floors_are_pure, "kvstore/planner/plan.py", "from threading import Lock\n"),
    (rules.low_floors_are_pure, "kvstore/codecs/raw.py", "def f():\n    import redis.asyncio\n"),
    (rules.engine_is_imported_by_its_connector_only, "kvstore/engine.py", "from vllm.config import VllmConfig\n"),
    (rules.engine_is_imported_by_its_connector_only, "connectors/lmcache/engine.py", "import vllm\n"),
    (rules.broad_excepts_stay_at_boundaries, "kvstore/engine.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (rules.broad_excepts_stay_at_boundaries, "kvstore/engine.py", "try:\n    f()\nexcept:\n    raise\n"),
    (
        rules.broad_excepts_stay_at_boundaries,
        "kvstore/transfer/executor.py",
        "try:\n    f()\nexcept (OSError, BaseException):\n    pass\n",
    ),
    (rules.broad_excepts_stay_at_boundaries, "kvstore/engine.py", "with contextlib.suppress(Exception):\n    f()\n"),
    (rules.attributes_are_not_guessed, "kvstore/engine.py", "x = getattr(a, 'maybe', None)\n"),
    (rules.attributes_are_not_guessed, "connectors/vllm/worker.py", "x = getattr(a, 'maybe', 0)\n"),
    (rules.protocols_are_typed, "kvstore/engine.py", "def store(tokens, **extra): ...\n"),
    (rules.tiers_are_named_in_their_own_file, "kvstore/planner/plan.py", TIER_IN_PLANNER),
    (rules.tiers_are_named_in_their_own_file, "kvstore/tiers/disk.py", "other = 'redis'\n"),
    (rules.tiers_are_named_in_their_own_file, "connectors/vllm/worker.py", "if name == 'gpu':\n    f()\n"),
    (rules.tiers_are_named_in_their_own_file, "kvstore/cli/cpu.py", TIER_IN_PLANNER),
    (rules.files_are_short, "kvstore/engine.py", "x = 1\n" * rules.MAX_FILE_LINES),
    (rules.functions_are_short, "kvstore/engine.py", LONG_FUNCTION),
    (rules.classes_are_narrow, "kvstore/engine.py", WIDE_CLASS),
    (rules.names_say_what_it_is, "kvstore/engine.py", "class SlotManager: ...\n"),
    (rules.names_say_what_it_is, "kvstore/engine.py", "def process_batch(): ...\n"),
    (rules.names_say_what_it_is, "kvstore/engine.py", "class KVData: ...\n"),
    (rules.names_say_what_it_is, "kvstore/transfer/utils.py", "x = 1\n"),
    (rules.nothing_is_left_undone, "kvstore/engine.py", f"x = 1  # {'TO' + 'DO'} later\n"),
    (rules.no_path_of_one_machine, "kvstore/engine.py", f"x = '/{'home'}/someone/models'\n"),
    (rules.no_path_of_one_machine, "kvstore/engine.py", f"x = 1  # see /{'tmp'}/notes\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=lambda x: x.__name__ if callable(x) else None)
def test_rule_catches_a_breach(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source.parse(path, DOC + text)))


def test_rule_catches_a_module_without_docstring() -> None:
    assert list(rules.modules_say_what_they_are_for(Source.parse("kvstore/engine.py", "x = 1\n")))


def test_every_rule_is_shown_a_breach() -> None:
    shown = {rule for rule, _, _ in BAD} | {rules.modules_say_what_they_are_for}
    assert shown == set(rules.RULES)


GOOD: list[tuple[str, str]] = [
    ("kvstore/keys.py", "from kvstore.errors import ContractError\nfrom kvstore import __version__, units\n"),
    ("kvstore/tiers/disk.py", "from kvstore.tiers.base import Tier\nNAME = 'disk'\n"),
    ("kvstore/tiers/disk_ledger.py", "from . import base\nNAME = 'disk'\n"),
    ("kvstore/tiers/disk.py", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"),
    ("kvstore/transfer/lanes.py", "import threading\ntry:\n    f()\nexcept Exception:\n    g()\n"),
    ("kvstore/transfer/copies.py", "import torch\nx = torch.empty(1, device='cpu')\ny = x.device.type == 'cpu'\n"),
    ("kvstore/planner/catalog.py", "class Tier:\n    'cpu'\n    name = getattr(x, 'y')\n"),
    ("connectors/vllm/adapt.py", "import vllm\nfrom kvstore.planner import planner\nx = getattr(a, 'b', None)\n"),
    ("connectors/vllm/connector.py", WIDE_CLASS + "    def bind_kv_cache_manager(self, **kwargs): ...\n"),
    ("kvstore/engine.py", "from kvstore.assembly import assemble\n"),
    ("kvstore/testing/suite.py", WIDE_CLASS.replace("def m", "def test_m")),
    ("kvstore/engine.py", "def metadata(): ...\ndef start_up(path='/proc/self/fd'): ...\n"),
    ("kvstore/engine.py", 'def f():\n    """' + "Says a lot.\n" * 80 + '"""\n' + "    x = 1\n" * 58),
]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_rules_leave_good_code_alone(path: str, text: str) -> None:
    source = Source.parse(path, DOC + text)
    assert [f"{rule.__name__}: {what}" for rule in rules.RULES for _, what in rule(source)] == []


def test_every_floor_imports_the_public_package_without_the_engine() -> None:
    tree = ast.parse((ROOT / "kvstore/__init__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
