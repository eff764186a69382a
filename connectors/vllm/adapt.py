"""Everything that depends on vLLM's version or insides; nothing else of this package reads vLLM's attributes.

Written against 0.32 (source and running on the CPU); 0.30 to 0.33 differ in the places marked below.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
)

from kvstore.assembly import Topology
from kvstore.errors import ConfigError, LayoutMismatch, TierUnavailable
from kvstore.layout import GroupGeometry, LayerGeometry
from kvstore.transfer.weights import weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""Id of the block that stands for "no block" in a block table."""

_SERVED = (FullAttentionSpec, MLAAttentionSpec)
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_DEFAULT_HASH_SEED = "vllm-none-hash"
_PERSISTENT_HASHES = ("sha256", "sha256_cbor")


# -- what is refused at start ---------------------------------------------------------------------------------------


def refusals(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, has_persistent: bool) -> list[str]:
    """Why this engine can not be served: one line each, naming the setting and the remedy. Empty if it can."""
    problems = [*_refused_layers(kv_cache_config), *_refused_model(vllm_config)]
    parallel, cache, transfer = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.kv_transfer_config
    if parallel.pipeline_parallel_size > 1:
        problems.append("pipeline_parallel_size: pipeline stages are not served yet; set it to 1")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            problems.append(f"{name}: context parallelism is not served; set it to 1")
    if getattr(cache, "calculate_kv_scales", False):
        problems.append(
            "calculate_kv_scales: KV scales computed at run time differ between runs, so stored KV would be read with "
            "other scales; use a checkpoint with static scales"
        )
    if has_persistent and cache.prefix_caching_hash_algo not in _PERSISTENT_HASHES:
        problems.append(
            f"prefix_caching_hash_algo: {cache.prefix_caching_hash_algo} has a random seed in every process, so "
            f"nothing stored would ever be found; set --prefix-caching-hash-algo sha256"
        )
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        problems.append(
            f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} ends a request whose KV could not be loaded; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    return problems


def _refused_layers(kv_cache_config: KVCacheConfig) -> list[str]:
    groups = kv_cache_config.kv_cache_groups
    problems = []
    for group in groups:
        for name, spec in _layer_specs(group.kv_cache_spec, group.layer_names).items():
            if type(spec) not in _SERVED:
                problems.append(
                    f"model: layer {name} has a {type(spec).__name__}; this version serves FullAttentionSpec and "
                    f"MLAAttentionSpec only; run this model without the connector"
                )
                break
            if getattr(spec, "non_causal", False):
                problems.append(f"model: layer {name} is non-causal, so a prefix of its KV can not be reused")
                break
    if not problems and len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        problems.append(f"model: {len(groups)} KV cache groups ({kinds}); this version serves one")
    return problems


def _refused_model(vllm_config: VllmConfig) -> list[str]:
    model = vllm_config.model_config
    problems = []
    if model.is_encoder_decoder:
        problems.append("model: encoder-decoder models are not served")
    pooler = getattr(model, "pooler_config", None)
    if pooler is not None and getattr(pooler, "seq_pooling_type", "LAST") not in (None, "LAST"):
        problems.append(f"pooling: {pooler.seq_pooling_type} pooling needs every token's state; only LAST is served")
    if not model.is_prefix_caching_supported:
        problems.append("model: vLLM says that its prefixes can not be cached")
    return problems


def _layer_specs(spec: KVCacheSpec, layer_names: list[str]) -> dict[str, KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in layer_names}
    return dict.fromkeys(layer_names, spec)


# -- geometry and identity ------------------------------------------------------------------------------------------


def group_geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> GroupGeometry:
    """Geometry of the one group on this rank, from what vLLM declares; the worker checks its tensors against it.

    Raises:
        LayoutMismatch: vLLM does not say which layout it uses.
    """
    group = kv_cache_config.kv_cache_groups[0]
    layout = kv_cache_config.kv_cache_layout or getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if layout is None:
        raise LayoutMismatch("this vLLM does not declare the layout of its KV cache, and it is never guessed")
    layers, spec = [], group.kv_cache_spec
    for name, layer in _layer_specs(group.kv_cache_spec, group.layer_names).items():
        spec = layer
        heads, tokens, content = compute_layer_kv_cache_shape_bytes(layer, 1)[1:]
        dtype = getattr(layer, "dtype", torch.int8)
        shape = (heads, tokens, content // dtype.itemsize)
        layers.append(LayerGeometry(name, str(dtype).removeprefix("torch."), "HNC", shape, heads * tokens * content))
    return GroupGeometry(
        group_id=0,
        kind="mla" if isinstance(spec, MLAAttentionSpec) else "full_attention",
        block_tokens=group.kv_cache_spec.block_size,
        layout=str(layout),
        layers=tuple(layers),
        packing=_packing(vllm_config, spec),
        hash_tokens=hash_block_tokens(kv_cache_config),
        alignment_tokens=group.kv_cache_spec.block_size,
        draft=group.is_eagle_group,
    )


def hash_block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per entry of a request's ``block_hashes``."""
    return kv_cache_config.hash_block_size or kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def _packing(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    if not current_platform.is_cpu():
        backend = getattr(vllm_config.attention_config, "backend", None)
        return f"{current_platform.device_type}-{getattr(backend, 'name', backend) or 'auto'}"
    if isinstance(spec, MLAAttentionSpec):
        return "cpu-mla-amx" if torch.cpu._is_amx_tile_supported() else "cpu-mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"cpu-{isa}"


def topology(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Topology:
    """Which rank holds which shard; ranks with equal KV (latent attention, few heads) are one shard."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    specs = _layer_specs(spec, kv_cache_config.kv_cache_groups[0].layer_names).values()
    if all(isinstance(layer, MLAAttentionSpec) for layer in specs):
        replicas = ranks
    else:
        heads = vllm_config.model_config.get_total_num_kv_heads()
        replicas = max(getattr(kv_cache_config, "kv_tp_replicas", 1), ranks // heads if heads < ranks else 1)
    return Topology(
        shards=tuple(rank // replicas for rank in range(ranks)),
        shard_count=ranks // replicas,
        local_ranks=max(1, ranks // max(1, getattr(parallel, "nnodes", 1))),
    )


def worker_rank() -> int:
    """Rank of this worker among those that share a request's KV."""
    return int(get_tensor_model_parallel_rank())


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: GroupGeometry, chunk_tokens: int
) -> dict[str, Any]:
    """The namespace without its weights digest. Settings and digests only: a path is cut to its last name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE_CONFIG_KEYS}
    seed = os.environ.get("PYTHONHASHSEED", _DEFAULT_HASH_SEED)
    where = topology(vllm_config, kv_cache_config)
    return {
        "model": Path(str(model.model)).name,
        "revision": model.revision,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_scales": "static",
        "groups": [dict(group.identity())],
        "chunk_tokens": chunk_tokens,
        "parallelism": {"tensor_shards": where.shard_count, "pipeline_stages": 1},
        "rope": {k: str(v) for k, v in sorted(hf.items()) if "rope" in k or k == "max_position_embeddings"},
        "max_model_len": int(model.max_model_len) if _rope_depends_on_length(hf) else None,
        "model_config_sha256": hashlib.sha256(json.dumps(hf, sort_keys=True, default=str).encode()).hexdigest(),
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed_sha256": hashlib.sha256(seed.encode()).hexdigest()[:16],
    }


def _rope_depends_on_length(hf: Mapping[str, Any]) -> bool:
    return "dynamic" in str(hf.get("rope_scaling", "")) or "dynamic" in str(hf.get("rope_parameters", ""))


def weight_files_of(vllm_config: VllmConfig) -> list[Path]:
    """Every weight file of the model.

    Raises:
        TierUnavailable: there are no files to tell these weights from others; says why.
    """
    if str(getattr(vllm_config.load_config, "load_format", "auto")) == "dummy":
        raise TierUnavailable("load_format: dummy weights have no digest; nothing is kept in a persistent tier")
    folder = _model_folder(vllm_config)
    files = weight_files(folder) if folder is not None else []
    if not files:
        raise TierUnavailable(
            "no weight file of the model is on this machine, so its stored KV could not be told apart"
        )
    return files


def _model_folder(vllm_config: VllmConfig) -> Path | None:
    model = vllm_config.model_config
    return _folder(str(model.model), model.revision)


def _folder(name: str, revision: str | None) -> Path | None:
    """A folder, or the local copy of a repository of that name."""
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


# -- requests and steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lora:
    """What a request says of its LoRA adapter.

    ``number`` is what the workers tell adapters apart by: of two with one number the first that was loaded serves both.
    ``is_in_place``: the worker loads it anew, whatever it has.
    """

    name: str
    path: str
    number: int
    is_three_dimensional: bool
    is_in_place: bool


def lora_of(request: Request) -> Lora | None:
    """The adapter of a request."""
    lora = request.lora_request
    if lora is None:
        return None
    is_three_dimensional = bool(getattr(lora, "is_3d_lora_weight", False))  # since 0.31
    in_place = bool(getattr(lora, "load_inplace", False))
    return Lora(lora.lora_name, lora.lora_path, lora.lora_int_id, is_three_dimensional, in_place)


def adapter_folder(path: str) -> Path:
    """The folder that vLLM loads an adapter from. Blocks; not for the engine's thread.

    Raises:
        ConfigError: it is not on this machine.
    """
    folder = _folder(path, None)
    if folder is None:
        raise ConfigError("its files are not on this machine")
    return folder


def bars_request(vllm_config: VllmConfig, request: Request) -> str:
    """Why a request's KV can be neither saved nor loaded; "" if it can."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if request.mm_features and multimodal is not None:
        has_processor_cache = getattr(multimodal, "mm_processor_cache_gb", 1) > 0
        if not has_processor_cache and not vllm_config.cache_config.enable_prefix_caching:
            return "image_identity"
    return ""


def block_table(scheduler_output: Any, kv_cache_manager: Any, request_id: str) -> list[int]:
    """The request's block ids from block 0; a null block is -1."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)  # since 0.32
    tables = state.get_block_ids(request_id) if state is not None else None
    if tables is None:
        tables = kv_cache_manager.get_block_ids(request_id)
    table = tables[0]
    return [-1 if block == NULL_BLOCK else block for block in table] if NULL_BLOCK in table else list(table)


def has_foreign_sync_loads(scheduler_output: Any) -> bool:
    """Whether another connector loads synchronously in this step, so that it may compute garbage."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", False))


def is_idle_step(forward_context: Any) -> bool:
    """Whether the step has no forward, so that waiting costs nobody anything."""
    return getattr(forward_context, "attn_metadata", None) is None


def instance_name(vllm_config: VllmConfig) -> str:
    """A name of this engine that is valid in a file name and unique per data-parallel rank."""
    transfer = vllm_config.kv_transfer_config
    engine = str(transfer.engine_id if transfer is not None else "engine")
    text = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in engine)[:40]
    rank = getattr(vllm_config.parallel_config, "data_parallel_rank", 0) or 0
    return f"{text}-dp{rank}"


def parent_cpus() -> frozenset[int] | None:
    """The cores that the parent may use: vLLM pins a CPU worker to the cores that compute, lanes want the others."""
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        return None
