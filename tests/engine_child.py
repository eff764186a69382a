"""A vLLM engine for tests, as a child process: batches of greedy requests, driven by JSON lines.

The protocol is that of `demo.engine`, with ``{"verb": "batch", "prompts": [[ids], ...], "tokens": n, "logprobs": k}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from demo.engine import private_output, start


def batch(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    """All prompts at once; tokens and, if asked for, the log-probabilities of the chosen tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=command["tokens"], ignore_eos=True, logprobs=command.get("logprobs")
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    outputs = []
    for request in llm.generate(prompts, sampling, use_tqdm=False):
        chosen = request.outputs[0]
        steps = zip(chosen.token_ids, chosen.logprobs or (), strict=False)
        outputs.append({"tokens": list(chosen.token_ids), "logprobs": [entry[token].logprob for token, entry in steps]})
    return outputs


def main() -> None:
    """Serves commands until ``close`` or the end of input."""
    answers = private_output()
    llm = start(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["verb"] != "batch":
            break
        print(json.dumps({"outputs": batch(llm, command)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
