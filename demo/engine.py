"""One vLLM engine as a child process, driven by JSON lines, so that it can be killed without mercy.

First line in: the arguments of the engine. Then one command a line, one answer a line:
``{"verb": "generate", "prompt": [ids], "tokens": n}``, ``{"verb": "forget"}``, ``{"verb": "close"}``. End of input
closes too, so an engine does not outlive the demo.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def private_output() -> TextIO:
    """The real standard output for answers only; everything else that prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def start(arguments: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(**arguments)


def _generate(engine: Any, number: int, command: dict[str, Any]) -> dict[str, Any]:
    """One greedy request, stepped by hand: the first token's time and all tokens come from the same request."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=command["tokens"], ignore_eos=True)
    first: float | None = None
    tokens: list[int] = []
    started = time.perf_counter()
    engine.add_request(f"demo-{number}", {"prompt_token_ids": command["prompt"]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            if first is None and tokens:
                first = time.perf_counter() - started
    return {"ttft_s": first, "tokens": tokens}


def main() -> None:
    """Serves commands until ``close`` or the end of input."""
    answers = private_output()

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    llm = start(json.loads(sys.stdin.readline()))
    answer({"ready": True})
    for number, line in enumerate(sys.stdin):
        command = json.loads(line)
        if command["verb"] == "generate":
            answer(_generate(llm.llm_engine, number, command))
        elif command["verb"] == "forget":
            # Empties the engine's own prefix cache and leaves the connector alone.
            answer({"forgotten": bool(llm.reset_prefix_cache())})
        else:
            break


if __name__ == "__main__":
    main()
