"""What travels between the scheduler and the workers, in vLLM's envelopes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.messages import Plan, Report


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """Scheduler to every worker, every step.

    Attributes:
        plan: the planner's orders.
        lost: (request id, block ids) of promised loads that could not be ordered, to be answered as failed.
    """

    plan: Plan
    lost: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, every step. Reports are only collected here; the planner counts them per rank."""

    reports: tuple[Report, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both ranks' reports."""
        if not isinstance(other, ReportMetadata):
            return self
        return ReportMetadata(self.reports + other.reports)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start.

    Attributes:
        rank, shard: who this is.
        slots: slots that its memory has.
        identity: digest of the namespace without the weights; must be equal on all ranks.
    """

    rank: int
    shard: int
    slots: int
    identity: str
