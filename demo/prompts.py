"""Long prompts of made-up words, each different from its first block on."""

from __future__ import annotations

import random
from pathlib import Path

_SYLLABLES = ("ka", "to", "mi", "ren", "lu", "sha", "vo", "ne", "pri", "da", "gol", "ur", "ti", "bex", "a", "ion")


def text_of(number: int, words: int) -> str:
    """Prompt text ``number``: ``words`` words, the same in every run."""
    rng = random.Random(number)
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(words))


def make_prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """``count`` prompts of exactly ``tokens`` token ids, made from text with the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # A word has at least one token, so this many words are always enough.
    return [tokenizer.encode(text_of(number, tokens)).ids[:tokens] for number in range(count)]
