"""Names below the root of a disk store.

Invariant: only a name that matches its pattern exactly is ever taken for a record, or removed.
"""

from __future__ import annotations

import re

from kvstore.tiers.disk_root import EPOCH_NAME

NAMESPACE_NAME = re.compile(r"[a-z0-9._-]{1,40}-[0-9a-f]{16}", re.ASCII)
SHARD_NAME = re.compile(r"s[0-9]{1,6}of[0-9]{1,6}", re.ASCII)
FAN_NAME = re.compile(r"[0-9a-f]{2}", re.ASCII)
RECORD_NAME = re.compile(r"([0-9a-f]{64})\.safetensors", re.ASCII)
LEVELS = (NAMESPACE_NAME, EPOCH_NAME, SHARD_NAME, FAN_NAME)
"""Patterns of the directories between the root and the records."""

LEDGER_NAME = ".ledger"
MEMBER_NAME = re.compile(r"\.inflight-[0-9a-f]{16}", re.ASCII)

Above = tuple[str, str, str, str]
"""A record's (namespace directory, epoch, shard, fan-out) below the root."""

Path = tuple[str, str, str, str, str]
"""A record's (namespace directory, epoch, shard, fan-out, name) below the root."""


def record_name(address: bytes) -> tuple[str, str]:
    """(fan-out, name) of the file of an address."""
    text = address.hex()
    return text[:2], f"{text}.safetensors"
