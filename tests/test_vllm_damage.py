"""A real vLLM on a damaged store: the output is what it would be without one, and the statistics say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.snapshots import read_all
from tests.engines import BLOCK, Engine, settings, tiny_model, tok
from tests.test_vllm import records, tokens_of, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHUNKS = 4
ANSWER = 16


def flip(path: Path) -> None:
    """Damages 64 payload bytes."""
    content = bytearray(path.read_bytes())
    content[5000:5064] = bytes(byte ^ 0xFF for byte in content[5000:5064])
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Leaves half of the file."""
    os.truncate(path, path.stat().st_size // 2)


def of_other_weights(path: Path) -> None:
    """Makes it a whole record of another namespace."""
    content = path.read_bytes()
    start = content.index(b'"namespace":"') + len(b'"namespace":"')
    namespace = content[start : start + 64]
    path.write_bytes(content.replace(namespace, bytes(reversed(namespace))))


def link(path: Path) -> None:
    """Moves it away and links to it."""
    moved = path.parent.parent.parent.parent.parent.parent / f"moved-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def give_away(path: Path) -> None:
    """Another user's file."""
    os.chown(path, 65534, 65534)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "checksum": flip,
    "size": truncate,
    "namespace": of_other_weights,
    "symlink": link,
    "owner": give_away,
}


def test_output_on_damaged_records_equals_the_run_without_connector_and_stats_say_why(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    prompts = [tok(CHUNKS * BLOCK + 1, 9000 + i) for i in range(len(DAMAGES))]
    with Engine(tmp_path, model, None, "plain") as engine:
        expected = tokens_of(engine.batch(prompts, ANSWER))
    victims: list[Path] = []
    with Engine(tmp_path, model, settings(tmp_path), "first") as engine:
        for number, prompt in enumerate(prompts):
            before = set(records(tmp_path))
            # The second chunk is the one that the first two chunks have and the first chunk alone does not.
            engine.batch([prompt[: BLOCK + 1]], 1)
            wait_until(lambda b=before: len(records(tmp_path)) == len(b) + 1, "the first chunk was not stored")
            head = set(records(tmp_path))
            engine.batch([prompt[: 2 * BLOCK + 1]], 1)
            wait_until(lambda h=head: len(records(tmp_path)) == len(h) + 1, "the second chunk was not stored")
            victims += set(records(tmp_path)) - head
            engine.batch([prompt], 1)
            wait_until(lambda n=number: len(records(tmp_path)) == CHUNKS * (n + 1), "the rest was not stored")
    for victim, damage in zip(victims, DAMAGES.values(), strict=True):
        damage(victim)
    with Engine(tmp_path, model, settings(tmp_path), "second") as engine:
        assert tokens_of(engine.batch(prompts, ANSWER)) == expected

        def reasons() -> dict[str, float]:
            newest = read_all(tmp_path / "stats")[0]
            return {reason: value for _n, _t, reason, value in newest.rows("missed_records_total", tier="disk")}

        wait_until(lambda: set(reasons()) == set(DAMAGES), f"not every reason was counted: {reasons()}")
        assert set(reasons().values()) == {1.0}
        newest = read_all(tmp_path / "stats")[0]
        assert newest.value("delivered_tokens_total") == BLOCK * len(DAMAGES)
        assert newest.value("hook_errors_total") == 0
        # What could be repaired was stored anew, so the same prompts hit as a whole now.
        assert tokens_of(engine.batch(prompts, ANSWER)) == expected
