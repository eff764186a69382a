"""A store of several namespaces for the tests of the tools, made by the disk tier itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from disk_faults import Bench, write

from kvstore.keys import Namespace
from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_geometry, sample_scope
from kvstore.tiers.base import Scope
from kvstore.tiers.os_calls import OsCalls

NOW = 1_700_000_000
"""Unix seconds of the last use of every record of a sample."""

ALPHA = sample_scope("alpha/model")
BETA = sample_scope("beta")


def other_weights() -> Scope:
    """The scope of the same model as ALPHA with other weights."""
    geometry = sample_geometry()
    fields = {"model": "alpha/model", "groups": [geometry.group.identity()], "weights_digest": "ab" * 32}
    return Scope(Namespace(fields), (geometry,))


@dataclass(frozen=True)
class Sample:
    """Five records of ALPHA (numbers 0 to 4), three of BETA (5 to 7), in ``root``."""

    root: Path
    bench: Bench

    def records(self, scope: Scope = ALPHA) -> list[Path]:
        """The files of a namespace, sorted."""
        return sorted(self.root.glob(f"*-{scope.namespace.ns16}/*/*/*/*.safetensors"))


def make_sample(bench: Bench) -> Sample:
    bench.time_ns = NOW * 10**9
    for scope, numbers in ((ALPHA, range(5)), (BETA, range(5, 8))):
        assert set(write(bench.open(scope), numbers, scope)) == {Outcome.STORED}
    sample = Sample(bench.root, bench)
    for path in bench.records():
        os.utime(path, (NOW, NOW))
    return sample


def state(root: Path) -> dict[str, tuple[int, ...]]:
    """Everything about everything below ``root`` that a change would show, but for access times."""
    found = {}
    for path in [root, *root.rglob("*")]:
        s = path.lstat()
        found[str(path)] = (s.st_ino, s.st_mode, s.st_size, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns)
    return found


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Flips a bit of the byte at ``at`` (negative: from the end)."""
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def command(*arguments: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from kvstore.cli import main; sys.exit(main())", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **(environ or {})},
    )  # fmt: skip


class LookingCalls(OsCalls):
    """An operating system that does not let anybody change anything."""

    def _refuse(self, *_arguments: object) -> None:
        raise AssertionError("a tool that only looks has changed something")

    write = link = unlink = rmdir = mkdir = sync = utime = lock = _refuse  # type: ignore[assignment]

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return super().open(name, flags, mode, dir_fd)


class BusyCalls(OsCalls):
    """An operating system under which something happens to ``paths`` as soon as they were looked at by name."""

    def __init__(self, paths: Iterable[Path], happens: Callable[[Path], object] = Path.unlink) -> None:
        self.paths = {path.name: path for path in paths}
        self.happens = happens

    def stat(self, target: str | int, dir_fd: int | None = None) -> os.stat_result:
        status = super().stat(target, dir_fd)
        if isinstance(target, str) and target in self.paths:
            self.happens(self.paths.pop(target))
        return status
