"""A disk in memory that can lose power.

Invariant: after `MemoryDisk.lose_power` only what was synced is guaranteed: the bytes that a file had at its last
sync, and the names that a directory had at its last sync. What was not synced is gone in the strict model; in the
random one each name and each page may have reached the disk or not, in any order, as on a real one. The model knows no
favours: a synced file whose directory was not synced has no name.
"""

from __future__ import annotations

import itertools
import random
import stat
from dataclasses import dataclass, field

from kvstore.units import PAGE


@dataclass(eq=False)
class Node:
    """A file or a directory.

    Attributes:
        mode: as in ``st_mode``.
        content: of a file, as a reader sees it now.
        synced: what a file had at its last sync.
        names: of a directory, as seen now.
        synced_names: what a directory had at its last sync.
        holder: who has the lock.
    """

    number: int
    mode: int
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)
    mtime_ns: int = 0
    links: int = 0
    holder: int | None = None

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a listing gives: the part of ``os.DirEntry`` that the disk tier uses."""

    name: str
    node: Node

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As ``os.DirEntry.is_file``."""
        return stat.S_ISREG(self.node.mode)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As ``os.DirEntry.is_dir``."""
        return self.node.is_directory

    def inode(self) -> int:
        """As ``os.DirEntry.inode``."""
        return self.node.number


class MemoryDisk:
    """The disk: survives a loss of power, the `MemoryCalls` on it do not."""

    def __init__(self, top: Node | None = None, boots: int = 1) -> None:
        self.numbers = itertools.count(1000)
        self.descriptors = itertools.count(1_000_000)
        self.top = top or self.make(stat.S_IFDIR | 0o700)
        self.boots = boots

    def make(self, mode: int) -> Node:
        """A new file or directory without a name."""
        return Node(next(self.numbers), mode)

    def lose_power(self, chance: random.Random | None = None) -> MemoryDisk:
        """What the disk has after a loss of power now; this one stays as it is.

        Args:
            chance: decides which names and pages that were not synced survive; None: none of them.
        """
        after = MemoryDisk(boots=self.boots + 1)
        after.numbers = self.numbers
        odds = 0.0 if chance is None else chance.choice([0.1, 0.5, 0.9, 1.0])
        after.top = _survivor(self.top, chance, odds, {})
        _count_links(after.top)
        return after

    def files(self) -> dict[str, Node]:
        """Every file by its path."""
        found: dict[str, Node] = {}
        waiting = [("", self.top)]
        while waiting:
            path, node = waiting.pop()
            for name, below in node.names.items():
                place = f"{path}/{name}" if path else name
                if below.is_directory:
                    waiting.append((place, below))
                else:
                    found[place] = below
        return found


def _survivor(node: Node, chance: random.Random | None, odds: float, known: dict[int, Node]) -> Node:
    if node.number in known:
        return known[node.number]
    after = known[node.number] = Node(node.number, node.mode, mtime_ns=node.mtime_ns)
    if not node.is_directory:
        after.content = bytearray(node.synced if chance is None else _torn(node, chance, odds))
        after.synced = bytes(after.content)
        return after
    names = dict(node.synced_names)
    if chance is not None:
        for name in sorted(node.names.keys() | node.synced_names.keys()):
            if node.names.get(name) is not node.synced_names.get(name) and chance.random() < odds:
                names.pop(name, None)
                if name in node.names:
                    names[name] = node.names[name]
    after.names = {name: _survivor(below, chance, odds, known) for name, below in names.items()}
    after.synced_names = dict(after.names)
    return after


def _torn(node: Node, chance: random.Random, odds: float) -> bytes:
    """Old and new pages mixed, of the old length, the new one, or one between; holes are zeros."""
    low, high = sorted((len(node.synced), len(node.content)))
    length = high if chance.random() < odds else chance.choice([low, chance.randint(low, high)])
    mixed = bytearray(node.synced.ljust(length, b"\0")[:length])
    for at in range(0, length, PAGE):
        if chance.random() < odds:
            page = node.content[at : min(at + PAGE, length)]
            mixed[at : at + len(page)] = page
    return bytes(mixed)


def _count_links(top: Node) -> None:
    waiting = [top]
    while waiting:
        for below in waiting.pop().names.values():
            below.links += 1
            if below.is_directory:
                waiting.append(below)
