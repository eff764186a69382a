"""Authenticated records, and every flipped bit, with and without a key."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from disk_memory import Host, leftovers, record

from kvstore.layout import HEADER_BYTES
from kvstore.messages import Outcome
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.tier_suite import sample_address, sample_scope, sealed_record
from kvstore.tiers import record_key
from kvstore.tiers.base import Scope
from kvstore.tiers.disk_breaker import DROPS, WINDOW_SECONDS
from kvstore.tiers.record import RecordFormat, parse_header
from kvstore.tiers.record_key import KEYED_CHECKSUM, RecordKey, key_fields

SECRET = "correct horse battery"
SCOPES = {"checksum": sample_scope(), "key": sample_scope(secret=SECRET)}
ADDRESS = sample_address(1)


def _format(scope: Scope) -> RecordFormat:
    return RecordFormat(scope.namespace, scope.geometries[0], scope.key)


@pytest.mark.parametrize("kind", SCOPES)
def test_no_flipped_bit_is_ever_served(tmp_path: Path, kind: str) -> None:
    scope, chance = SCOPES[kind], random.Random(3)
    disk = MemoryDisk()
    host = Host(tmp_path / "store", disk, scope=scope)
    assert host.write([1]) == [Outcome.STORED]
    (path,) = (path for path in disk.files() if path.endswith(".safetensors"))
    size = len(record(1, scope))
    flips = [(at, chance.randrange(8)) for at in range(HEADER_BYTES)]
    flips += [(chance.randrange(HEADER_BYTES, size), chance.randrange(8)) for _ in range(500)]
    for at, bit in flips:
        disk.files()[path].content[at] ^= 1 << bit
        (outcome,) = host.read([1])  # what is a hit is compared there
        assert outcome in (Outcome.DAMAGED, Outcome.MISS), (at, bit)
        # Dropped, or another store's and replaced.
        assert outcome == Outcome.MISS or path not in disk.files()
        assert host.write([1]) == [Outcome.STORED]
        assert host.read([1]) == [Outcome.HIT]
        host.seconds += WINDOW_SECONDS / DROPS
    assert host.tier.status().notes == ()
    host.tier.close()
    assert leftovers(disk) == []


def test_whoever_has_no_key_can_not_make_a_record_that_is_served(tmp_path: Path) -> None:
    scope = SCOPES["key"]
    disk = MemoryDisk()
    host = Host(tmp_path / "store", disk, scope=scope)
    host.write([1])
    (path,) = (path for path in disk.files() if path.endswith(".safetensors"))
    plain = RecordFormat(scope.namespace, scope.geometries[0])
    other = RecordFormat(scope.namespace, scope.geometries[0], RecordKey("another secret of mine"))
    for forger in (plain, other):
        forged = memoryview(bytearray(sealed_record(scope, ADDRESS, 99)))
        forger.seal(ADDRESS, forged)
        assert forger.verify(ADDRESS, forged) == Outcome.HIT
        disk.files()[path].content[:] = forged
        assert host.read([1]) == [Outcome.DAMAGED]
        assert host.write([1]) == [Outcome.STORED]


def test_the_payload_of_one_authenticated_record_does_not_pass_under_the_page_of_another() -> None:
    scope = SCOPES["key"]
    form = _format(scope)
    one, two = (bytearray(sealed_record(scope, sample_address(n), n)) for n in (1, 2))
    mixed = one[:HEADER_BYTES] + two[HEADER_BYTES:]
    assert form.fault(sample_address(1), memoryview(mixed)) == "checksum"
    renamed = two.replace(sample_address(2).hex().encode(), sample_address(1).hex().encode())
    assert form.fault(sample_address(1), memoryview(renamed)) == "checksum"


def test_a_page_names_the_algorithm_and_the_namespace_the_key() -> None:
    scope = SCOPES["key"]
    header = parse_header(bytes(sealed_record(scope, ADDRESS, 1)[:HEADER_BYTES]))
    assert header.fields["checksum_algorithm"] == KEYED_CHECKSUM
    assert len(header.checksum) == 32
    assert scope.namespace.fields["key_id"] == RecordKey(SECRET).key_id
    assert len(RecordKey(SECRET).key_id) == 16
    assert SCOPES["checksum"].namespace.digest != scope.namespace.digest


def test_the_golden_key_has_this_id_and_this_checksum() -> None:
    assert key_fields(SECRET) == {"key_id": "324d47c111d5f136"}
    header = parse_header(bytes(sealed_record(SCOPES["key"], ADDRESS, 1)[:HEADER_BYTES]))
    assert header.checksum.hex() == "de2b2e98b17975106b196a6ff2cf71caa275cf4f92fc063b9daae92a335b7d4b"


def test_the_record_document_names_the_contexts_of_the_keys() -> None:
    told = (Path(__file__).parent.parent / "docs" / "record.md").read_text()
    source = Path(record_key.__file__).read_text()
    contexts = re.findall(r'_CONTEXT = "(.+)"', source)
    assert len(contexts) == 2
    assert all(f"`{context}`" in told for context in contexts)


def test_the_secret_is_in_no_file_and_in_nothing_that_is_shown(tmp_path: Path) -> None:
    scope = SCOPES["key"]
    disk = MemoryDisk()
    Host(tmp_path / "store", disk, scope=scope).write([1])
    for path, node in disk.files().items():
        assert SECRET not in path
        assert SECRET.encode() not in node.content
    assert SECRET not in repr(scope) + repr(scope.key)
