"""What is refused when the connector is made: one clear error that names the setting and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_engine import Lab, StubEngine
from stub_setup import Setup
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from connectors.vllm.connector import KVStoreConnector
from kvstore.errors import ConfigError

ROLES = (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(tmp_path, monkeypatch) as lab:
        yield lab


def _refusal(setup: Setup, change: Callable[[Any], None] = lambda config: None, kv: KVCacheConfig | None = None) -> str:
    """What both roles say, which is the same."""
    config = setup.vllm_config()
    change(config)
    said = []
    for role in ROLES:
        with pytest.raises(ConfigError) as caught:
            KVStoreConnector(config, role, kv or setup.kv_cache_config())
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(lab: Lab) -> None:
    setup = dataclasses.replace(lab.setup(), extra={"confg": "x.yaml"})
    assert _refusal(setup) == ('KVStoreConnector: kv_connector_extra_config.confg: unknown key; did you mean "config"?')


def test_a_failure_policy_that_ends_requests_is_refused(lab: Lab) -> None:
    said = _refusal(dataclasses.replace(lab.setup(), policy="fail"))
    assert "kv_load_failure_policy: 'fail'" in said
    assert '"kv_load_failure_policy": "recompute"' in said


def test_chunk_tokens_that_are_no_multiple_of_the_block_are_refused_with_both_numbers(lab: Lab) -> None:
    said = _refusal(lab.setup(chunk=24))
    assert said.startswith("KVStoreConnector: chunk_tokens: 24 is not a multiple of the engine's block of 16 tokens")
    assert "16 and 32" in said


def _attention(kind: type[KVCacheSpec], **more: Any) -> KVCacheSpec:
    return kind(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, **more)


@pytest.mark.parametrize(
    "spec",
    [
        _attention(SlidingWindowSpec, sliding_window=64),
        _attention(ChunkedLocalAttentionSpec, attention_chunk_size=64),
        _attention(SinkFullAttentionSpec, sink_len=16),
        _attention(RSWASpec, rswa_window=64),
        _attention(CrossAttentionSpec),
        _attention(EncoderOnlyAttentionSpec),
        MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_a_kind_of_layer_that_is_not_served_is_refused_by_its_class(lab: Lab, spec: KVCacheSpec) -> None:
    setup = lab.setup()
    kv = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer.0"], spec)], kv_cache_layout="LBHNC", hash_block_size=16)
    assert f"layer.0 has a {type(spec).__name__};" in _refusal(setup, kv=kv)


def test_a_non_causal_layer_and_a_second_group_are_refused(lab: Lab) -> None:
    setup = lab.setup()
    bad = KVCacheGroupSpec(["layer.0"], dataclasses.replace(setup.spec(), non_causal=True))
    assert "layer.0 is non-causal" in _refusal(setup, kv=KVCacheConfig(64, [], [bad], kv_cache_layout="LBHNC"))
    groups = [KVCacheGroupSpec([name], setup.spec()) for name in ("layer.0", "layer.1")]
    said = _refusal(setup, kv=KVCacheConfig(64, [], groups, kv_cache_layout="LBHNC"))
    assert f"2 KV cache groups ({FullAttentionSpec.__name__}, {FullAttentionSpec.__name__})" in said


def test_a_layout_that_the_engine_does_not_declare_is_refused(lab: Lab) -> None:
    setup = lab.setup()
    kv = dataclasses.replace(setup.kv_cache_config(), kv_cache_layout=None)
    assert "never guessed" in _refusal(setup, kv=kv)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_with_a_random_seed_is_refused_where_records_outlive_the_process(lab: Lab, algorithm: str) -> None:
    def choose(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = algorithm

    said = _refusal(lab.setup(), choose)
    assert f"prefix_caching_hash_algo: {algorithm}" in said
    assert "--prefix-caching-hash-algo sha256" in said
    config = lab.setup(disk=0).vllm_config()
    choose(config)
    connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, lab.setup(disk=0).kv_cache_config())
    connector.shutdown()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("cache_config", "calculate_kv_scales", True),
    ],
)
def test_a_setting_that_can_not_be_served_is_refused_by_name(lab: Lab, owner: str, name: str, value: Any) -> None:
    def change(config: Any) -> None:
        object.__setattr__(getattr(config, owner), name, value)

    assert f"{name}: " in _refusal(lab.setup(), change)


def test_all_problems_are_in_one_report(lab: Lab) -> None:
    said = _refusal(dataclasses.replace(lab.setup(), policy="fail", extra={"x": 1}))
    assert len(said.splitlines()) == 2


def test_a_configuration_file_that_is_not_there_is_refused_by_its_path(lab: Lab) -> None:
    setup = dataclasses.replace(lab.setup(), config=lab.root / "absent.yaml")
    assert f"{lab.root / 'absent.yaml'}: there is no such configuration file" in _refusal(setup)


def test_a_directory_that_can_not_be_written_is_refused(lab: Lab) -> None:
    lab.store.write_text("a file where the directory should be")
    assert str(lab.store) in _refusal(lab.setup())


def test_a_directory_that_others_may_write_is_refused(lab: Lab) -> None:
    lab.store.mkdir()
    lab.store.chmod(0o777)
    assert str(lab.store) in _refusal(lab.setup())


def test_a_cpu_tier_that_holds_no_record_is_refused_with_a_size_that_does(lab: Lab) -> None:
    said = _refusal(lab.setup(chunk=64, cpu=1))
    assert "less than one record" in said
    assert "set at least" in said


def test_ranks_that_differ_are_refused_at_the_handshake(lab: Lab) -> None:
    one, other = lab.setup(cpu=64), lab.setup(cpu=65)
    worker = one.connector(KVConnectorRole.WORKER)
    scheduler = other.connector(KVConnectorRole.SCHEDULER)
    with pytest.raises(ConfigError, match=r"\[64\] slots and the scheduler expects 65"):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    stranger = dataclasses.replace(worker.get_handshake_metadata(), identity="other")
    with pytest.raises(ConfigError, match="different models"):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): stranger})
    worker.shutdown()
    scheduler.shutdown()


def test_without_a_config_key_the_defaults_make_a_working_store(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(lab.root))
    setup = Setup(lab.model, None)
    engine = StubEngine(setup).warm()
    engine.generate(list(range(600)))
    engine.settle()
    assert engine.lookup([*range(600), 1]) == 512
    engine.close()
    assert len(list((lab.root / ".cache").rglob("*.safetensors"))) == 2
