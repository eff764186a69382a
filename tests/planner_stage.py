"""A planner with fake ranks and a clock, and the few moves that its direct tests are made of."""

from __future__ import annotations

from kvstore.messages import Plan
from kvstore.metrics import Counters
from kvstore.planner.planner import Planner, PlannerSpec, TierSpec
from kvstore.planner.tracks import Match, Track
from kvstore.policies.lru import Lru
from tests.fake_ranks import NAMESPACE, FakeRank

NEAR = TierSpec("near", True)
FAR = TierSpec("far", False, 1000)
EPOCH = "00000000000000e1"


def chain(name: str, chunks: int) -> list[bytes]:
    """Addresses of a prompt of its own."""
    return [f"{name}/{index}".encode() for index in range(chunks)]


class Stage:
    """Chunks have 16 tokens, blocks 8; every request has the blocks 0, 1, 2 and so on."""

    def __init__(
        self, slots: int, tiers: tuple[TierSpec, ...] = (NEAR, FAR), ranks: int = 1, write_limit: int = 1 << 30
    ) -> None:
        self.counters = Counters()
        spec = PlannerSpec(16, 8, slots, tiers, ranks, 1)
        self.planner = Planner(spec, Lru(slots), self.counters)
        self.ranks = [FakeRank(rank, slots, rank == 0, {}, write_limit) for rank in range(ranks)]
        for rank in self.ranks[1:]:
            rank.store = self.ranks[0].store
        self.now = 1000.0
        self.blocks = list(range(4096))
        self.far = self.planner.state.persistent
        self.planner.set_namespace(NAMESPACE)
        for tier in self.far:
            self.planner.set_epoch(tier, EPOCH)
            for rank in self.ranks:
                rank.set_tier(tier)
        self.step()

    @property
    def rank(self) -> FakeRank:
        return self.ranks[0]

    def step(self, *, ends: bool = True, reports: bool = True) -> Plan:
        """A plan, executed by all ranks; transfers end (``ends``) and are reported (``reports``)."""
        plan = self.planner.plan(self.now)
        for rank in self.ranks:
            rank.plans.append(plan)
            rank.execute()
            if ends:
                rank.end_everything()
        if reports:
            self.report()
        return plan

    def report(self) -> None:
        """Reports of all ranks arrive."""
        for rank in self.ranks:
            self.planner.absorb(rank.report())

    def offer(self, name: str, addresses: list[bytes], chunks: int | None = None) -> Track:
        """The request computed its first ``chunks`` chunks, all by default."""
        track = self.planner.track(name)
        count = len(addresses) if chunks is None else chunks
        self.planner.offer(track, addresses, 16 * count, self.blocks)
        return track

    def store(self, name: str, addresses: list[bytes]) -> None:
        """A request computes all chunks in one step, then ends."""
        self.offer(name, addresses)
        self.step()
        self.planner.close(name)

    def match(self, name: str, addresses: list[bytes], local: int = 0, tokens: int | None = None) -> Match:
        """Lookup for a prompt of ``tokens`` tokens, by default one more than the chunks have."""
        limit = (16 * len(addresses) + 1 if tokens is None else tokens) - 1
        return self.planner.match(self.planner.track(name), addresses, local, limit, self.now)

    def found(self, addresses: list[bytes]) -> int | None:
        """Tokens that a new request would find; leaves nothing behind."""
        track = self.planner.track("asks")
        self.planner.answer(track, 0)
        match = self.planner.match(track, addresses, 0, 16 * len(addresses), self.now)
        self.planner.close("asks")
        return match.tokens

    def load(self, name: str, addresses: list[bytes], local: int = 0, tokens: int | None = None) -> int:
        """Matches and commits all or ``tokens`` tokens; the number committed."""
        match = self.match(name, addresses, local)
        assert match.tokens
        count = match.tokens if tokens is None else tokens
        track = self.planner.track(name)
        self.planner.admit(track, 16 * len(addresses) + 1, local, count)
        self.planner.commit(track, addresses, local, count, self.blocks)
        return count

    def resident(self, addresses: list[bytes]) -> list[int]:
        """Indices of the chunks that a slot holds."""
        return [index for index, address in enumerate(addresses) if self.planner.catalog.slot(address) >= 0]
