"""The ``cpu`` tier: slots in this machine's memory. Its settings only; the planner owns the slots."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from pydantic.dataclasses import dataclass

from kvstore.config import STRICT, Size
from kvstore.tiers.base import TierType
from kvstore.units import GIB


def default_capacity() -> int:
    """Bytes: 4 GiB, or a quarter of the physical memory where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 * GIB, physical // 4)


@dataclass(frozen=True, slots=True, config=STRICT)
class CpuConfig:
    """YAML keys of ``type: cpu``.

    Attributes:
        capacity: bytes of slots of one engine, divided by its local ranks.
        pin: whether the slots are registered with a device: where there is one, always, never.
        required: whether a tier that cannot be used is an error at start.
    """

    capacity: Size = dataclasses.field(default_factory=default_capacity)
    pin: Literal["auto", "required", "off"] = "auto"
    required: bool = False


def _capacity(config: CpuConfig) -> int:
    return config.capacity


TIER = TierType(
    name="cpu", config=CpuConfig, order=10, is_default=True, volatile=True, capacity_bytes=_capacity, threads=0
)
