"""What the demo measured, as values: samples, one result a case, the JSON, and what is expected of them.

Pure functions: nothing here starts or reads anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

COLD = "cold"
ENGINE_HIT = "engine_prefix_hit"
CPU_HIT = "cpu_hit"
DISK_HIT = "disk_hit_after_kill"
ZERO_CONTROL = "zero_control"
NO_CONNECTOR = "no_connector"
CASES = (COLD, ENGINE_HIT, CPU_HIT, DISK_HIT, ZERO_CONTROL, NO_CONNECTOR)

TIER_OF = {CPU_HIT: "cpu", DISK_HIT: "disk", ZERO_CONTROL: "disk"}
"""The tier that must have delivered; in every other case no tier may have."""

MIN_EXTERNAL_TOKENS = 3800
MAX_RATIO = {CPU_HIT: 1.5, DISK_HIT: 3.0}
"""Largest TTFT as a multiple of the engine's own prefix hit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        ttft_s: seconds from handing the request over to its first token.
        delivered: tokens whose KV reached the engine from outside, by tier (the store's own count).
        identical: whether all its tokens are those of the same prompt without connector.
    """

    ttft_s: float
    delivered: Mapping[str, int]
    identical: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of one case."""

    samples: tuple[Sample, ...]

    @property
    def ttft_s(self) -> float:
        """Median, in seconds."""
        return median(sample.ttft_s for sample in self.samples)

    @property
    def external_tokens(self) -> int:
        """Median of the tokens that came from all tiers together."""
        return round(median(sum(sample.delivered.values()) for sample in self.samples))

    @property
    def identical(self) -> bool:
        """Whether every sample is identical to the run without connector."""
        return all(sample.identical for sample in self.samples)

    @property
    def identical_count(self) -> int:
        """How many samples are."""
        return sum(sample.identical for sample in self.samples)


def to_json(results: Mapping[str, Result]) -> dict[str, Any]:
    """The content of ``build/demo.json``."""
    return {
        case: {
            "ttft_s": round(results[case].ttft_s, 6),
            "external_tokens": results[case].external_tokens,
            "identical": results[case].identical,
        }
        for case in CASES
    }


def failed_expectations(results: Mapping[str, Result]) -> list[str]:
    """One line for every expectation that does not hold; empty when all do."""
    problems = []
    for case in CASES:
        problems += _token_problems(case, results[case].samples)
        problems += _identity_problems(case, results[case])
    own = results[ENGINE_HIT].ttft_s
    for case, allowed in MAX_RATIO.items():
        ratio = results[case].ttft_s / own
        if ratio > allowed:
            problems.append(
                f"{case}: TTFT {results[case].ttft_s:.4f} s is {ratio:.2f}x the engine's own prefix hit "
                f"({own:.4f} s), allowed {allowed}x"
            )
    return problems


def _token_problems(case: str, samples: Sequence[Sample]) -> list[str]:
    tier = TIER_OF.get(case)
    if tier is None:
        wrong = max(sum(sample.delivered.values()) for sample in samples)
        return [f"{case}: {wrong} external tokens were delivered, expected none"] if wrong else []
    problems = []
    fewest = min(sample.delivered.get(tier, 0) for sample in samples)
    if fewest <= MIN_EXTERNAL_TOKENS:
        problems.append(
            f"{case}: {fewest} external tokens were delivered from {tier}, expected more than {MIN_EXTERNAL_TOKENS}"
        )
    others = sorted({name for sample in samples for name, count in sample.delivered.items() if count} - {tier})
    if others:
        problems.append(f"{case}: tokens came from {', '.join(others)}, expected from {tier} only")
    return problems


def _identity_problems(case: str, result: Result) -> list[str]:
    count, runs = result.identical_count, len(result.samples)
    if case == ZERO_CONTROL:
        # Loaded bytes that do not matter would make every other comparison worthless.
        return [f"{case}: {count} of {runs} outputs are identical although the KV was zeros"] if count else []
    if count < runs:
        return [f"{case}: {count} of {runs} outputs are identical to the run without connector"]
    return []
