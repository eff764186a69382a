"""Cases of the catalogue about identity: other contents, other addresses, on every tier and both sides."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load_faults import addresses
from made_up import tok
from stub_engine import Lab, StubEngine
from stub_setup import Setup, write_model
from stub_store import NAMESPACE, StoreLab
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from connectors.vllm import adapt, adapters, weights
from connectors.vllm.requests import LiveRequest
from connectors.vllm.weights import LoadedWeights, written_after
from kvstore.errors import TierUnavailable
from kvstore.keys import Addresser, Namespace

PROMPT = tok(80, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path / "store")
    yield lab
    lab.close()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


# -- number formats --------------------------------------------------------------------------------------------------


def test_b01_the_number_format_is_part_of_the_address(store: StoreLab) -> None:
    formats = {name: Namespace({**NAMESPACE.fields, "dtype": name}) for name in ("bf16", "fp8_e4m3", "fp16", "f32")}
    store.save(store.store(cpu=0, namespace=formats["bf16"]), PROMPT)
    found = {}
    for name, namespace in formats.items():
        there = store.store(namespace=namespace)
        found[name] = there.lookup(PROMPT)
        assert store.loaded(there, PROMPT) == found[name]
    assert found == {"bf16": 80, "fp8_e4m3": 0, "fp16": 0, "f32": 0}
    made = {Addresser(namespace.digest).address(b"one prefix") for namespace in formats.values()}
    assert len(made) == 4


def test_b01_the_connector_names_the_formats_of_model_and_cache(lab: Lab) -> None:
    setup, seen = lab.setup(), set()
    kv = setup.kv_cache_config()
    for cache_dtype in ("auto", "fp8_e4m3"):
        config = setup.vllm_config()
        config.cache_config.cache_dtype = cache_dtype
        fields = adapt.namespace_fields(config, kv, adapt.group_geometry(setup.vllm_config(), kv), 16)
        seen.add(Namespace(fields).digest)
    assert len(seen) == 2


# -- adapters --------------------------------------------------------------------------------------------------------


def test_b02_the_library_separates_adapters(store: StoreLab) -> None:
    one = store.store()
    store.save(one, PROMPT, adapter=b"a")
    for there in (one, store.store()):
        assert there.lookup(PROMPT, adapter=b"b") == there.lookup(PROMPT) == 0
        assert store.loaded(there, PROMPT, adapter=b"a") == 80


def _adapter(lab: Lab, name: str, content: bytes = b"weights") -> Path:
    folder = lab.root / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def _know(engine: StubEngine, lora: LoRARequest) -> None:
    """Lets a first request of the adapter come and go, until its files were hashed."""
    assert engine.lookup(tok(17, 99), lora=lora) == 0
    adapter = engine.side._adapters._known[lora.lora_int_id]
    engine.until(lambda: bool(adapter.digest) or adapter.is_lost, "an adapter is never hashed")


def test_b02_the_connector_separates_adapters_by_their_content(lab: Lab) -> None:
    folder = _adapter(lab, "lora")
    lora = LoRARequest("one", 1, str(folder))
    engine = lab.engine()
    _know(engine, lora)
    engine.generate(PROMPT, lora=lora)
    engine.settle()
    assert len(lab.files()) == 5
    lab.end(engine)
    engine = lab.engine()
    for request in (lora, LoRARequest("other name", 2, str(folder))):
        _know(engine, request)
    assert engine.lookup([*PROMPT, 7], lora=lora) == 80
    assert engine.lookup([*PROMPT, 7], lora=LoRARequest("other name", 2, str(folder))) == 0
    assert engine.lookup([*PROMPT, 7]) == 0
    engine.generate([*PROMPT, 7], lora=lora)
    assert engine.count("delivered_tokens_total", tier="disk") == 80
    lab.end(engine)
    _adapter(lab, "lora", b"wEights")
    engine = lab.engine()
    _know(engine, lora)
    assert engine.lookup([*PROMPT, 7], lora=lora) == 0


def test_b02_an_adapter_that_can_not_be_read_leaves_nothing_on_disk(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lora = LoRARequest("gone", 1, str(lab.root / "no such folder"))
    engine = lab.engine()
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        _know(engine, lora)
        for _ in range(3):
            engine.generate(PROMPT, lora=lora)
    engine.settle()
    assert lab.files() == []
    assert engine.count("miss_tokens_total", reason="adapter") == engine.count("queried_tokens_total") == 240
    assert [r.message for r in caplog.records if "adapter_unknown" in r.message] == [
        "kvstore.adapter_unknown name=gone reason=its files are not on this machine"
    ]


def test_the_first_request_of_an_adapter_bypasses_the_store_and_the_next_one_does_not(lab: Lab) -> None:
    lora = LoRARequest("one", 1, str(_adapter(lab, "lora")))
    engine = lab.engine()
    first = engine.add(PROMPT, lora=lora)
    engine.run()
    engine.settle()
    assert len(engine.outputs[first]) == 1
    assert engine.count("stored_chunks_total") == 0
    assert engine.count("miss_tokens_total", reason="adapter") == 80
    _know(engine, lora)
    engine.generate(PROMPT, lora=lora)
    engine.generate(PROMPT, lora=lora)
    assert engine.count("delivered_tokens_total", tier="cpu") == 64
    assert engine.count("miss_tokens_total", reason="adapter") == 80


def test_adapters_are_hashed_on_the_probers_thread_only(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, real = set(), adapters.adapter_digest

    def digest(*arguments: Any) -> str:
        threads.add(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(adapters, "adapter_digest", digest)
    engine = lab.engine()
    _know(engine, LoRARequest("one", 1, str(_adapter(lab, "lora"))))
    assert threads == {"kvstore-prober"}


def test_an_adapter_that_is_loaded_in_place_stays_out_of_every_tier_for_good(lab: Lab) -> None:
    folder = str(_adapter(lab, "lora"))
    lora = LoRARequest("one", 1, folder)
    engine = lab.engine()
    _know(engine, lora)
    engine.generate(PROMPT, lora=lora)
    engine.settle()
    assert engine.lookup([*PROMPT, 7], lora=lora) == 80
    engine.generate(tok(80, 2), lora=LoRARequest("one", 1, folder, load_inplace=True))
    engine.settle()
    assert len(lab.files()) == 5
    assert engine.lookup([*PROMPT, 7], lora=lora) == 0


def test_an_adapter_whose_files_change_under_a_running_engine_has_no_identity_any_more(lab: Lab) -> None:
    lora = LoRARequest("one", 1, str(_adapter(lab, "lora")))
    engine = lab.engine()
    _know(engine, lora)
    engine.generate(PROMPT, lora=lora)
    engine.settle()
    _adapter(lab, "lora", b"wEights")
    adapter = engine.side._adapters._known[1]
    engine.lookup(PROMPT, lora=lora)
    engine.until(lambda: adapter.is_lost, "a change of an adapter is not noticed")
    assert engine.lookup([*PROMPT, 7], lora=lora) == 0
    _adapter(lab, "lora")
    engine.generate(tok(80, 3), lora=lora)
    engine.settle()
    assert adapter.is_lost
    assert len(lab.files()) == 5


def test_two_adapters_that_share_a_number_have_no_identity(lab: Lab) -> None:
    engine = lab.engine()
    one = LoRARequest("one", 1, str(_adapter(lab, "one", b"1")))
    _know(engine, one)
    engine.generate(tok(80, 2), lora=LoRARequest("two", 1, str(_adapter(lab, "two", b"2"))))
    engine.generate(tok(80, 3), lora=one)
    engine.settle()
    assert lab.files() == []


def test_addressers_of_many_identities_are_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.vllm.scheduler_side.MAX_ADDRESSERS", 4)
    engine = lab.engine()
    made = []
    for number in range(8):
        live = LiveRequest(engine.request(PROMPT), "")
        live.identity = bytes([number])
        made.append(live.addresses(engine.side._addresser_of(live), 1)[0])
    assert len(set(made)) == 8
    assert len(engine.side._addressers) == 4


# -- images ----------------------------------------------------------------------------------------------------------


def test_b04_image_content_decides_the_address_of_what_it_touches(store: StoreLab) -> None:
    tokens = tok(16, 1) + [5] * 48 + tok(16, 2)

    def image(content: bytes) -> list[bytes]:
        return [b"", content, content, content, b""]

    one = store.store()
    store.save(one, tokens, extras=image(b"aa" * 16))
    for there in (one, store.store()):
        assert store.loaded(there, tokens, extras=image(b"bb" * 16)) == 16
        assert store.loaded(there, tokens, extras=image(b"aa" * 16)) == 80
        assert there.lookup(tokens) == 16


def test_b04_the_connectors_addresses_have_the_image_in_them(lab: Lab) -> None:
    engine = lab.engine()
    tokens = tok(16, 1) + [5] * 48 + tok(16, 2)
    made = {}
    for item in ("aa", "bb"):
        request = engine.request(tokens)
        place = PlaceholderRange(offset=16, length=48)
        request.mm_features = [MultiModalFeatureSpec(None, "image", item * 16, place, item * 16)]
        request.block_hashes = []
        request.update_block_hashes()
        live = LiveRequest(request, "")
        made[item] = live.addresses(engine.side._addresser_of(live), 1)
    plain = addresses(engine, tokens)
    assert len(plain) == len(made["aa"]) == 5
    assert [a == b for a, b in zip(made["aa"], made["bb"], strict=True)] == [True, False, False, False, False]
    assert made["aa"][0] == plain[0] and not set(made["aa"][1:]) & set(plain)


# -- salts -----------------------------------------------------------------------------------------------------------

SALTS = ["s1", "a/b@c%\n", "x" * 128]


@pytest.mark.parametrize("salt", SALTS)
def test_b06_salts_isolate_on_every_tier_and_leave_no_trace(lab: Lab, salt: str) -> None:
    engine = lab.engine()
    engine.generate(PROMPT, salt=salt)
    engine.settle()
    for _ in range(2):
        assert engine.lookup([*PROMPT, 7], salt=salt) == 80
        assert engine.lookup([*PROMPT, 7], salt="s2") == engine.lookup([*PROMPT, 7]) == 0
        lab.end(engine)
        engine = lab.engine()
    for path in lab.store.rglob("*"):
        assert salt not in path.name
        assert not path.is_file() or salt.encode() not in path.read_bytes()


def test_b06_an_empty_salt_is_none(lab: Lab) -> None:
    engine = lab.engine()
    engine.generate(PROMPT, salt="")
    engine.settle()
    lab.end(engine)
    engine = lab.engine()
    assert engine.lookup([*PROMPT, 7]) == engine.lookup([*PROMPT, 7], salt="") == 80


# -- weights ---------------------------------------------------------------------------------------------------------


def _weights(lab: Lab) -> Path:
    return lab.model / "model.safetensors"


def _rewrite(path: Path, content: bytes) -> None:
    """In place, with the times of before as far as a program can set them."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _found(lab: Lab, more: str) -> int:
    engine = lab.engine(more=more)
    found = engine.lookup([*PROMPT, 7])
    lab.end(engine)
    return found


@pytest.mark.parametrize("mode", ["full", "sampled"])
def test_b08_other_weights_under_the_same_path_find_nothing(lab: Lab, mode: str) -> None:
    more = f"identity: {{weights_digest: {mode}}}\n"
    lab.stored(PROMPT, more=more)
    original = _weights(lab).read_bytes()
    changed = bytearray(original)
    if mode == "full":
        changed[-1000] ^= 1
    else:
        header = 8 + int.from_bytes(original[:8], "little")
        changed[header:] = bytes(byte ^ 1 for byte in original[header:])
    _rewrite(_weights(lab), bytes(changed))
    assert _found(lab, more) == 0
    _rewrite(_weights(lab), original)
    assert _found(lab, more) == 80


def test_b08_full_and_sampled_digests_do_not_share_records(lab: Lab) -> None:
    lab.stored(PROMPT)
    assert _found(lab, "identity: {weights_digest: sampled}\n") == 0


def test_b08_another_revision_finds_nothing(lab: Lab) -> None:
    class Revised(Setup):
        def vllm_config(self) -> Any:
            config = super().vllm_config()
            config.model_config = copy.copy(config.model_config)
            config.model_config.revision = "another"
            return config

    lab.stored(PROMPT)
    setup = lab.setup()
    engine = StubEngine(Revised(**{f.name: getattr(setup, f.name) for f in dataclasses.fields(setup)})).warm()
    assert engine.lookup([*PROMPT, 7]) == 0
    engine.close()


def test_weights_that_are_replaced_while_they_are_hashed_keep_persistent_tiers_closed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = weights.weights_digest

    def replaced(*arguments: Any) -> str:
        found = real(*arguments)
        _rewrite(_weights(lab), _weights(lab).read_bytes())
        return found

    monkeypatch.setattr(weights, "weights_digest", replaced)
    with caplog.at_level(logging.WARNING):
        engine = StubEngine(lab.setup())
        engine.until(lambda: engine.side._namespace is not None, "no identity")
        for _ in range(2):
            engine.generate(PROMPT)
        engine.settle()
    assert lab.files() == []
    assert engine.count("delivered_tokens_total", tier="cpu") == 64, "slots work all the same"
    said = [record.message for record in caplog.records if "model.safetensors was replaced" in record.message]
    assert sorted(line.split()[0] for line in said) == ["kvstore.closed", "prober.no_namespace"]
    engine.close()


def test_weights_that_change_between_the_start_and_the_hash_have_no_digest(lab: Lab) -> None:
    loaded = LoadedWeights(lab.setup().vllm_config(), "full")
    assert loaded.digest(None).startswith("blake3:")
    _rewrite(_weights(lab), _weights(lab).read_bytes())
    for ask in (loaded.verify, lambda: loaded.digest(None)):
        with pytest.raises(TierUnavailable, match=r"model\.safetensors was replaced while the engine started"):
            ask()


def test_a_second_weight_file_that_appears_is_a_change(lab: Lab) -> None:
    loaded = LoadedWeights(lab.setup().vllm_config(), "sampled")
    (lab.model / "model-2.safetensors").write_bytes(b"x")
    with pytest.raises(TierUnavailable, match=r"model-2\.safetensors was replaced"):
        loaded.verify()


def test_a_file_that_was_written_after_a_moment_is_named_unless_its_name_is_its_content(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    plain, link = write_model(tmp_path / "model") / "model.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(blob)
    assert written_after([link, plain], 0) == plain
    assert written_after([link], 0) is None
    assert written_after([link, plain], time.time_ns() + 10**9) is None


def test_the_start_of_this_process_is_known_well_enough() -> None:
    age = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < time.time_ns() - weights._started_ns() < age * 1e9
