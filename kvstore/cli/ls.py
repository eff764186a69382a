"""``kvstore ls``: what the stores hold, by model and namespace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cli.columns import BOLD, NONE, RED, amount, clean, columns, count, is_coloured, paint, portable, when
from kvstore.cli.document import JsonWriter
from kvstore.cli.stores import MISSING, OK, OpenStore, add_place, open_stores
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from kvstore.tiers.tools import StoredNamespace, StoredRecord

_MAX_VALUE = 60
_MAX_PATHS = 6


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``kvstore``."""
    parser = commands.add_parser(
        "ls",
        help="what is stored, by model and namespace",
        description="What a store holds, by model and namespace. Reads names and times only and changes nothing. "
        "Exit status 2 if there is no store.",
    )
    add_place(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--records", action="store_true", help="every record too")
    what.add_argument("--diff", action="store_true", help="in which fields the namespaces of one model differ")
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Tally:
    """Records that were counted; times in Unix seconds."""

    records: int = 0
    size_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, size_bytes: int, used_at: float | None) -> None:
        """Counts one record."""
        self.records += 1
        self.size_bytes += size_bytes
        if used_at is not None:
            self.oldest = used_at if self.oldest is None else min(self.oldest, used_at)
            self.newest = used_at if self.newest is None else max(self.newest, used_at)

    def report(self) -> dict[str, Any]:
        """The figures as JSON-able values."""
        return {
            "records": self.records,
            "bytes": self.size_bytes,
            "oldest_use": self.oldest,
            "newest_use": self.newest,
        }


@dataclass(slots=True)
class Row:
    """One namespace and what it holds, in all and by epoch and shard."""

    namespace: StoredNamespace
    total: Tally = field(default_factory=Tally)
    epochs: dict[str, Tally] = field(default_factory=dict)
    shards: dict[str, Tally] = field(default_factory=dict)

    def add(self, record: StoredRecord) -> None:
        """Counts one record."""
        self.total.add(record.size_bytes, record.used_at)
        for parts, name in ((self.epochs, record.epoch), (self.shards, record.shard)):
            parts.setdefault(name, Tally()).add(record.size_bytes, record.used_at)

    def report(self) -> dict[str, Any]:
        """The figures as JSON-able values."""
        space = self.namespace
        return {
            "name": space.name,
            "namespace": space.digits,
            "slug": space.name[: -len(space.digits) - 1],
            "model": space.model or None,
            "is_described": bool(space.fields),
            **self.total.report(),
            "epochs": [
                {"epoch": name, "is_published": name == space.epoch, **tally.report()}
                for name, tally in self.epochs.items()
            ],
            "shards": [{"shard": name, **tally.report()} for name, tally in self.shards.items()],
        }


@dataclass(slots=True)
class Survey:
    """What one listing found. ``others``: things that are no records, by verdict."""

    rows: dict[str, Row]
    total: Tally = field(default_factory=Tally)
    others: dict[str, int] = field(default_factory=dict)

    def models(self) -> dict[str, Tally]:
        """Records by model."""
        found: dict[str, Tally] = {}
        for row in self.rows.values():
            tally = found.setdefault(row.namespace.model, Tally())
            tally.records += row.total.records
            tally.size_bytes += row.total.size_bytes
        return found


def survey(store: OpenStore) -> tuple[Survey, Iterator[StoredRecord]]:
    """A survey that fills up while the records are taken."""
    from kvstore.tiers.tools import Finding

    found = Survey({space.name: Row(space) for space in store.tools.namespaces()})

    def records() -> Iterator[StoredRecord]:
        for item in store.tools.records():
            if isinstance(item, Finding):
                found.others[item.verdict.value] = found.others.get(item.verdict.value, 0) + 1
            elif item.namespace in found.rows:  # one that was made since counts the next time
                found.total.add(item.size_bytes, item.used_at)
                found.rows[item.namespace].add(item)
                yield item

    return found, records()


def run(options: argparse.Namespace) -> int:
    """Lists the stores; 0, or 2 if one is missing or a part of it can not be read."""
    stores, status = open_stores(options.path, options.config)
    if options.json:
        with JsonWriter(sys.stdout.write) as document:
            document.list("stores")
            for store in stores:
                status = max(status, _write_json(document, store, options))
        return status
    for store in stores:
        status = max(status, _write_text(store, options))
    return status


def _status(found: Survey) -> int:
    return MISSING if found.others.get("unreadable") else OK


def _write_json(document: JsonWriter, store: OpenStore, options: argparse.Namespace) -> int:
    found, records = survey(store)
    document.object()
    document.put("tier", store.tier)
    document.put("place", portable(store.tools.place))
    if options.records:
        document.list("all_records")
    for record in records:
        if options.records:
            document.put(None, record_report(record))
    if options.records:
        document.end()
    document.put("records", found.total.records)
    document.put("bytes", found.total.size_bytes)
    document.put("others", found.others)
    document.put(
        "models",
        [
            {"model": name or None, "records": tally.records, "bytes": tally.size_bytes}
            for name, tally in found.models().items()
        ],
    )
    document.list("namespaces")
    for row in found.rows.values():
        document.put(None, row.report())
    document.end()
    if options.diff:
        document.put("differences", [difference.report() for difference in differences(found)])
    document.end()
    return _status(found)


def record_report(record: StoredRecord) -> dict[str, Any]:
    """A record as JSON-able values."""
    return {
        "address": record.address,
        "namespace": record.namespace[-16:],
        "epoch": record.epoch,
        "shard": record.shard,
        "bytes": record.size_bytes,
        "last_use": record.used_at,
        "place": portable(record.place),
    }


def _write_text(store: OpenStore, options: argparse.Namespace) -> int:
    colour = is_coloured(sys.stdout)
    print(paint(f"{store.tier}  {clean(store.tools.place)}", BOLD, colour))
    found, records = survey(store)
    for record in records:
        if options.records:
            fields = (record.address, record.namespace[-16:], record.epoch, record.shard)
            print(*fields, f"{record.size_bytes:>12}", when(record.used_at), sep="  ")
    for line in _table(found):
        print(line)
    models = len(found.models())
    spaces = count(len(found.rows), "namespace")
    print(f"{amount(found.total.records, found.total.size_bytes)} in {spaces} of {count(models, 'model')}")
    if found.others:
        others = ", ".join(f"{number} {verdict}" for verdict, number in sorted(found.others.items()))
        print(paint(f"not records: {others}; kvstore verify names them", RED, colour))
    if options.diff:
        for difference in differences(found):
            print(*difference.lines(), sep="\n")
    return _status(found)


def _table(found: Survey) -> list[str]:
    rows = []
    for row in found.rows.values():
        space, total = row.namespace, row.total
        epochs = [f"{name}{' *' if name == space.epoch else ''}" for name in row.epochs]
        rows.append(
            [
                space.model or f"({space.name[: -len(space.digits) - 1]})",
                space.digits,
                "\n".join(epochs) or NONE,
                "\n".join(row.shards) or NONE,
                str(total.records),
                format_bytes(total.size_bytes),
                when(total.oldest),
                when(total.newest),
            ]
        )
    if not rows:
        return []
    head = ("model", "namespace", "epochs (* in use)", "shards", "records", "bytes", "oldest use", "newest use")
    return columns(head, rows, right=(4, 5))


@dataclass(frozen=True, slots=True)
class Difference:
    """Fields in which the namespaces of one model differ: path of the field to the value in each namespace."""

    model: str
    namespaces: tuple[str, ...]
    values: Mapping[str, tuple[Any, ...]]

    def report(self) -> dict[str, Any]:
        """As JSON-able values."""
        fields = {path: dict(zip(self.namespaces, values, strict=True)) for path, values in sorted(self.values.items())}
        return {"model": self.model, "namespaces": list(self.namespaces), "fields": fields}

    def lines(self) -> list[str]:
        """As text: a column a namespace."""
        shown = sorted(self.values.items())
        rows = [[path, *(_short(value) for value in values)] for path, values in shown]
        by_field: dict[str, int] = {}
        kept = []
        for row in rows:
            name = row[0].split(".")[0].split("[")[0]
            by_field[name] = by_field.get(name, 0) + 1
            if by_field[name] <= _MAX_PATHS:
                kept.append(row)
        more = [f"  and {number - _MAX_PATHS} more in {n}" for n, number in by_field.items() if number > _MAX_PATHS]
        spaces, fields = count(len(self.namespaces), "namespace"), count(len(by_field), "field")
        head = f"\n{clean(self.model)}: {spaces}, {fields} different"
        return [head, *columns(("field", *self.namespaces), kept), *map(clean, more)]


def differences(found: Survey) -> list[Difference]:
    """For every model with several described namespaces, what differs between them."""
    by_model: dict[str, list[StoredNamespace]] = {}
    for row in found.rows.values():
        if row.namespace.fields:
            by_model.setdefault(row.namespace.model, []).append(row.namespace)
    compared = []
    for model, spaces in by_model.items():
        flat = [dict(_leaves(space.fields, "")) for space in spaces]
        paths = {path: None for leaves in flat for path in leaves}
        values = {path: tuple(leaves.get(path) for leaves in flat) for path in paths}
        differing = {path: value for path, value in values.items() if not _are_equal(value)}
        if len(spaces) > 1:
            compared.append(Difference(model, tuple(space.digits for space in spaces), differing))
    return compared


def _are_equal(values: Sequence[Any]) -> bool:
    # As JSON: to Python 1, 1.0 and true are equal, to a digest they are not.
    return len({json.dumps(value, sort_keys=True) for value in values}) == 1


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value in a description by its path: ``groups[0].layers[3][1]``."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."
