"""The settings of the disk tier."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from kvstore.config import STRICT, Fraction, Size, StorePath, store_path
from kvstore.units import GIB


@dataclass(frozen=True, slots=True, config=STRICT)
class DiskConfig:
    """Settings of a disk tier.

    Attributes:
        path: root directory of the store, on a local file system; made if it is not there.
        capacity: bytes that all records under the root may take; 0 switches the tier off.
        min_free: fraction of the file system that stays free.
        write: ``through``: every chunk is written as soon as it was saved.
        sync: whether a record counts as stored only when it would survive a loss of power.
        read_only: serves what is there, writes and removes nothing.
        required: whether an unusable tier is an error at start.
    """

    path: StorePath = field(default_factory=lambda: store_path("~/.cache/kvstore"))
    capacity: Size = 20 * GIB
    min_free: Fraction = 0.05
    write: Literal["through"] = "through"
    sync: bool = False
    read_only: bool = False
    required: bool = False
