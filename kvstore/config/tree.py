"""YAML text as plain values, with the line of every key.

Invariant: what is written is what is meant. Keys may not repeat; only ``true``, ``false``, ``null`` and plain decimal
numbers are anything but text (in YAML 1.1 ``pin: off`` would be a boolean and ``1:30`` a number); there are no tags,
anchors or aliases. ``${VAR}`` in text is replaced by the environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvstore.errors import ConfigError

MAX_DEPTH = 16
"""Deeper than any setting is."""

_TEXT_TAG = "tag:yaml.org,2002:str"
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_CONSTANTS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INTEGER = re.compile(r"[-+]?[0-9]{1,30}", re.ASCII)
_REAL = re.compile(r"[-+]?(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,2})?", re.ASCII)
_VARIABLE = re.compile(r"\$\{([^}]*)(\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(slots=True)
class Tree:
    """Values of one YAML text.

    Attributes:
        origin: the file's name, for messages.
        value: None for an empty text, else nested dicts, lists and scalars.
        lines: line, from 1, of each path such as ``tiers[0].capacity``.
        problems: what was found wrong so far, as (line, message).
    """

    origin: str
    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def blame(self, path: str, message: str) -> None:
        """Adds a problem with the setting at ``path`` (``""``: the whole file)."""
        self.problems.append((self.lines.get(path, 1), f"{path}: {message}" if path else message))

    def report(self) -> None:
        """Raises a `ConfigError` with a line for each problem, in the order of the file, if there is any."""
        if self.problems:
            raise ConfigError(f"{self.origin}:{line}: {message}" for line, message in sorted(self.problems))


def read_tree(text: str, origin: str, environ: Mapping[str, str]) -> Tree:
    """Reads YAML text; problems that leave the rest readable are collected in the tree.

    Raises:
        ConfigError: not YAML, with aliases, or nested without end.
    """
    tree = Tree(origin)
    try:
        _refuse_aliases_and_depth(text, origin)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        where = f"{origin}:{mark.line + 1}" if mark else origin
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML: {reason}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{origin}:{line}: not valid YAML: {_character(error)} is not allowed") from None
    if node is not None:
        tree.value = _value(node, "", tree, environ)[0]
    return tree


def _refuse_aliases_and_depth(text: str, origin: str) -> None:
    """Before anything recursive sees the text: an alias may contain itself, and brackets are cheap to write."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
            problem = "nested too deeply" if depth > MAX_DEPTH else "anchors and aliases are not supported"
            raise ConfigError(f"{origin}:{event.start_mark.line + 1 if event.start_mark else 1}: {problem}")


def _character(error: yaml.reader.ReaderError) -> str:
    return f"character U+{ord(error.character) if isinstance(error.character, str) else error.character:04X}"


def _value(node: yaml.Node, path: str, tree: Tree, environ: Mapping[str, str]) -> tuple[Any, bool]:
    """The value of a node, and whether it could be made."""
    tree.lines.setdefault(path, node.start_mark.line + 1)
    if node.tag != _TEXT_TAG and node.tag not in _COLLECTION_TAGS:
        tree.blame(path, f"the tag {node.tag} is not supported")
        return None, False
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, tree, environ), True
    if isinstance(node, yaml.SequenceNode):
        items = (_value(item, f"{path}[{i}]", tree, environ) for i, item in enumerate(node.value))
        return [value for value, ok in items if ok], True
    if isinstance(node, yaml.ScalarNode) and node.style is None:
        if node.value in _CONSTANTS:
            return _CONSTANTS[node.value], True
        if _INTEGER.fullmatch(node.value):
            return int(node.value), True
        if _REAL.fullmatch(node.value):
            return float(node.value), True
    try:
        return expand(node.value, environ), True
    except ValueError as error:
        tree.blame(path, str(error))
        return None, False


def _mapping(node: yaml.MappingNode, path: str, tree: Tree, environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            tree.problems.append((line, f"{path or 'the file'}: a key must be a word"))
            continue
        key = key_node.value
        inner = f"{path}.{key}" if path else key
        if key in seen:
            tree.problems.append((line, f"{inner}: given twice; the first is on line {seen[key]}"))
            continue
        seen[key] = tree.lines[inner] = line
        value, ok = _value(value_node, inner, tree, environ)
        if ok:
            values[key] = value
    return values


def expand(text: str, environ: Mapping[str, str]) -> str:
    """``text`` with every ``${VAR}`` replaced; what replaces it is not expanded again.

    Raises:
        ValueError: a variable that is not set, or a ``${`` that begins none.
    """

    def one(match: re.Match[str]) -> str:
        name, end = match[1], match[2]
        if not end or not _NAME.fullmatch(name):
            raise ValueError(f"{match[0]!r} is not a variable; write ${{NAME}}")
        if name not in environ:
            raise ValueError(f"the environment variable {name} is not set")
        return environ[name]

    return _VARIABLE.sub(one, text)
