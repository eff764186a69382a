"""Small Llama models with real random weights, made without a download and without torch.

An engine's dummy weights are near zero and make every prompt answer with the same two tokens, so a test with them
passes whatever the KV holds. The weights here are scaled so that the answer depends on the whole prompt: attention
is sharp (a few tokens win, instead of an average over thousands that is close to nothing) and the logits are spread.

Invariant: the files are a pure function of the arguments; equal arguments make equal bytes on every machine with
the same numpy generator (PCG64, whose streams numpy keeps stable).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SHARPNESS = 2.0
"""Factor on the query and key projections: attention logits with a standard deviation of its square."""

_LOGIT_SPREAD = 4.0
"""Standard deviation of the logits."""

_DTYPES = {"float32": "F32", "bfloat16": "BF16"}

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Ids 0, 1 and 2 of the tokenizer."""

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)


def make_model(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    seed: int,
    dtype: str,
    intermediate: int | None = None,
    max_len: int = 8192,
    tokenizer: bool = True,
) -> Path:
    """Writes a Llama model: ``model.safetensors``, ``config.json`` and, if asked, a tokenizer for any text.

    Args:
        folder: made if it does not exist; files of these names are replaced.
        layers, hidden, heads, kv_heads, vocab: the sizes; a head has ``hidden // heads`` values.
        seed: of the weights.
        dtype: ``float32`` or ``bfloat16``.
        intermediate: width of the MLP, 2.75 x ``hidden`` (rounded to 64) by default.
        max_len: positions the model declares.
        tokenizer: byte-level BPE of exactly ``vocab`` tokens; needs the ``tokenizers`` package.

    Returns:
        ``folder``.

    Raises:
        ValueError: sizes that do not fit together, or an unknown dtype.
        ModuleNotFoundError: no ``tokenizers`` package while ``tokenizer`` is asked for.

    Blocks; about 25 million weights a second on one core, memory for one tensor at a time.
    """
    if hidden % heads or heads % kv_heads or hidden // heads % 2:
        raise ValueError(f"hidden {hidden}, heads {heads}, kv_heads {kv_heads} do not divide into even heads")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if tokenizer and vocab < MIN_VOCAB:
        raise ValueError(f"vocab {vocab} is too small for every byte and the special tokens: at least {MIN_VOCAB}")
    width = intermediate if intermediate is not None else -(-hidden * 11 // 4 // 64) * 64
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        dtype=dtype,
        width=width,
        max_len=max_len,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    rng = np.random.default_rng(seed)
    _write_weights(folder / "model.safetensors", _weights(rng, config), dtype)
    if tokenizer:
        _write_tokenizer(folder, vocab, max_len)
    return folder


def _config(
    *, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, dtype: str, width: int, max_len: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _weights(rng: np.random.Generator, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """(name, float32 array) of every tensor, in one fixed order: the order decides which values each one gets."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
        scale = np.float32(gain / columns**0.5)
        return rng.standard_normal((rows, columns), dtype=np.float32) * scale

    def ones() -> np.ndarray[Any, Any]:
        return np.ones(hidden, dtype=np.float32)

    yield "model.embed_tokens.weight", matrix(vocab, hidden, hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", ones()
        yield at + "self_attn.q_proj.weight", matrix(hidden, hidden, _SHARPNESS)
        yield at + "self_attn.k_proj.weight", matrix(kv_width, hidden, _SHARPNESS)
        yield at + "self_attn.v_proj.weight", matrix(kv_width, hidden)
        yield at + "self_attn.o_proj.weight", matrix(hidden, hidden)
        yield at + "post_attention_layernorm.weight", ones()
        yield at + "mlp.gate_proj.weight", matrix(width, hidden)
        yield at + "mlp.up_proj.weight", matrix(width, hidden)
        yield at + "mlp.down_proj.weight", matrix(hidden, width)
    yield "model.norm.weight", ones()
    yield "lm_head.weight", matrix(vocab, hidden, _LOGIT_SPREAD)


def _write_weights(path: Path, weights: Iterator[tuple[str, np.ndarray[Any, Any]]], dtype: str) -> None:
    """Writes a safetensors file (8-byte length, JSON, bytes), which holds one tensor in memory at a time.

    By hand, since the library's numpy side has no bfloat16 and its raw side changed between 0.4 and 0.8; the stock
    reader is what the tests check it with.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    body = path.with_name(path.name + ".body")
    with body.open("wb") as out:
        for name, array in weights:
            raw = _bfloat16(array) if dtype == "bfloat16" else array.astype("<f4", copy=False)
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": list(array.shape),
                "data_offsets": [at, at + raw.nbytes],
            }
            at += raw.nbytes
            out.write(raw.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out, body.open("rb") as source:
        out.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, out, 1 << 20)
    body.unlink()


def _bfloat16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Finite float32 values as bfloat16 bits (little-endian uint16), rounded to nearest even."""
    bits = array.astype("<f4", copy=False).view("<u4")
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def _merges(alphabet: list[str], wanted: int) -> list[tuple[str, str]]:
    """``wanted`` merges whose results all differ: letter pairs, then a space with each, then pairs of pairs."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1) if chr(code) in alphabet]
    space = "\u0120"
    merges: list[tuple[str, str]] = []
    made = set(alphabet)

    def extend(left: list[str], right: list[str]) -> None:
        for first in left:
            for second in right:
                if len(merges) == wanted:
                    return
                if first + second not in made:
                    made.add(first + second)
                    merges.append((first, second))

    pairs = [a + b for a in letters for b in letters]
    extend(letters, letters)
    extend([space], letters)
    extend([space], pairs)
    extend(pairs, pairs)
    if len(merges) < wanted:
        raise ValueError(f"a vocabulary of {wanted - len(merges)} tokens less is the largest this tokenizer has")
    return merges


def _write_tokenizer(folder: Path, vocab: int, max_len: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(alphabet, vocab - MIN_VOCAB)
    words = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    built = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    built.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
