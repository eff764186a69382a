"""Whatever is called in what order, and whatever ranks do, lose, repeat or report late: the planner's promises hold.

For a longer run: ``HYPOTHESIS_PROFILE=long python -m pytest tests/test_planner_machine.py`` (random seeds, 5,000 runs
of 120 steps).
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis.stateful import invariant, precondition, rule

from kvstore.messages import Outcome, Report
from tests.fake_ranks import NAMESPACE, FakeRank
from tests.planner_rules import LOAD, PROBE, C, EngineRules, Request

BAD = (Outcome.MISS, Outcome.DAMAGED, Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.SKIPPED)


class PlannerMachine(EngineRules):
    """See the module."""

    # -- plans and ranks --------------------------------------------------------------------------------------------

    @rule()
    def make_plan(self) -> None:
        plan = self.planner.plan(self.now)
        self.ledger.sent(plan)
        for rank in self.ranks:
            rank.plans.append(plan)
        self.is_settled = True

    @rule()
    def fall_back(self) -> None:
        self.ledger.has_abandoned = True
        plan = self.planner.fallback_plan()
        assert not (plan.saves or plan.writes or plan.fetches or any(load[3] for load in plan.loads))
        self.ledger.sent(plan)
        for rank in self.ranks:
            rank.plans.append(plan)

    @precondition(lambda self: any(rank.plans for rank in self.ranks))
    @rule(which=st.integers(0, 2), failing=st.sampled_from((0, 0, 0, 1, 2, 7)))
    def execute(self, which: int, failing: int) -> None:
        self._pick("plans", which).execute(failing)

    @precondition(lambda self: any(rank.reads for rank in self.ranks))
    @rule(which=st.integers(0, 2), index=st.integers(0, 9), outcome=st.sampled_from((Outcome.HIT, Outcome.HIT, *BAD)))
    def end_read(self, which: int, index: int, outcome: Outcome) -> None:
        rank = self._pick("reads", which)
        rank.end_read(index % len(rank.reads), outcome)

    @precondition(lambda self: any(rank.writes for rank in self.ranks))
    @rule(
        which=st.integers(0, 2), index=st.integers(0, 9), outcome=st.sampled_from((Outcome.STORED, *BAD, Outcome.FULL))
    )
    def end_write(self, which: int, index: int, outcome: Outcome) -> None:
        rank = self._pick("writes", which)
        rank.end_write(index % len(rank.writes), outcome)

    @precondition(lambda self: any(rank.loads for rank in self.ranks))
    @rule(which=st.integers(0, 2))
    def end_load_too_late(self, which: int) -> None:
        rank = self._pick("loads", which)
        rank.end_load(rank.loads[0])

    def _pick(self, has: str, which: int) -> FakeRank:
        able = [rank for rank in self.ranks if getattr(rank, has)]
        return able[which % len(able)]

    @rule(which=st.integers(0, 2))
    def report(self, which: int) -> None:
        self.network.append(self.ranks[which % len(self.ranks)].report())

    @precondition(lambda self: self.network)
    @rule(index=st.integers(0, 9), fate=st.sampled_from(("once", "once", "again", "lost")))
    def deliver(self, index: int, fate: str) -> None:
        index %= len(self.network)
        report = self.network[index] if fate == "again" else self.network.pop(index)
        if fate != "lost":
            self._absorb(report)

    @rule(transfers=st.booleans())
    def step(self, transfers: bool) -> None:
        """What an engine's step does when nothing goes wrong; transfers may end or go on."""
        self.make_plan()
        for rank in self.ranks:
            while rank.plans:
                rank.execute()
            if transfers:
                rank.end_everything()
        for rank in self.ranks:
            self._absorb(rank.report())

    def _absorb(self, report: Report) -> None:
        for batch in report.batches:
            self.ledger.got(report.rank, batch)
        self.planner.absorb(report)
        for request in self.requests.values():
            loading = {name for name, _, _ in self.ledger.loading.values()}
            request.is_loading = request.name in self.ledger.expected or request.name in loading
        self.is_settled = False

    # -- the world --------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.001, 0.01, PROBE, 1.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def leases_end(self) -> None:
        self.now += LOAD
        self.make_plan()
        assert self.planner.lookup.leased_slots == 0
        assert not any(track.leased for track in self._tracks())

    @precondition(lambda self: self.far)
    @rule(
        which=st.integers(0, 2),
        tier=st.integers(0, 1),
        namespace=st.sampled_from((NAMESPACE, NAMESPACE, b"", b"other")),
    )
    def set_tier(self, which: int, tier: int, namespace: bytes) -> None:
        self.ranks[which % len(self.ranks)].set_tier(self.far[tier % len(self.far)], namespace)

    @precondition(lambda self: self.far)
    @rule(which=st.integers(0, 2), tier=st.integers(0, 1), count=st.integers(1, 3))
    def evict(self, which: int, tier: int, count: int) -> None:
        tier, rank = self.far[tier % len(self.far)], self.ranks[which % len(self.ranks)]
        epoch = self.planner.state.epochs[tier]
        rank.evict(tier, epoch, sorted(rank.store.get((tier, epoch), ()))[:count])

    @rule(publishes=st.booleans())
    def reset(self, publishes: bool) -> None:
        self.planner.reset()
        self.ledger.forget()
        for tier in self.far if publishes else ():
            self._publish(tier)
        for request in self.requests.values():
            request.promise = 0

    @precondition(lambda self: self.far)
    @rule(tier=st.integers(0, 1), is_lost=st.booleans())
    def another_epoch(self, tier: int, is_lost: bool) -> None:
        tier = self.far[tier % len(self.far)]
        self.ledger.forget_tier(tier)
        if is_lost:
            self.planner.set_epoch(tier, "")
        else:
            self._publish(tier)
        for request in self.requests.values():
            request.promise = 0

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def slots_and_pins_are_conserved(self) -> None:
        if hasattr(self, "planner"):
            self.planner.check()

    @invariant()
    def beliefs_are_justified(self) -> None:
        if hasattr(self, "planner"):
            self.ledger.compare(self.is_settled)

    @invariant()
    def accounts_add_up(self) -> None:
        if hasattr(self, "planner"):
            count = self.counters.value
            parts = count("local_tokens_total") + count("hit_tokens_total") + count("miss_tokens_total")
            assert count("queried_tokens_total") == parts
            assert count("delivered_tokens_total") + count("failed_tokens_total") <= self.committed

    def teardown(self) -> None:
        if not hasattr(self, "planner"):
            return
        for name in list(self.requests):
            self.planner.close(name)
        self.requests.clear()
        for _ in range(2):
            self.step(True)
        state = self.planner.state
        self.planner.check()
        self.ledger.compare(is_settled=False)
        assert self.planner.orders.open == 0 and not self.ledger.open and not self.ledger.expected
        assert not any(state.slots.pins) and state.slots.free + state.slots.ready == state.slots.count
        count = self.counters.value
        assert count("delivered_tokens_total") + count("failed_tokens_total") == self.committed
        assert self.ledger.planned_loads == self.commits
        assert all(len(rank.ended) == self.commits for rank in self.ranks), "a load was not ended exactly once"
        self._still_works()

    def _still_works(self) -> None:
        """After everything that happened, what is stored now is found by the next request."""
        for rank in self.ranks:
            rank.write_limit = 1 << 30
            for tier in self.far:
                rank.set_tier(tier, NAMESPACE)
        for tier in self.far:
            self._publish(tier)
            self.ledger.forget_tier(tier)
        self.step(True)
        note(f"generation {self.planner.state.generation}, slots {self.planner.spec.slots}")
        for name in ("first", "second"):
            request = Request(name, "zz", 2 * C + 1, 0, list(range(5)))
            track = self.planner.track(name)
            match = self.planner.match(track, request.addresses, 0, request.tokens - 1, self.now)
            if name == "first":
                self.planner.offer(track, request.addresses, 2 * C, request.blocks)
                self.step(True)
                self.planner.close(name)
            else:
                assert match.tokens == 2 * C


settings.register_profile(
    "short", max_examples=1000, stateful_step_count=60, derandomize=True, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate, Phase.shrink),
)  # fmt: skip
settings.register_profile(
    "long", max_examples=5000, stateful_step_count=120, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
