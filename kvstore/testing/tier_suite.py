"""The promises of a persistent tier as tests: a tier is finished when it passes all of them.

A test module subclasses `TierSuite` and overrides `make_client`. Buffers come filled with 0xA5, so that a byte which
nobody wrote is seen; what is expected is built here, by other means than the tier's own.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore.keys import Namespace
from kvstore.layout import HEADER_BYTES, GroupGeometry, LayerGeometry, RecordGeometry, Shard
from kvstore.messages import Outcome
from kvstore.tiers.base import Scope, Tier
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.record_key import key_fields, record_key

FILL = 0xA5
PATIENCE = 60.0
"""Seconds until the deadline of an operation that is expected to succeed."""


def soon() -> float:
    """A deadline that is not meant to pass."""
    return time.monotonic() + PATIENCE


def sample_geometry(
    layers: int = 3, heads: int = 2, content: int = 24, dtype: str = "bfloat16", shard: Shard | None = None
) -> RecordGeometry:
    """A small record: chunks of two blocks of 16 tokens; with the defaults its payload needs a pad."""
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}.get(dtype, 1)
    page = heads * 16 * content * itemsize
    rows = tuple(LayerGeometry(f"layer.{i}", dtype, "HTC", (heads, 16, content), page) for i in range(layers))
    return RecordGeometry(GroupGeometry(0, "full_attention", 16, "HTC", rows), 32, shard or Shard())


def sample_scope(
    model: str = "suite/model", geometry: RecordGeometry | None = None, secret: str | None = None
) -> Scope:
    """A scope of one group; another ``model`` is another namespace. With a ``secret``, of authenticated records."""
    geometry = geometry or sample_geometry()
    fields = {"model": model, "groups": [geometry.group.identity()], **key_fields(secret)}
    return Scope(Namespace(fields), (geometry,), record_key(secret))


def aligned_buffer(size: int) -> memoryview:
    """``size`` writable bytes at a multiple of 4096, filled with 0xA5."""
    buffer = memoryview(mmap.mmap(-1, size))
    np.frombuffer(buffer, np.uint8)[:] = FILL
    return buffer


def sample_address(number: int) -> bytes:
    """The 32-byte address number ``number``; evenly spread as real ones are."""
    return hashlib.sha256(b"suite %d" % number).digest()


def sealed_record(scope: Scope, address: bytes, seed: int) -> memoryview:
    """A whole record with a random payload, in an aligned buffer."""
    geometry = scope.geometries[0]
    buffer = aligned_buffer(geometry.slot_bytes)
    payload = np.random.default_rng(seed).integers(0, 256, geometry.payload_bytes, dtype=np.uint8)
    np.frombuffer(buffer, np.uint8)[HEADER_BYTES : HEADER_BYTES + payload.size] = payload
    RecordFormat(scope.namespace, geometry, scope.key).seal(address, buffer)
    return buffer


class TierSuite:
    """Tests of one kind of tier. Override `make_client`; every test opens its clients through `opened`."""

    def make_client(self, place: Any, writer: bool = True) -> Tier:
        """A new client, as ``TierType.make`` makes it, of the store at ``place`` (a fixture of the test module)."""
        raise NotImplementedError

    @contextmanager
    def opened(self, place: Any, scope: Scope | None = None, writer: bool = True) -> Iterator[Tier]:
        """A client that is attached and uses the published epoch; closed at the end."""
        tier = self.make_client(place, writer)
        try:
            tier.attach(scope or sample_scope())
            tier.use_epoch(tier.published_epoch())
            yield tier
        finally:
            tier.close()

    def filled(self, tier: Tier, numbers: Iterable[int], scope: Scope | None = None) -> dict[bytes, memoryview]:
        """Stores records; what was stored by address, as copies that the tier never saw."""
        scope = scope or sample_scope()
        records = {sample_address(n): sealed_record(scope, sample_address(n), n) for n in numbers}
        assert tier.write(list(records), list(records.values()), soon()) == [Outcome.STORED] * len(records)
        return {address: memoryview(bytes(buffer)) for address, buffer in records.items()}

    def read_back(
        self, tier: Tier, addresses: Sequence[bytes], scope: Scope | None = None
    ) -> tuple[list[Outcome], list[memoryview]]:
        """Reads into fresh buffers."""
        size = (scope or sample_scope()).geometries[0].slot_bytes
        buffers = [aligned_buffer(size) for _ in addresses]
        return tier.read(addresses, buffers, soon()), buffers

    def test_what_was_stored_is_read_bit_for_bit(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, range(9))
            outcomes, buffers = self.read_back(tier, list(stored))
            assert outcomes == [Outcome.HIT] * 9
            assert [bytes(b) for b in buffers] == [bytes(b) for b in stored.values()]

    def test_writing_does_not_change_the_buffer(self, place: Any) -> None:
        with self.opened(place) as tier:
            buffer = sealed_record(sample_scope(), sample_address(1), 1)
            before = bytes(buffer)
            tier.write([sample_address(1)], [buffer], soon())
            assert bytes(buffer) == before

    def test_what_was_never_stored_is_a_miss(self, place: Any) -> None:
        with self.opened(place) as tier:
            assert self.read_back(tier, [sample_address(1)])[0] == [Outcome.MISS]
            assert tier.contains([sample_address(1)], soon()) == [Outcome.MISS]
            assert tier.delete([sample_address(1)]) == [Outcome.MISS]
            assert list(tier.scan()) == []

    def test_outcomes_have_the_order_of_the_addresses(self, place: Any) -> None:
        with self.opened(place) as tier:
            self.filled(tier, [2, 4])
            asked = [sample_address(n) for n in (1, 2, 3, 4)]
            expected = [Outcome.MISS, Outcome.HIT, Outcome.MISS, Outcome.HIT]
            assert tier.contains(asked, soon()) == expected
            assert self.read_back(tier, asked)[0] == expected

    def test_deleted_is_gone_and_the_rest_stays(self, place: Any) -> None:
        with self.opened(place) as tier:
            self.filled(tier, range(3))
            assert tier.delete([sample_address(1), sample_address(7)]) == [Outcome.HIT, Outcome.MISS]
            outcomes, _ = self.read_back(tier, [sample_address(n) for n in range(3)])
            assert outcomes == [Outcome.HIT, Outcome.MISS, Outcome.HIT]

    def test_scan_has_every_address_once(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, range(40))
            found = [address for batch in tier.scan() for address in batch]
            assert sorted(found) == sorted(stored)

    def test_scan_may_be_stopped(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, range(20))
            first = next(iter(tier.scan()))
            assert set(first) <= set(stored)
            assert sorted(a for batch in tier.scan() for a in batch) == sorted(stored)

    def test_a_restart_finds_everything(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, range(5))
        with self.opened(place) as tier:
            assert sorted(a for batch in tier.scan() for a in batch) == sorted(stored)
            outcomes, buffers = self.read_back(tier, list(stored))
            assert outcomes == [Outcome.HIT] * 5
            assert [bytes(b) for b in buffers] == [bytes(b) for b in stored.values()]

    def test_two_clients_see_each_others_records(self, place: Any) -> None:
        with self.opened(place) as one, self.opened(place, writer=False) as other:
            assert one.published_epoch() == other.published_epoch()
            stored = self.filled(one, range(3))
            assert other.contains(list(stored), soon()) == [Outcome.HIT] * 3
            assert self.read_back(other, list(stored))[0] == [Outcome.HIT] * 3

    def test_another_namespace_has_its_own_records(self, place: Any) -> None:
        theirs = sample_scope("suite/another")
        with self.opened(place) as one, self.opened(place, theirs) as other:
            stored = self.filled(one, range(3))
            assert other.contains(list(stored), soon()) == [Outcome.MISS] * 3
            assert self.read_back(other, list(stored), theirs)[0] == [Outcome.MISS] * 3
            assert list(other.scan()) == []
            assert other.delete(list(stored)) == [Outcome.MISS] * 3
            assert self.read_back(one, list(stored))[0] == [Outcome.HIT] * 3

    def test_authenticated_records_are_read_with_their_key_only(self, place: Any) -> None:
        keyed = sample_scope(secret="0123456789abcdef")
        with self.opened(place, keyed) as one:
            stored = self.filled(one, range(3), keyed)
            outcomes, buffers = self.read_back(one, list(stored), keyed)
            assert outcomes == [Outcome.HIT] * 3
            assert [bytes(b) for b in buffers] == [bytes(b) for b in stored.values()]
        for scope in (sample_scope(), sample_scope(secret="0123456789abcdeF")):
            with self.opened(place, scope) as other:
                assert other.contains(list(stored), soon()) == [Outcome.MISS] * 3
                assert self.read_back(other, list(stored), scope)[0] == [Outcome.MISS] * 3

    def test_another_shard_has_its_own_records(self, place: Any) -> None:
        mine = sample_scope(geometry=sample_geometry(shard=Shard(0, 2)))
        theirs = sample_scope(geometry=sample_geometry(shard=Shard(1, 2)))
        with self.opened(place, mine) as one, self.opened(place, theirs) as other:
            stored = self.filled(one, range(2), mine)
            assert self.read_back(other, list(stored), theirs)[0] == [Outcome.MISS] * 2

    def test_another_epoch_has_its_own_records(self, place: Any) -> None:
        with self.opened(place) as tier:
            published = tier.published_epoch()
            stored = self.filled(tier, range(2))
            tier.use_epoch("0123456789abcdef")
            assert self.read_back(tier, list(stored))[0] == [Outcome.MISS] * 2
            tier.use_epoch(published)
            assert self.read_back(tier, list(stored))[0] == [Outcome.HIT] * 2

    def test_the_epoch_stays_over_a_restart(self, place: Any) -> None:
        with self.opened(place) as tier:
            published = tier.published_epoch()
            assert len(published) == 16
            assert int(published, 16) >= 0
        with self.opened(place) as tier:
            assert tier.published_epoch() == published

    def test_publishing_another_epoch_lets_everyone_start_anew(self, place: Any) -> None:
        with self.opened(place) as one, self.opened(place, writer=False) as other:
            old = one.published_epoch()
            stored = self.filled(one, range(2))
            other.publish_epoch("0123456789abcdef")
            assert one.published_epoch() == other.published_epoch() == "0123456789abcdef" != old
            assert other.contains(list(stored), soon()) == [Outcome.HIT] * 2, "a client stays where it is"
        with self.opened(place) as tier:
            assert self.read_back(tier, list(stored))[0] == [Outcome.MISS] * 2

    def test_collecting_leaves_what_is_published_and_what_a_client_writes_in(self, place: Any) -> None:
        with self.opened(place) as one, self.opened(place) as other:
            stored = self.filled(one, range(2))
            other.use_epoch("0123456789abcdef")
            private = self.filled(other, range(2, 4))
            for _ in range(3):
                assert one.collect(1000) == other.collect(1000) == 0
            assert self.read_back(one, list(stored))[0] == [Outcome.HIT] * 2
            assert self.read_back(other, list(private))[0] == [Outcome.HIT] * 2

    def test_storing_twice_is_stored_and_changes_nothing(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, [1])
            self.filled(tier, [1])
            outcomes, buffers = self.read_back(tier, list(stored))
            assert outcomes == [Outcome.HIT]
            assert bytes(buffers[0]) == bytes(stored[sample_address(1)])

    def test_storing_after_a_delete_works(self, place: Any) -> None:
        with self.opened(place) as tier:
            self.filled(tier, [1])
            tier.delete([sample_address(1)])
            stored = self.filled(tier, [1])
            assert self.read_back(tier, list(stored))[0] == [Outcome.HIT]

    def test_a_passed_deadline_is_a_timeout_and_stores_nothing(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, [1])
            asked = [*stored, sample_address(2)]
            size = sample_scope().geometries[0].slot_bytes
            past = time.monotonic() - 1
            assert tier.contains(asked, past) == [Outcome.TIMEOUT] * 2
            assert tier.read(asked, [aligned_buffer(size), aligned_buffer(size)], past) == [Outcome.TIMEOUT] * 2
            late = sealed_record(sample_scope(), sample_address(2), 2)
            assert tier.write([sample_address(2)], [late], past) == [Outcome.TIMEOUT]
            assert self.read_back(tier, asked)[0] == [Outcome.HIT, Outcome.MISS]

    def test_an_empty_batch_is_an_empty_answer(self, place: Any) -> None:
        with self.opened(place) as tier:
            assert tier.contains([], soon()) == []
            assert tier.read([], [], soon()) == []
            assert tier.write([], [], soon()) == []
            assert tier.delete([]) == []
            tier.touch([])

    def test_touching_changes_no_record(self, place: Any) -> None:
        with self.opened(place) as tier:
            stored = self.filled(tier, range(3))
            tier.touch([*stored, sample_address(9)])
            outcomes, buffers = self.read_back(tier, list(stored))
            assert outcomes == [Outcome.HIT] * 3
            assert [bytes(b) for b in buffers] == [bytes(b) for b in stored.values()]

    def test_nothing_was_evicted_where_there_is_room(self, place: Any) -> None:
        with self.opened(place) as tier:
            self.filled(tier, range(3))
            assert tier.take_evicted() == []

    def test_closing_twice_is_closing(self, place: Any) -> None:
        with self.opened(place) as tier:
            self.filled(tier, [1])
            tier.close()
            tier.close()
            assert tier.contains([sample_address(1)], soon()) == [Outcome.UNAVAILABLE]
            assert self.read_back(tier, [sample_address(1)])[0] == [Outcome.UNAVAILABLE]

    def test_a_record_is_kept_whatever_its_size(self, place: Any) -> None:
        for layers, content in ((1, 1), (1, 64), (2, 64), (7, 23)):
            geometry = sample_geometry(layers=layers, content=content)
            scope = sample_scope(f"suite/size-{layers}-{content}", geometry)
            with self.opened(place, scope) as tier:
                stored = self.filled(tier, range(2), scope)
                outcomes, buffers = self.read_back(tier, list(stored), scope)
                assert outcomes == [Outcome.HIT] * 2
                assert [bytes(b) for b in buffers] == [bytes(b) for b in stored.values()]
