"""The engine's half of the planner's state machine: requests that come, ask, load, compute and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstore.messages import Report
from kvstore.metrics import Counters
from kvstore.planner.planner import Planner, PlannerSpec, TierSpec
from kvstore.planner.slot_table import SlotState
from kvstore.policies.lru import Lru
from tests.fake_ranks import NAMESPACE, FakeRank, Store
from tests.planner_ledger import Ledger

C, B = 4, 2
PROBE, LOAD = 0.02, 5.0
SHARDS = ((0,), (0, 1), (0, 0), (0, 0, 1), (0, 1, 2))
"""Shard of each rank."""


@dataclass
class Request:
    """A live request; its prompt's chunks are letters, and a chunk's address is the prompt up to it."""

    name: str
    prompt: str
    tokens: int
    local: int
    blocks: list[int]
    computed: int = 0
    promise: int = 0
    first_asked: float | None = None
    first_plans: int = 0
    is_loading: bool = False
    addresses: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = [self.prompt[: i + 1].encode() for i in range(self.tokens // C)]


class EngineRules(RuleBasedStateMachine):
    """See the module. A subclass has `make_plan` and `step`."""

    @initialize(
        shards=st.sampled_from(SHARDS),
        slots=st.integers(2, 9),
        is_volatile=st.booleans(),
        persistent=st.integers(0, 2),
        limit=st.integers(1, 4),
        read_only=st.booleans(),
    )
    def start(
        self, shards: tuple[int, ...], slots: int, is_volatile: bool, persistent: int, limit: int, read_only: bool
    ) -> None:
        persistent = max(persistent, not is_volatile)
        tiers = (TierSpec("near", True),) * is_volatile
        tiers += tuple(TierSpec(f"far{i}", False, 1000, not (read_only and i)) for i in range(persistent))
        writers = sum(1 << shards.index(shard) for shard in set(shards))
        spec = PlannerSpec(C, B, slots, tiers, len(shards), writers, PROBE, LOAD)
        self.counters = Counters()
        self.planner = Planner(spec, Lru(slots), self.counters)
        self.ledger = Ledger(self.planner)
        self.planner.set_namespace(NAMESPACE)
        self.far = self.planner.state.persistent
        stores: dict[int, Store] = {shard: {} for shard in shards}
        self.ranks = [
            FakeRank(rank, slots, bool(writers >> rank & 1), stores[shard], limit) for rank, shard in enumerate(shards)
        ]
        self.network: list[Report] = []
        self.requests: dict[str, Request] = {}
        self.now, self.names, self.epochs, self.next_block = 100.0, 0, 0, 0
        self.commits = self.committed = 0
        self.is_settled = True
        for tier in self.far:
            self._publish(tier)
            for rank in self.ranks:
                rank.set_tier(tier, NAMESPACE)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _request(self, number: int) -> Request:
        return list(self.requests.values())[number % len(self.requests)]

    @rule(
        prompt=st.text("ab", min_size=7, max_size=7),
        blocks=st.integers(1, 13),
        odd=st.booleans(),
        local=st.integers(0, 6),
    )
    def arrive(self, prompt: str, blocks: int, odd: bool, local: int) -> None:
        tokens = blocks * B + odd
        self.names += 1
        table = list(range(self.next_block, self.next_block + blocks + 1))
        self.next_block += blocks + 1
        local = min(local // 2, (tokens - 1) // B) * B
        request = Request(f"r{self.names}", prompt, tokens, local, table, local)
        self.requests[request.name] = request

    @rule(
        prompt=st.text("ab", min_size=7, max_size=7),
        blocks=st.integers(1, 13),
        local=st.integers(0, 2),
        finishes=st.booleans(),
        transfers=st.booleans(),
    )
    def serve(self, prompt: str, blocks: int, local: int, finishes: bool, transfers: bool) -> None:
        """A request's usual way: arrive, match, load or compute, and perhaps end."""
        self.arrive(prompt, blocks, True, local)
        number = len(self.requests) - 1
        request = self._request(number)
        self.match(number)
        if request.promise:
            self._commit(request, request.promise)
        else:
            self.offer(number, blocks)
        self.step(transfers)
        if finishes:
            self.close(number)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def match(self, which: int) -> None:
        request = self._request(which)
        if request.is_loading:
            return
        track = self.planner.track(request.name)
        asked = (track, request.addresses, request.local, request.tokens - 1, self.now)
        match = self.planner.match(*asked)
        assert self.planner.match(*asked) == match, "an answer changed although nothing did"
        request.promise = match.tokens or 0
        if match.tokens is None:
            if request.first_asked is None:
                request.first_asked, request.first_plans = self.now, self.planner.state.plans
            waits = match.reason != "unknown" and self.planner.state.plans < request.first_plans + 2
            assert waits or self.now < request.first_asked + PROBE, "no answer after the probe deadline"
            return
        first, limit = request.local // C, (request.tokens - 1) // B * B
        if match.tokens:
            assert match.tokens == min((first + len(match.tiers)) * C, limit) - request.local
            refused = self.ledger.refused.get(request.name, 1 << 30)
            assert first + len(match.tiers) <= refused, "a chunk that failed was promised again"
        state = self.planner.state
        for address, tier in zip(request.addresses[first:], match.tiers, strict=False):
            if tier == state.slot_tier:
                assert address in self.ledger.where
            else:
                assert (tier, address) in self.ledger.hints and self.ledger.is_readable(tier)
        following = request.addresses[first + len(match.tiers) : -(-limit // C)]
        if (
            request.local < limit
            and following
            and match.reason not in ("no_slot", "failed_before")
            and state.slot_tier >= 0
        ):
            slot = state.catalog.slot(following[0])
            assert slot < 0 or state.slots.state[slot] != SlotState.READY, "a readable chunk was not promised"

    @precondition(lambda self: any(r.promise for r in self.requests.values()))
    @rule(which=st.integers(0, 9), less=st.sampled_from((0, 0, 0, 1, 2)), may_rest=st.booleans())
    def commit(self, which: int, less: int, may_rest: bool) -> None:
        able = [r for r in self.requests.values() if r.promise]
        request = able[which % len(able)]
        self._commit(request, max(B, request.promise - less * B))
        if may_rest:
            self.make_plan()

    def _commit(self, request: Request, tokens: int) -> None:
        before = self._pins()
        track = self.planner.track(request.name)
        self.planner.admit(track, request.tokens, request.local, tokens)
        self.planner.commit(track, request.addresses, request.local, tokens, request.blocks)
        self._check_taken(before, steals=False)
        self.commits, self.committed = self.commits + 1, self.committed + tokens
        start = request.local // B
        self.ledger.expected[request.name] = request.local, tuple(request.blocks[start : start + tokens // B])
        request.promise, request.is_loading, self.is_settled = 0, True, False

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), blocks=st.sampled_from((0, 1, 2, 5, 14)))
    def offer(self, which: int, blocks: int) -> None:
        request = self._request(which)
        if request.is_loading:
            return
        request.computed = min(request.tokens, request.computed + blocks * B)
        before = self._pins()
        track = self.planner.track(request.name)
        self.planner.admit(track, request.tokens, request.local, 0)
        self.planner.offer(track, request.addresses, request.computed, request.blocks)
        self._check_taken(before, steals=True)
        request.promise, self.is_settled = 0, False

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        request = self._request(which)
        self.planner.close(request.name)
        del self.requests[request.name]

    @precondition(lambda self: self.requests and self.far)
    @rule(which=st.integers(0, 9), tier=st.integers(0, 1), lies=st.booleans())
    def probe_answers(self, which: int, tier: int, lies: bool) -> None:
        request, tier = self._request(which), self.far[tier % len(self.far)]
        epoch = self.planner.state.epochs[tier]
        count = 0
        for address in request.addresses:
            if not (lies or all(address in rank.store.get((tier, epoch), ()) for rank in self.ranks)):
                break
            count += 1
        self.planner.learn(tier, request.addresses[:count])
        self.ledger.hints |= {(tier, address) for address in request.addresses[:count]}
        self.planner.answer(self.planner.track(request.name), count)

    def make_plan(self) -> None:
        raise NotImplementedError

    def step(self, transfers: bool) -> None:
        raise NotImplementedError

    # -- what the rules share ---------------------------------------------------------------------------------------

    def _tracks(self) -> list:
        return [track for name in self.requests if (track := self.planner.find(name)) is not None]

    def _pins(self) -> list[tuple[int, int, int]]:
        slots = self.planner.state.slots
        leased = {slot for track in self._tracks() for slot in track.leased}
        used = Counter(slot for t in self.ledger.open.values() if t.kind != "write" for slot in t.slots)
        return [(slots.state[s], slots.pins[s] - slots.writes[s], used[s] + (s in leased)) for s in range(slots.count)]

    def _check_taken(self, before: list[tuple[int, int, int]], *, steals: bool) -> None:
        slots = self.planner.state.slots
        for slot, (state, pins, users) in enumerate(before):
            if slots.state[slot] == SlotState.FILLING and state != SlotState.FILLING:
                assert state in (SlotState.FREE, SlotState.READY) and pins == users == 0, "a pinned slot was given out"
                assert steals or not slots.writes[slot], "a read took a slot that is being written"

    def _publish(self, tier: int) -> None:
        self.epochs += 1
        self.planner.set_epoch(tier, f"{self.epochs:016x}")
