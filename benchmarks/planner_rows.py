"""Rows about the planner alone: lookups, memory, an idle step, and the size of a plan. No bytes of KV are involved."""

from __future__ import annotations

import gc
import pickle
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

from benchmarks.harness import ROUNDS, Row, main, run
from kvstore.keys import Addresser
from kvstore.messages import Batch, Outcome, Plan, Report
from kvstore.metrics import Counters
from kvstore.planner.planner import Planner, PlannerSpec, TierSpec
from kvstore.policies.lru import Lru

CHUNK, BLOCK = 256, 16
PROMPT_CHUNKS = 512
"""128k tokens."""
CATALOG = 1_000_000
SLOTS = 100_000
MATCH_BAR_MS = 1.0
CHUNK_BAR_BYTES = 400.0
IDLE_BAR_US = 50.0
_NAMESPACE = b"\x5a" * 32
_SLOT_TIER, _FAR_TIER = 0, 1


def make_planner(slots: int) -> Planner:
    """A planner of one volatile and one persistent tier, which is open."""
    tiers = (TierSpec("volatile", True), TierSpec("persistent", False, 4 * CATALOG))
    planner = Planner(PlannerSpec(CHUNK, BLOCK, slots, tiers), Lru(slots), Counters())
    planner.set_namespace(_NAMESPACE)
    planner.set_epoch(_FAR_TIER, "00000000000000e1")
    planner.absorb(Report(0, (Batch(0, tiers=((_FAR_TIER, _NAMESPACE.hex(), ""),)),)))
    return planner


def prefix_hashes(name: str, count: int) -> list[bytes]:
    """Stand-ins for the engine's block hashes: 32 bytes each, all different."""
    derive = Addresser(_NAMESPACE)
    return [derive.address(f"{name} {index}".encode()) for index in range(count)]


def fill(planner: Planner, addresses: Sequence[bytes], in_slots: int) -> None:
    """Puts the first ``in_slots`` addresses into slots, by plans and reports, and all into the persistent tier."""
    blocks = list(range(PROMPT_CHUNKS * (CHUNK // BLOCK)))
    for batch, first in enumerate(range(0, in_slots, PROMPT_CHUNKS), 1):
        part = addresses[first : min(in_slots, first + PROMPT_CHUNKS)]
        track = planner.track(f"fill {first}")
        planner.offer(track, part, CHUNK * len(part), blocks)
        plan = planner.plan(0.0)
        done = tuple((op[0], Outcome.STORED) for op in (*plan.saves, *plan.writes))
        planner.absorb(Report(0, (Batch(batch, done),)))
        planner.close(track.request_id)
    planner.learn(_FAR_TIER, addresses)


def _median_seconds(work: Callable[[int], None], rounds: int = 4 * ROUNDS) -> float:
    figures = []
    for index in range(-2, rounds):
        begin = time.perf_counter()
        work(index)
        if index >= 0:
            figures.append(time.perf_counter() - begin)
    return statistics.median(figures)


def _match_ms(planner: Planner, hashes: Sequence[bytes], *, derives: bool) -> float:
    """Milliseconds of a new request's lookup of the whole prompt."""
    derive = Addresser(_NAMESPACE)
    known = derive.addresses(hashes)
    limit = CHUNK * len(hashes)

    def work(index: int) -> None:
        track = planner.track(f"asks {index}")
        addresses = derive.addresses(hashes) if derives else known
        if planner.match(track, addresses, 0, limit, 0.0).tokens != limit:
            raise RuntimeError("the prompt was not found")

    def measured(index: int) -> float:
        begin = time.perf_counter()
        work(index)
        spent = time.perf_counter() - begin
        planner.close(f"asks {index}")
        return spent

    return statistics.median([measured(index) for index in range(-2, 4 * ROUNDS)][2:]) * 1e3


def match_rows() -> list[Row]:
    """Match of a 128k-token prompt, all in slots and all in the persistent tier; about 10 s and 500 MB."""
    rows: list[Row] = []
    hashes = {where: prefix_hashes(where, PROMPT_CHUNKS) for where in ("slots", "persistent")}
    derive = Addresser(_NAMESPACE)
    stored = [derive.addresses(hashes[where]) for where in ("slots", "persistent")]
    for size, slots in ((2 * PROMPT_CHUNKS, 2 * PROMPT_CHUNKS), (CATALOG, SLOTS)):
        planner = make_planner(slots)
        others = prefix_hashes("other", size - 2 * PROMPT_CHUNKS)
        # The prompts lie in the middle of what the slots and the catalog have.
        half = max(0, slots - PROMPT_CHUNKS) // 2 if others else 0
        fill(planner, others[:half] + stored[0] + others[half:] + stored[1], min(slots, size - PROMPT_CHUNKS))
        gc.collect()
        for where, found in hashes.items():
            for derives in (False, True):
                name = f"match {PROMPT_CHUNKS} chunks in {where}, catalog {size:,}"
                name += ", with the addresses" if derives else ""
                value = _match_ms(planner, found, derives=derives)
                small = next((r.value for r in rows if r.name == name.replace(f"{size:,}", "1,024")), None)
                bar = MATCH_BAR_MS if size == CATALOG else None
                rows.append(Row(name, value, "ms", small, None, bar, bar is None or value < bar))
    return rows


def memory_row() -> Row:
    """Bytes per chunk of the catalog with all its indexes, of which a tenth is in slots too. About 15 s."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    planner = make_planner(SLOTS)
    for first in range(0, CATALOG, SLOTS):
        derive = Addresser(_NAMESPACE)
        addresses = [derive.address(b"%d" % index) for index in range(first, first + SLOTS)]
        fill(planner, addresses, SLOTS if first == 0 else 0)
        del addresses
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if len(planner.catalog) != CATALOG or planner.state.slots.ready != SLOTS:
        raise RuntimeError("the catalog is not what was to be measured")
    value = used / CATALOG
    return Row(
        f"catalog memory a chunk, {CATALOG:,} of which {SLOTS:,} in slots",
        value, "bytes", None, None, CHUNK_BAR_BYTES, value < CHUNK_BAR_BYTES,
    )  # fmt: skip


def idle_row() -> Row:
    """Scheduler time of a step with nothing to do: one running request that was saved up to its last full chunk."""
    planner = make_planner(1024)
    addresses = Addresser(_NAMESPACE).addresses(prefix_hashes("decode", 16))
    blocks = list(range(17 * (CHUNK // BLOCK)))
    fill(planner, addresses, 16)
    track = planner.track("decodes")
    tokens = CHUNK * len(addresses)
    planner.offer(track, addresses, tokens, blocks)
    planner.plan(0.0)

    def steps(_round: int) -> None:
        for step in range(100):
            planner.offer(track, addresses, tokens + step, blocks)
            planner.plan(float(step))

    value = _median_seconds(steps) * 1e6 / 100
    return Row("planner step with nothing to do", value, "us", None, None, IDLE_BAR_US, value < IDLE_BAR_US)


def _big_plan() -> Plan:
    planner = make_planner(4 * PROMPT_CHUNKS)
    addresses = Addresser(_NAMESPACE).addresses(prefix_hashes("plan", PROMPT_CHUNKS))
    planner.offer(planner.track("big"), addresses, CHUNK * PROMPT_CHUNKS, list(range(PROMPT_CHUNKS * (CHUNK // BLOCK))))
    plan = planner.plan(0.0)
    if len(plan.saves) != PROMPT_CHUNKS or len(plan.writes) != PROMPT_CHUNKS:
        raise RuntimeError("the plan is not what was to be measured")
    return plan


def plan_rows() -> list[Row]:
    """Size and pickling time of a plan with 512 saves and 512 writes, and of an empty one; informative."""
    rows = []
    for name, plan in ((f"plan of {PROMPT_CHUNKS} saves and writes", _big_plan()), ("empty plan", Plan(0, 0))):
        pickled = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        there = _median_seconds(lambda _, plan=plan: len(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))) * 1e6
        back = _median_seconds(lambda _, pickled=pickled: pickle.loads(pickled).sequence) * 1e6
        rows.append(Row(f"{name}, pickled", float(len(pickled)), "bytes"))
        rows.append(Row(f"{name}, pickle", there, "us"))
        rows.append(Row(f"{name}, unpickle", back, "us"))
    return rows


def build_rows() -> Sequence[Row]:
    """All rows. About 40 s and 700 MB."""
    return [
        *run("planner step", idle_row),
        *run("plan size", plan_rows),
        *run("match", match_rows),
        *run("catalog memory", memory_row),
    ]


if __name__ == "__main__":
    sys.exit(main(build_rows))
