"""The demo's course: which engine runs when, what it is asked, and what is measured.

Every sample makes its own precondition: a cold prompt was never seen by its engine, an engine hit follows the same
prompt, a cpu hit follows a reset of the engine's prefix cache, and each disk hit uses a prompt that only the disk has
had since the kill. Prompt 0 is the warm-up of every case and is never counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import cases
from demo.cases import Result, Sample
from demo.child import Answer, EngineProcess
from demo.counts import delivered_after, grown, wait_for_records
from demo.progress import Progress
from demo.prompts import make_prompts
from demo.zeros import zero_payloads
from kvstore.testing.models import make_model

BLOCK_TOKENS = 32
PROMPT_TOKENS = 4000
ANSWER_TOKENS = 16
REPETITIONS = 5
CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS

# Head size 32 keeps a token's KV small beside the computation of the rest, as in a real model; float32, since bfloat16
# logits are so coarse that another order of additions alone changes the answer.
DTYPE = "float32"
LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 8, 512, 16, 4, 2048

STEPS = 2 + 4 + (REPETITIONS + 1) * 4
"""Model, zeroing, four starts, and the prompts in each of four engines."""

_SETTINGS = """\
chunk_tokens: {block}
tiers:
  - {{type: cpu, capacity: 1GiB}}
  - {{type: disk, path: "{disk}", capacity: 2GiB}}
stats: {{snapshot_dir: "{stats}", every: 100ms}}
"""


@dataclass(frozen=True, slots=True)
class Store:
    """One store's places: its YAML, its records and its snapshots."""

    settings: Path
    disk: Path
    stats: Path

    @classmethod
    def under(cls, folder: Path) -> Store:
        """Makes ``folder`` and the YAML in it; the rest is made by who uses it."""
        folder.mkdir(mode=0o700)
        store = cls(folder / "kvstore.yaml", folder / "disk", folder / "stats")
        store.settings.write_text(_SETTINGS.format(block=BLOCK_TOKENS, disk=store.disk, stats=store.stats))
        return store


@dataclass(slots=True)
class Scenario:
    """The whole course in one temporary ``folder``. Used by one thread.

    `measure` leaves the engine that made the disk hits running, so that its statistics can be shown; `close` ends it.
    """

    folder: Path
    progress: Progress
    live: EngineProcess | None = None
    store: Store = field(init=False)
    _model: Path = field(init=False)
    _prompts: list[list[int]] = field(init=False)
    _expected: list[tuple[int, ...]] = field(init=False, default_factory=list)
    _samples: dict[str, list[Sample]] = field(init=False, default_factory=dict)

    def measure(self) -> dict[str, Result]:
        """Runs everything.

        Raises:
            EngineFailed: an engine did not start, answer or end.
            CountsMissing: the store did not save or count in time.
        """
        self.progress.step("making a model with random weights")
        self._model = make_model(
            self.folder / "model",
            layers=LAYERS,
            hidden=HIDDEN,
            heads=HEADS,
            kv_heads=KV_HEADS,
            vocab=VOCAB,
            seed=7,
            dtype=DTYPE,
        )
        self._prompts = make_prompts(self._model, REPETITIONS + 1, PROMPT_TOKENS)
        self.store = Store.under(self.folder / "store")
        self._samples = {case: [] for case in cases.CASES}
        self._without_connector()
        self._first_life()
        self._with_zeros()
        self._second_life()
        return {case: Result(tuple(samples)) for case, samples in self._samples.items()}

    def close(self) -> None:
        """Ends the engine that `measure` left running, if there is one."""
        if self.live is not None:
            self.live.close()
            self.live = None

    def _without_connector(self) -> None:
        with self._start("without connector", None) as engine:
            for number in self._numbers("prompt {} without connector"):
                answer = engine.generate(self._prompts[number], ANSWER_TOKENS)
                self._expected.append(answer.tokens)
                self._keep(cases.NO_CONNECTOR, number, answer, {})

    def _first_life(self) -> None:
        engine = self._start("with the store", self.store)
        try:
            counts = delivered_after(self.store.stats, time.time())
            for number in self._numbers("prompt {}: cold, engine's own hit, cpu hit"):
                counts = self._ask(cases.COLD, engine, number, self.store, counts)
                # Its writes to disk must not run beside the next measurement.
                wait_for_records(self.store.disk, CHUNKS * (number + 1))
                counts = self._ask(cases.ENGINE_HIT, engine, number, self.store, counts)
                engine.forget()
                counts = self._ask(cases.CPU_HIT, engine, number, self.store, counts)
        finally:
            engine.kill()

    def _with_zeros(self) -> None:
        self.progress.step("killed it; copying its store with every payload zeroed")
        zeroed = Store.under(self.folder / "zeroed")
        shutil.copytree(self.store.disk, zeroed.disk)
        zero_payloads(zeroed.disk)
        with self._start("on zeroed KV", zeroed) as engine:
            counts = delivered_after(zeroed.stats, time.time())
            for number in self._numbers("prompt {} on zeroed KV"):
                counts = self._ask(cases.ZERO_CONTROL, engine, number, zeroed, counts)

    def _second_life(self) -> None:
        self.live = engine = self._start("again on the killed engine's store", self.store)
        counts = delivered_after(self.store.stats, time.time())
        for number in self._numbers("prompt {} from disk"):
            counts = self._ask(cases.DISK_HIT, engine, number, self.store, counts)

    def _numbers(self, text: str) -> Iterator[int]:
        for number in range(REPETITIONS + 1):
            self.progress.step(text.format(number) if number else text.format(number) + " (warm-up)")
            yield number

    def _start(self, text: str, store: Store | None) -> EngineProcess:
        self.progress.step(f"starting vLLM {text}")
        log = self.folder / f"engine-{text.replace(' ', '-').replace(chr(39), '')}.log"
        return EngineProcess(engine_arguments(self._model, store), engine_environment(os.environ), log)

    def _ask(
        self, case: str, engine: EngineProcess, number: int, store: Store, before: Mapping[str, int]
    ) -> dict[str, int]:
        """Measures one prompt; returns the counts after it, which are those before the next."""
        answer = engine.generate(self._prompts[number], ANSWER_TOKENS)
        after = delivered_after(store.stats, time.time())
        self._keep(case, number, answer, grown(before, after))
        return after

    def _keep(self, case: str, number: int, answer: Answer, delivered: Mapping[str, int]) -> None:
        if number:
            identical = answer.tokens == self._expected[number]
            self._samples[case].append(Sample(answer.ttft_s, delivered, identical))


def engine_arguments(model: Path, store: Store | None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; the connector is found by its name alone."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": DTYPE,
        "block_size": BLOCK_TOKENS,
        "max_model_len": PROMPT_TOKENS + 4 * BLOCK_TOKENS,
        "max_num_batched_tokens": PROMPT_TOKENS + 4 * BLOCK_TOKENS,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if store is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": str(store.settings)},
        }
    return arguments


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every engine: offline, and bound to one core, which leaves the rest to the store's I/O.

    With any connector vLLM's automatic binding takes every core and reserves none; on two cores the times of one run
    then spread fourfold.
    """
    return {
        **environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
