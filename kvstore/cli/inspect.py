"""``kvstore inspect``: everything about one record."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.cli.columns import NONE, RED, clean, is_coloured, paint, portable, when
from kvstore.cli.stores import DAMAGE, MISSING, OK, add_place, open_stores
from kvstore.errors import ConfigError
from kvstore.tiers.tools import Inspection, Verdict
from kvstore.units import format_bytes

_KEY = re.compile(r"([0-9a-fA-F]{1,64})(?:\.safetensors)?", re.ASCII)
_LIMIT = 256
"""Records of one key that are looked at: shards times epochs."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``kvstore``."""
    parser = commands.add_parser(
        "inspect",
        help="everything about one record",
        description="Where a record is, what its header says, its geometry, and whether it is whole. Exit status 1 if "
        "it is damaged, 2 if there is no such record or the key is that of several addresses.",
    )
    parser.add_argument(
        "record",
        metavar="KEY|FILE",
        help="hex digits that an address begins with, or a file (write ./NAME for one whose name is hex digits)",
    )
    add_place(parser, "--path")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and the store that it was found in: ``""`` for a file that was named."""

    tier: str
    store: str
    inspection: Inspection

    @property
    def address(self) -> str | None:
        """The address of its place, else the one that its header says."""
        record = self.inspection.finding.record
        return self.inspection.header.get("address") if record is None else record.address


def run(options: argparse.Namespace) -> int:
    """Shows the record, in every epoch and shard that has it.

    Raises:
        ConfigError: the key is no key, is of no record, or of several addresses.
    """
    key = _KEY.fullmatch(options.record)
    if key is not None and not (options.record.endswith(".safetensors") and Path(options.record).exists()):
        found, status = _of_key(key[1].lower(), options)
    else:
        found, status = [_of_file(options.record)], OK
    reports = [report(item) for item in found]
    if options.json:
        print(json.dumps({"records": reports}, indent=1, allow_nan=False))
    else:
        print("\n\n".join(render(item, colour=is_coloured(sys.stdout)) for item in reports))
    bad = (Verdict.DAMAGED, Verdict.UNREADABLE)
    return DAMAGE if any(item.inspection.finding.verdict in bad for item in found) else status


def _of_key(key: str, options: argparse.Namespace) -> tuple[list[Found], int]:
    stores, status = open_stores(options.path, options.config)
    found = [
        Found(store.tier, store.tools.place, item) for store in stores for item in store.tools.inspect(key, _LIMIT)
    ]
    addresses = sorted({item.address for item in found if item.address is not None})
    if not found:
        if stores:
            raise ConfigError(f"{key}: no record has an address that begins so")
        return [], MISSING
    if len(addresses) > 1:
        shown = "\n".join(f"  {address}" for address in addresses[:10])
        raise ConfigError(f"{key}: several addresses begin so; write more digits\n{shown}")
    return found, status


def _of_file(path: str) -> Found:
    from kvstore.tiers.base import tier_types

    for name, kind in tier_types().items():
        if kind.tools is not None and (found := kind.tools.inspect_file(path)) is not None:
            return Found(name, "", found)
    raise ConfigError(f"{path}: no tier keeps its records in files")


def report(found: Found) -> dict[str, Any]:
    """An inspection as JSON-able values."""
    item = found.inspection
    record, space, header = item.finding.record, item.namespace, item.header
    said = header.get("checksum")
    state = "not computed" if not item.checksum else "equal" if item.checksum == said else "different"
    return {
        "tier": found.tier,
        "store": portable(found.store) or None,
        "place": portable(item.finding.place),
        "verdict": item.finding.verdict.value,
        "kind": item.finding.kind,
        "detail": portable(item.finding.detail),
        "address": found.address,
        "model": None if space is None else space.model or None,
        "namespace": None if space is None else space.digits,
        "epoch": None if record is None else record.epoch,
        "is_published": None if record is None or space is None else record.epoch == space.epoch,
        "shard": header.get("shard") or (None if record is None else record.shard),
        "content_bytes": item.content_bytes,
        "bytes": None if record is None else record.size_bytes,
        "last_use": None if record is None else record.used_at,
        "header": dict(header),
        "geometry": dict(item.geometry),
        "checksum": {"state": state, "header": said, "payload": item.checksum or None},
    }


def render(item: Mapping[str, Any], *, colour: bool) -> str:
    """A report as text."""
    kind = f" ({item['kind']}{': ' + item['detail'] if item['detail'] else ''})" if item["kind"] else ""
    verdict = paint(item["verdict"], RED, colour and item["verdict"] != "ok") + clean(kind)
    epoch = item["epoch"] and f"{item['epoch']}{' (published)' if item['is_published'] else ''}"
    checksum = item["checksum"]
    lines = {
        "verdict": verdict,
        "address": clean(item["address"] or NONE),
        "where": clean("/".join(part for part in (item["store"], item["place"]) if part)),
        "tier": item["tier"],
        "model": clean(item["model"] or NONE),
        "namespace": item["namespace"] or NONE,
        "epoch": epoch or NONE,
        "shard": clean(item["shard"] or NONE),
        "size": f"{item['content_bytes']} bytes"
        + ("" if item["bytes"] is None else f", {format_bytes(item['bytes'])} of the tier"),
        "last use": when(item["last_use"]),
        "checksum": f"{checksum['state']}: header {checksum['header'] or NONE}, payload {checksum['payload'] or NONE}",
    }
    for name, value in item["header"].items():
        if name not in ("address", "checksum", "shard"):
            lines[f"header.{name}"] = clean(value)
    for name, value in item["geometry"].items():
        if name == "layers" and isinstance(value, list):
            lines["geometry.layers"] = clean(_layers(value))
        else:
            lines[f"geometry.{name}"] = clean(json.dumps(value))
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items())


def _layers(layers: list[Any]) -> str:
    """The layers without their names, equal ones folded: ``28 x bfloat16 HTC [8, 16, 256]``."""
    runs: list[tuple[str, int]] = []
    for layer in layers:
        text = " ".join(str(part) for part in layer[1:]) if isinstance(layer, list) else str(layer)
        runs = [*runs[:-1], (text, runs[-1][1] + 1)] if runs and runs[-1][0] == text else [*runs, (text, 1)]
    return ", ".join(f"{number} x {text}" for text, number in runs)
