"""The model maker: real, deterministic, readable by the stock library, and a tokenizer that takes any text."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from kvstore.testing.models import MIN_VOCAB, make_model


def _small(folder: Path, *, seed: int = 3, dtype: str = "float32", heads: int = 4, vocab: int = 1024) -> Path:
    return make_model(
        folder, layers=2, hidden=64, heads=heads, kv_heads=2, vocab=vocab, seed=seed, dtype=dtype, max_len=512
    )


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_arguments_make_equal_bytes(tmp_path: Path, dtype: str) -> None:
    first, second = _small(tmp_path / "a", dtype=dtype), _small(tmp_path / "b", dtype=dtype)
    assert _digests(first) == _digests(second)
    assert set(_digests(first)) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_another_seed_makes_other_weights(tmp_path: Path) -> None:
    first, second = _digests(_small(tmp_path / "a")), _digests(_small(tmp_path / "b", seed=4))
    assert first["model.safetensors"] != second["model.safetensors"]
    assert first["config.json"] == second["config.json"]


def _tensors(folder: Path, framework: str) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", framework) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)


def test_stock_library_reads_every_tensor_with_the_shapes_of_the_config(tmp_path: Path) -> None:
    folder = _small(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = _tensors(folder, "np")
    assert len(tensors) == 3 + 9 * config["num_hidden_layers"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (kv_width, config["hidden_size"])
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (config["hidden_size"], config["intermediate_size"])
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert np.all(tensors["model.norm.weight"] == 1)


def test_weights_have_the_scale_that_keeps_activations_near_one(tmp_path: Path) -> None:
    weight = _tensors(_small(tmp_path), "np")["model.layers.0.self_attn.v_proj.weight"]
    assert weight.std() == pytest.approx(64**-0.5, rel=0.05)
    assert abs(weight.mean()) < 0.01


def test_bfloat16_weights_are_the_float32_ones_rounded_to_nearest_even(tmp_path: Path) -> None:
    full = _tensors(_small(tmp_path / "full"), "pt")
    half = _tensors(_small(tmp_path / "half", dtype="bfloat16"), "pt")
    assert full.keys() == half.keys()
    for name, tensor in full.items():
        assert half[name].equal(tensor.bfloat16()), name


@pytest.mark.parametrize("text", ["the quick brown fox", "Zeile 1\nZeile 2\t!", "naïve 你好 🙂", ""])
@pytest.mark.parametrize("vocab", [MIN_VOCAB, 1024, 4096])
def test_tokenizer_gives_back_any_text_with_ids_below_the_vocabulary(tmp_path: Path, text: str, vocab: int) -> None:
    tokenizer = Tokenizer.from_file(str(_small(tmp_path, vocab=vocab) / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == vocab
    assert all(0 <= token < vocab for token in ids)


def test_transformers_loads_it_and_a_greedy_answer_varies_and_depends_on_the_prompt(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(
        tmp_path, layers=4, hidden=256, heads=8, kv_heads=4, vocab=1024, seed=1, dtype="float32", max_len=512
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for start in ("one", "two"):
        prompt = tokenizer(f"{start} of the long prompts that end in the same words", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)
        answers.append(answer[0, prompt["input_ids"].shape[1] :].tolist())
    assert len(set(answers[0])) > 8
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("change", "word"), [({"heads": 5}, "heads"), ({"dtype": "float16"}, "dtype"), ({"vocab": 100}, "vocab")]
)
def test_sizes_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        _small(tmp_path, **change)


def test_making_a_model_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvstore.testing.models import make_model;"
        "make_model(Path(sys.argv[1]), layers=1, hidden=16, heads=2, kv_heads=1, vocab=300, seed=0, dtype='bfloat16');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
