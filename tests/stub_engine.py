"""vLLM without a model: its real scheduler, requests and block pool around our connectors of both roles.

What vLLM asserts is asserted here too (an unknown or second ``finished_recving``, a block freed twice); everything
between scheduler and workers is pickled, as under the multi-process executor.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from made_up import tok
from stub_setup import RECORD, Setup, write_model
from stub_worker import StubWorker, Work
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connectors.vllm import adapt, plugin

DEADLINE = 60.0
"""Seconds after which a request counts as parked; catches a hang, measures nothing."""


class StubEngine:
    """EngineCore's loop. ``workers`` are `StubWorker`s or what looks like them, for instance over a pipe."""

    def __init__(self, setup: Setup, workers: Sequence[Any] | None = None) -> None:
        self.setup = setup
        # vLLM makes the workers' connectors before the scheduler's.
        self.workers = [StubWorker(setup, rank) for rank in range(setup.ranks)] if workers is None else list(workers)
        config, kv = setup.vllm_config(), setup.kv_cache_config()
        plugin.register()
        self.scheduler = Scheduler(config, kv, StructuredOutputManager(config), setup.block, setup.block)
        self.connector: Any = self.scheduler.connector
        shakes = {(0, rank): _through_pickle(w.handshake()) for rank, w in enumerate(self.workers)}
        self.connector.set_xfer_handshake_metadata_pp_aware(shakes)
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(setup.block, hashing)
        self._aggregator = KVOutputAggregator(setup.ranks)
        self.tables: dict[str, list[int]] = {}
        """The last block table of each request."""
        self.outputs: dict[str, list[int]] = {}
        self.silent_ranks: set[int] = set()
        """Ranks whose worker metadata is None in the next step only."""
        self._number = 0

    @property
    def side(self) -> Any:
        """The scheduler's side."""
        return self.connector.scheduler_side

    @property
    def planner(self) -> Any:
        """The planner."""
        return self.side.planner

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def count(self, name: str, **labels: str) -> int:
        """A counter of the scheduler's side."""
        return int(self.side.counters.value(name, **labels))

    def request(
        self, tokens: Sequence[int], *, salt: str | None = None, max_tokens: int = 1, lora: Any = None
    ) -> Request:
        """A request that the engine does not know yet."""
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        return Request(
            f"r{self._number}",
            list(tokens),
            sampling,
            None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=self._hasher,
        )

    def add(self, tokens: Sequence[int], *, salt: str | None = None, max_tokens: int = 1, lora: Any = None) -> str:
        """Adds a request; its id."""
        request = self.request(tokens, salt=salt, max_tokens=max_tokens, lora=lora)
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)
        return request.request_id

    def abort(self, *request_ids: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def step(self, budget: int | None = None) -> int:
        """One step of at most ``budget`` tokens; the tokens that it computed."""
        scheduler = self.scheduler
        if budget is not None:
            scheduler.max_num_scheduled_tokens = budget
        planned = scheduler.schedule()
        forwards, ids, sampled = [], list(planned.num_scheduled_tokens), []
        for request_id in ids:
            request = scheduler.requests[request_id]
            end, tokens = request.num_computed_tokens, list(request.all_token_ids)
            first = end - planned.num_scheduled_tokens[request_id]
            table = self._table(request_id)
            forwards.append((tokens[:end], first, table))
            sampled.append([(tokens[-1] * 31 + end) % 32000] if end == len(tokens) else [])
        for request in scheduler.kv_holding_waiting:
            self._table(request.request_id)
        freed = () if self.setup.caching else self._unused_blocks()
        finished = frozenset(planned.finished_req_ids)
        outputs = []
        for rank, worker in enumerate(self.workers):
            metadata = _through_pickle(planned.kv_connector_metadata)
            work = Work(metadata, tuple(forwards), freed, finished, planned.has_sync_kv_loads)
            output = _through_pickle(worker.step(work))
            if rank in self.silent_ranks:
                output.kv_connector_worker_meta = None
            outputs.append(_runner_output(ids, sampled, output))
        self.silent_ranks.clear()
        ended = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)
        for group in scheduler.update_from_output(planned, ended).values():
            for output in group.outputs:
                self.outputs[output.request_id] += output.new_token_ids
        return planned.total_num_scheduled_tokens

    def _table(self, request_id: str) -> list[int]:
        table = self.tables[request_id] = list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
        return table

    def _unused_blocks(self) -> tuple[int, ...]:
        return tuple(
            block.block_id
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.ref_cnt == 0 and not block.is_null
        )

    def run(self, budgets: Sequence[int] = ()) -> None:
        """Steps until every request is done; steps are cut as ``budgets`` say, then as they come."""
        pieces, deadline = list(budgets), time.monotonic() + DEADLINE
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, f"parked: {sorted(self.scheduler.requests)}"
            if not self.step(pieces.pop(0) if pieces else 8192):
                time.sleep(0.001)  # EngineCore does the same

    def generate(self, tokens: Sequence[int], *, salt: str | None = None, max_tokens: int = 1, lora: Any = None) -> str:
        """One request from its arrival to its end; its id."""
        request_id = self.add(tokens, salt=salt, max_tokens=max_tokens, lora=lora)
        self.run()
        assert len(self.outputs[request_id]) == max_tokens
        return request_id

    def until(self, reached: Callable[[], bool], what: str = "nothing happened") -> None:
        """Steps until ``reached()``."""
        deadline = time.monotonic() + DEADLINE
        while not reached():
            assert time.monotonic() < deadline, what
            if not self.step():
                time.sleep(0.001)

    def warm(self) -> StubEngine:
        """Steps until every persistent tier can be used; this engine."""
        state = self.planner.state
        wanted = sum(1 << tier for tier in state.persistent)
        self.until(lambda: state.readable == wanted, "a tier stays closed")
        return self

    def settle(self) -> None:
        """Steps until every order was reported."""
        self.until(lambda: not self.planner.orders.open, "an order is never reported")
        self.planner.check()

    def lookup(self, tokens: Sequence[int], local: int = 0, *, salt: str | None = None, lora: Any = None) -> int:
        """The connector's answer for a prompt, once it is no more "ask me later"; the request then goes away."""
        request, deadline = self.request(tokens, salt=salt, lora=lora), time.monotonic() + DEADLINE
        self.connector.on_new_request(request)
        while True:
            count, is_async = self.connector.get_num_new_matched_tokens(request, local)
            if count is not None:
                assert is_async == (count > 0)
                self.connector.request_finished(request, [])
                return int(count)
            assert time.monotonic() < deadline, "asked for ever"
            self.step()

    def deliver(self, tokens: Sequence[int], table: Sequence[int], local: int = 0) -> int:
        """A load outside of the scheduler into the blocks of ``table``; the tokens that were promised."""
        request, deadline = self.request(tokens), time.monotonic() + DEADLINE
        self.connector.on_new_request(request)
        while (promised := self.connector.get_num_new_matched_tokens(request, local)[0]) is None:
            self.step()
        blocks = SimpleNamespace(get_block_ids=lambda: (list(table),))
        self.connector.update_state_after_alloc(request, blocks, promised)
        while promised and not all(request.request_id in worker.finished for worker in self.workers):
            assert time.monotonic() < deadline, "a load without an end"
            idle = SimpleNamespace(num_scheduled_tokens={}, has_sync_kv_loads=False)
            metadata = self.connector.build_connector_meta(idle)
            for worker in self.workers:
                output = worker.step(Work(_through_pickle(metadata), (), (), frozenset()))
                self.connector.update_connector_output(_through_pickle(output))
        self.connector.request_finished(request, list(table))
        return int(promised)

    def close(self) -> None:
        """vLLM's shutdown of both sides."""
        self.connector.shutdown()
        for worker in self.workers:
            worker.close()


class Lab:
    """A model, a directory for records, and engines on them that are closed and checked at the end."""

    def __init__(self, root: Path, monkeypatch: Any) -> None:
        self.root = root
        self.store = root / "store"
        self._engines: list[StubEngine] = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        # Tests that make a worker's connector themselves have no tensor-parallel group to ask.
        monkeypatch.setattr(adapt, "worker_rank", lambda: 0)
        self.model = write_model(root / "model")

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._engines:
            engine.close()

    def setup(
        self,
        *,
        chunk: int = 16,
        cpu: int = 512,
        disk: int = 4096,
        load: str = "30s",
        more: str = "",
        **settings: Any,
    ) -> Setup:
        """Settings of an engine with these capacities in records of 16 tokens on one rank; 0 for no tier."""
        tiers = [f"{{type: cpu, capacity: {cpu * RECORD}B}}"] if cpu else []
        if disk:
            tiers.append(f"{{type: disk, path: {self.store}, capacity: {disk * RECORD}B, min_free: 0%}}")
        path = self.root / f"config-{len(list(self.root.glob('config-*')))}.yaml"
        path.write_text(
            f"chunk_tokens: {chunk}\ntiers: [{', '.join(tiers)}]\n"
            f"limits: {{probe_timeout: 30s, load_timeout: {load}}}\nstats: {{snapshot_dir: 'off'}}\n{more}"
        )
        return Setup(self.model, path, **settings)

    def engine(self, **settings: Any) -> StubEngine:
        """An engine whose persistent tiers are open; see `setup`."""
        engine = StubEngine(self.setup(**settings))
        self._engines.append(engine)
        return engine.warm()

    def end(self, engine: StubEngine) -> None:
        """Shuts an engine down."""
        self._engines.remove(engine)
        engine.close()

    def stored(self, tokens: Sequence[int] | None = None, **settings: Any) -> Sequence[int]:
        """Stores a prompt's chunks on disk with an engine of its own; the prompt (80 tokens by default)."""
        prompt = tok(80, 1) if tokens is None else tokens
        engine = self.engine(**settings)
        engine.generate(prompt)
        engine.settle()
        self.end(engine)
        return prompt

    def files(self) -> list[Path]:
        """Every record on disk."""
        return sorted(self.store.rglob("*.safetensors"))


def _through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _runner_output(ids: list[str], sampled: list[list[int]], output: KVConnectorOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled,
        kv_connector_output=output,
    )  # fmt: skip
