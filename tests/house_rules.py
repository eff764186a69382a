"""The mechanical house rules, each a function from one parsed source file to the lines that break it.

Kept apart from the test so that every rule can be shown a snippet that it must catch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

FLOORS: dict[str, float] = {
    "kvstore": 0,
    "kvstore.errors": 0,
    "kvstore.units": 0,
    "kvstore.keys": 1,
    "kvstore.layout": 1,
    "kvstore.metrics": 1,
    "kvstore.config": 2,
    "kvstore.messages": 2,
    "kvstore.snapshots": 2,
    "kvstore.policies": 3,
    "kvstore.codecs": 3,
    "kvstore.planner": 4,
    "kvstore.tiers": 5,
    "kvstore.transfer": 6,
    # Half a floor: it puts floors 0 to 6 together, for the library engine and for the connectors alike.
    "kvstore.assembly": 6.5,
    "kvstore.engine": 7,
    "kvstore.simulate": 7,
    "kvstore.cli": 8,
    "kvstore.testing": 8,
    "connectors": 9,
    "connectors.vllm": 9,
    "connectors.lmcache": 9,
    "connectors.disagg": 9,
}
PURE_FLOORS = 4
IMPURE = frozenset({"torch", "threading", "redis", "vllm"})
TIER_NAMES = frozenset({"gpu", "cpu", "disk", "redis"})
BROADEST = frozenset({"Exception", "BaseException"})
VAGUE_NAMES = frozenset({"manager", "handler", "helper", "utils", "util", "data", "info", "process"})
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 15

MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:home|root|Users|work|mnt|tmp|opt)/\w")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Broken = tuple[int, str]
"""(line, what is wrong there)."""


@dataclass(frozen=True)
class Source:
    """One file: ``path`` from the project's root with ``/``, its text, and its tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text, path))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def unit_of(module: str) -> str | None:
    """The longest known prefix of a module's name: the part of the project that has a floor."""
    parts = module.split(".")
    for length in range(min(len(parts), 2), 0, -1):
        name = ".".join(parts[:length])
        if name in FLOORS and (name != "kvstore" or len(parts) == 1):
            return name
    return None


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import: under TYPE_CHECKING, inside functions and by name through importlib too."""
    package = source.module.split(".")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                # `from kvstore import errors` names a module, `from kvstore import __version__` does not.
                inner = f"{full}.{alias.name}"
                yield node.lineno, inner if inner in FLOORS else full
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def imports_go_down(source: Source) -> Iterator[Broken]:
    unit = unit_of(source.module)
    if unit is None:
        yield 1, f"{source.module} has no floor; give it one in FLOORS"
        return
    for line, module in imports(source):
        if module.split(".")[0] not in ("kvstore", "connectors"):
            continue
        target = unit_of(module)
        if target is None:
            yield line, f"{module} has no floor; give it one in FLOORS"
        elif target not in (unit, "kvstore") and FLOORS[target] >= FLOORS[unit]:
            yield line, f"{unit} (floor {FLOORS[unit]}) imports {target} (floor {FLOORS[target]})"


def low_floors_are_pure(source: Source) -> Iterator[Broken]:
    unit = unit_of(source.module)
    if unit is None or FLOORS[unit] > PURE_FLOORS:
        return
    for line, module in imports(source):
        if module.split(".")[0] in IMPURE:
            yield line, f"{unit} (floor {FLOORS[unit]}) imports {module}"


def engine_is_imported_by_its_connector_only(source: Source) -> Iterator[Broken]:
    if source.path.startswith("connectors/vllm/"):
        return
    for line, module in imports(source):
        if module.split(".")[0] == "vllm":
            yield line, f"imports {module} outside connectors/vllm"


def broad_excepts_stay_at_boundaries(source: Source) -> Iterator[Broken]:
    if source.path == "kvstore/transfer/lanes.py" or source.path.startswith("connectors/vllm/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(x) if x is not None else "everything" for x in caught}
            reraises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            # BaseException that is raised again is a clean-up, and swallows nothing.
            if names & {"Exception", "everything"} or ("BaseException" in names and not reraises):
                yield node.lineno, f"catches {', '.join(sorted(names))}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            yield from ((node.lineno, f"suppresses {ast.unparse(x)}") for x in node.args if ast.unparse(x) in BROADEST)


def attributes_are_not_guessed(source: Source) -> Iterator[Broken]:
    if source.path == "connectors/vllm/adapt.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 2:
            yield node.lineno, f"guesses an attribute: {ast.unparse(node)}"


def protocols_are_typed(source: Source) -> Iterator[Broken]:
    if source.path.startswith("connectors/vllm/"):
        return  # the engine's own hooks take **kwargs
    for node in ast.walk(source.tree):
        if isinstance(node, Function) and node.args.kwarg is not None:
            yield node.lineno, f"{node.name} takes **{node.args.kwarg.arg}"


def docstrings(tree: ast.Module) -> set[int]:
    """Ids of the constants that stand alone as statements: docstrings of all kinds."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def device_names(tree: ast.Module) -> set[int]:
    """Ids of constants that name a torch device, whose words happen to be those of two tiers."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {id(k.value) for k in node.keywords if k.arg in ("device", "device_type")}
            if ast.unparse(node.func) == "torch.device":
                found |= {id(a) for a in node.args}
        elif isinstance(node, ast.Compare) and re.search(r"device(\.type|_type)$", ast.unparse(node.left)):
            found |= {id(c) for c in node.comparators}
    return found


def tiers_are_named_in_their_own_file(source: Source) -> Iterator[Broken]:
    excused = docstrings(source.tree) | device_names(source.tree)
    folder, stem = PurePosixPath(source.path).parent.as_posix(), PurePosixPath(source.path).stem
    own = {name for name in TIER_NAMES if folder == "kvstore/tiers" and stem.startswith(name)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and node.value in TIER_NAMES - own and id(node) not in excused:
            yield node.lineno, f"names the tier {node.value!r}"


def files_are_short(source: Source) -> Iterator[Broken]:
    count = source.text.count("\n")
    if count > MAX_FILE_LINES:
        yield count, f"has {count} lines, more than {MAX_FILE_LINES}"


def functions_are_short(source: Source) -> Iterator[Broken]:
    for node in ast.walk(source.tree):
        if not isinstance(node, Function):
            continue
        # A long docstring is wanted, so it does not count.
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        skipped = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
        count = (node.end_lineno or 0) - node.lineno + 1 - skipped
        if count > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {count} lines, more than {MAX_FUNCTION_LINES}"


def classes_are_narrow(source: Source) -> Iterator[Broken]:
    if source.path == "connectors/vllm/connector.py":
        return  # the engine's interface decides how many hooks there are
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            # A conformance suite has as many tests as the thing has promises.
            public = {m.name for m in node.body if isinstance(m, Function) and not m.name.startswith(("_", "test_"))}
            if len(public) > MAX_PUBLIC_METHODS:
                yield node.lineno, f"{node.name} has {len(public)} public methods, more than {MAX_PUBLIC_METHODS}"


def names_say_what_it_is(source: Source) -> Iterator[Broken]:
    named = [(1, source.module.rsplit(".", 1)[-1])]
    for node in ast.walk(source.tree):
        is_hook = isinstance(node, Function) and source.path == "connectors/vllm/connector.py"
        if isinstance(node, (ast.ClassDef, *Function.__args__)) and not is_hook:
            named.append((node.lineno, node.name))
    for line, name in named:
        vague = {word.lower() for word in WORD.findall(name)} & VAGUE_NAMES
        if vague:
            yield line, f"{name} says nothing: {', '.join(sorted(vague))}"


def modules_say_what_they_are_for(source: Source) -> Iterator[Broken]:
    if not ast.get_docstring(source.tree):
        yield 1, "has no module docstring"


def nothing_is_left_undone(source: Source) -> Iterator[Broken]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield number, f"is unfinished: {line.strip()}"


def no_path_of_one_machine(source: Source) -> Iterator[Broken]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield number, f"names a path of one machine: {line.strip()}"


Rule = Callable[[Source], Iterator[Broken]]

RULES: tuple[Rule, ...] = (
    imports_go_down,
    low_floors_are_pure,
    engine_is_imported_by_its_connector_only,
    broad_excepts_stay_at_boundaries,
    attributes_are_not_guessed,
    protocols_are_typed,
    tiers_are_named_in_their_own_file,
    files_are_short,
    functions_are_short,
    classes_are_narrow,
    names_say_what_it_is,
    modules_say_what_they_are_for,
    nothing_is_left_undone,
    no_path_of_one_machine,
)

COMMON_RULES: tuple[Rule, ...] = (
    broad_excepts_stay_at_boundaries,
    files_are_short,
    functions_are_short,
    classes_are_narrow,
    modules_say_what_they_are_for,
    nothing_is_left_undone,
    no_path_of_one_machine,
)
"""What holds outside the packages too (demo, benchmarks)."""
