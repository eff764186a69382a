"""The library's store: cases of the catalogue, identity, restart, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import tok
from stub_store import OUT, TABLE, StoreLab

from kvstore.errors import ContractError, LayoutMismatch
from kvstore.keys import Namespace

PROMPT = tok(80, 1)

GOLDEN = [
    "436854fcd85fd080fb8e63f9e857795bd2f7ad8bc6849644b94ebf8b9f9d7597",
    "d14cf989dc9e737188a974fb9966eed73497ec658e28ad987ab690b6f5e5da04",
    "f3e38374449e6bcba2659a3389d25726f3320981a8531c9bd25e4232ac1746d1",
    "307c95f648696d147908b30178ce93b832f6e96dd2f18abfd0e54fdd633216cd",
    "21ea833047d32d8627c71eb67da43543a320f35277fc0edc4768fdbce707d23f",
]
"""Addresses of the chunks of `PROMPT` in `stub_store.NAMESPACE`. Other values make every record in the world a miss."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path / "store")
    yield lab
    lab.close()


_PRINT_ADDRESSES = """
import numpy
from kvstore.keys import Addresser, Namespace, chunk_hashes
namespace = Namespace({"model": "made-up", "dtype": "float32"})
tokens = numpy.random.default_rng(1).integers(0, 32000, 80)
for address in Addresser(namespace.digest).addresses(chunk_hashes(namespace.digest, tokens, 16)):
    print(address.hex())
"""


def test_b15_addresses_are_the_same_in_every_process_and_for_ever(lab: StoreLab) -> None:
    printed = []
    for seed in (None, "0", "1"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", _PRINT_ADDRESSES], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(ran.stdout.split())
    assert printed == [GOLDEN] * 3
    assert [address.hex() for address in lab.store().addresses(PROMPT)] == GOLDEN


@pytest.mark.parametrize("count", [0, 1, 15])
def test_b31_a_prompt_shorter_than_a_chunk_is_an_empty_set(lab: StoreLab, count: int) -> None:
    store = lab.store()
    tokens = tok(count, 1)
    stored = lab.save(store, tokens)
    assert (stored.chunks, stored.slots, stored.tiers) == (0, 0, {"disk": 0})
    assert lab.files() == []
    assert store.lookup(tokens) == 0
    assert (store.counters.value("requests_total"), store.counters.value("queried_tokens_total")) == (1, count)
    assert lab.loaded(store, tokens) == 0
    assert (store.counters.value("requests_total"), store.counters.value("queried_tokens_total")) == (2, 2 * count)
    assert store.counters.value("miss_tokens_total") == 2 * count


def test_b33_what_a_library_call_says_it_retrieved_was_copied(lab: StoreLab) -> None:
    store = lab.store()
    lab.save(store, PROMPT)
    assert lab.loaded(store, PROMPT) == 80
    assert store.counters.value("delivered_tokens_total", tier="cpu") == 80
    store.close()
    assert lab.loaded(lab.store(cpu=0), PROMPT) == 80


def test_a_retrieve_ends_where_the_given_blocks_end(lab: StoreLab) -> None:
    store = lab.store()
    lab.save(store, PROMPT)
    lab.pages(store).wipe(OUT)
    assert store.retrieve(PROMPT, OUT[:3]) == 48
    assert lab.pages(store).holds(PROMPT[:48], OUT)
    assert lab.pages(store).is_untouched(OUT, 48, 128)


def test_a_restart_finds_on_disk_what_was_reported_stored(lab: StoreLab) -> None:
    store = lab.store()
    stored = lab.save(store, PROMPT)
    assert (stored.chunks, stored.slots, stored.tiers) == (5, 5, {"disk": 5})
    store.close()
    again = lab.store()
    assert again.lookup([*PROMPT, 5]) == 80
    assert lab.loaded(again, PROMPT) == 80
    assert again.counters.value("delivered_tokens_total", tier="disk") == 80


def test_a_hit_from_slots_or_disk_marks_the_records_as_used_head_last(lab: StoreLab) -> None:
    with lab.store() as store:
        lab.save(store, PROMPT)
        files = [next(lab.root.rglob(f"{address.hex()}.safetensors")) for address in store.addresses(PROMPT)]
        for file in files:
            os.utime(file, ns=(0, 0))
        assert lab.loaded(store, PROMPT) == 80
        deadline = time.monotonic() + 30
        while not all(file.stat().st_mtime_ns for file in files):
            assert time.monotonic() < deadline, "a hit did not mark its records"
            time.sleep(0.005)
        times = [file.stat().st_mtime_ns for file in files]
        assert times == sorted(times, reverse=True) and len(set(times)) == 5


def test_a_chain_that_was_only_stored_is_older_at_its_tail(lab: StoreLab) -> None:
    with lab.store() as store:
        lab.save(store, PROMPT[:32])
        lab.save(store, PROMPT)
        files = [next(lab.root.rglob(f"{address.hex()}.safetensors")) for address in store.addresses(PROMPT)]
        head, tail = [file.stat().st_mtime_ns for file in files[:2]], [file.stat().st_mtime_ns for file in files[2:]]
    assert head == sorted(head, reverse=True) and tail == sorted(tail, reverse=True)
    assert len({*head, *tail}) == 5


def test_a_prefix_is_found_and_another_continuation_is_not(lab: StoreLab) -> None:
    store = lab.store()
    lab.save(store, PROMPT)
    assert lab.loaded(store, PROMPT[:40]) == 32
    assert lab.loaded(store, [*PROMPT[:40], *tok(40, 2)]) == 32
    assert lab.loaded(store, [*tok(16, 9), *PROMPT[16:]]) == 0


@pytest.mark.parametrize("salt", ["s1", "a/b@c%\n", "x" * 128])
def test_salts_isolate_and_are_found_again_under_themselves(lab: StoreLab, salt: str) -> None:
    store = lab.store()
    lab.save(store, PROMPT, salt=salt)
    for there in (store, lab.store()):
        assert there.lookup(PROMPT, salt=salt) == 80
        assert there.lookup(PROMPT, salt="s2") == there.lookup(PROMPT) == 0
    assert not any(salt in path.name or salt.encode() in path.read_bytes() for path in lab.files())


def test_an_empty_salt_is_none(lab: StoreLab) -> None:
    store = lab.store()
    lab.save(store, PROMPT, salt="")
    assert store.lookup(PROMPT) == store.lookup(PROMPT, salt="") == 80


def test_adapters_images_and_namespaces_isolate(lab: StoreLab) -> None:
    store = lab.store()
    images = [b"", b"image 1", b"", b"", b""]
    lab.save(store, PROMPT, adapter=b"lora")
    assert store.lookup(PROMPT, adapter=b"lora") == 80
    assert store.lookup(PROMPT) == store.lookup(PROMPT, adapter=b"other") == 0
    assert store.lookup(PROMPT, salt="lora") == 0
    lab.save(store, PROMPT, extras=images)
    assert store.lookup(PROMPT, extras=images) == 80
    assert store.lookup(PROMPT) == 16
    other = lab.store(namespace=Namespace({"model": "made-up", "dtype": "bfloat16"}))
    assert other.lookup(PROMPT, adapter=b"lora") == other.lookup(PROMPT, extras=images) == 0


@pytest.mark.parametrize("kind", [tuple, np.int32, np.int64, np.uint32, torch.int32, torch.int64])
def test_the_container_of_the_tokens_does_not_matter(lab: StoreLab, kind: object) -> None:
    store = lab.store(disk=0)
    lab.save(store, PROMPT)
    if isinstance(kind, torch.dtype):
        tokens: object = torch.tensor(PROMPT, dtype=kind).repeat_interleave(2)[::2]
    else:
        tokens = tuple(PROMPT) if kind is tuple else np.array(PROMPT, dtype=kind)  # type: ignore[call-overload]
    assert store.lookup(tokens) == 80


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0, True])
def test_what_is_no_token_id_is_refused_by_every_verb(lab: StoreLab, bad: object) -> None:
    store = lab.store(disk=0)
    for verb in (store.lookup, lambda tokens: store.store(tokens, TABLE), lambda tokens: store.retrieve(tokens, OUT)):
        with pytest.raises(ValueError, match="token id"):
            verb([*PROMPT[:-1], bad])


def test_chunk_tokens_that_differ_from_the_geometry_are_refused(lab: StoreLab) -> None:
    with pytest.raises(LayoutMismatch, match="chunk_tokens: 32 configured, 16 declared"):
        lab.store(chunk=32)


def test_close_is_idempotent_and_ends_every_verb(lab: StoreLab) -> None:
    store = lab.store()
    lab.save(store, PROMPT)
    assert store.close() == 0
    assert store.close() == 0
    for verb in (store.lookup, lambda tokens: store.store(tokens, TABLE), lambda tokens: store.retrieve(tokens, OUT)):
        with pytest.raises(ContractError, match="closed"):
            verb(PROMPT)


def test_a_context_closes(lab: StoreLab) -> None:
    with lab.store() as store:
        lab.save(store, PROMPT)
    with pytest.raises(ContractError, match="closed"):
        store.lookup(PROMPT)


_NEVER_CLOSES = """
import sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from made_up import tok
from stub_store import StoreLab
lab = StoreLab(Path(sys.argv[2]))
stored = lab.save(lab.store(), tok(80, 1))
print(stored.tiers["disk"])
"""


def test_a_process_that_does_not_close_still_exits_and_loses_nothing(lab: StoreLab) -> None:
    here = str(Path(__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", _NEVER_CLOSES, here, str(lab.root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout.split() == ["5"]
    assert ran.stderr == ""
    assert lab.loaded(lab.store(), PROMPT) == 80
