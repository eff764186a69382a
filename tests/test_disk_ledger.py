"""The ledger: known at once, exact after whatever happens to it, never waited for without a bound."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_faults import NEVER, SCOPE, SLOT, Bench, read, write

from kvstore.messages import Outcome
from kvstore.testing.tier_suite import sample_address, sealed_record
from kvstore.tiers.disk_members import with_checksum
from kvstore.tiers.disk_pause import RETRY_SECONDS
from kvstore.tiers.disk_room import CENSUS_INTERVAL, HINT_INTERVAL, SEARCH_INTERVAL


@contextmanager
def lock_held(bench: Bench) -> Iterator[None]:
    """Somebody who was stopped holds the lock of the ledger."""
    fd = os.open(bench.root / ".ledger", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def scans(bench: Bench) -> list[int]:
    """A list that grows by one whenever a directory is listed."""
    seen: list[int] = []
    real = bench.calls.scandir

    def scandir(fd: int) -> Iterator[os.DirEntry[str]]:
        seen.append(fd)
        return real(fd)

    bench.calls.scandir = scandir  # type: ignore[method-assign]
    return seen


def exact(bench: Bench) -> bool:
    status = bench.open().status()
    return (status.used_bytes, status.records) == (bench.used_bytes(), len(bench.records()))


def test_what_is_used_is_known_at_once_after_a_clean_end_and_nothing_is_listed(bench: Bench) -> None:
    tier = bench.open()
    write(tier, range(9))
    tier.close()
    seen = scans(bench)
    assert exact(bench)
    assert len(seen) <= 2  # the root, by who checks it and by who looks for the dead


def test_a_client_sees_what_another_wrote(bench: Bench) -> None:
    one, other = bench.open(), bench.open()
    write(one, range(3))
    write(other, range(3, 5))
    assert one.status().used_bytes == other.status().used_bytes == bench.used_bytes()


def test_a_client_that_writes_nothing_takes_no_part_in_the_ledger(bench: Bench) -> None:
    write(bench.open(), range(3))
    bench.close()
    before = sorted(p.name for p in bench.root.iterdir())
    for options in ({"writer": False}, {"writer": True}):
        bench.read_only = options["writer"]
        tier = bench.open(writer=options["writer"])
        assert tier.status().used_bytes is None
        tier.measure()
        assert tier.status().used_bytes == bench.used_bytes()
    assert sorted(p.name for p in bench.root.iterdir()) == before


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, 50)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _another_boot(path: Path) -> None:
    fields = bytearray(path.read_bytes()[:-16])
    fields[8:24] = bytes(16)
    path.write_bytes(with_checksum(bytes(fields)))


def _another_format(path: Path) -> None:
    path.write_bytes(with_checksum(b"kvledg9\n" + path.read_bytes()[8:-16]))


BROKEN: dict[str, Callable[[Path], None]] = {
    "flipped": _flip,
    "truncated": _truncate,
    "of another boot": _another_boot,
    "of another format": _another_format,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_ledger_that_can_not_be_believed_is_not_and_all_is_counted_anew(bench: Bench, how: str) -> None:
    write(bench.open(), range(5))
    bench.close()
    BROKEN[how](bench.root / ".ledger")
    tier = bench.open()
    assert tier.status().used_bytes is None
    tier.measure()
    assert tier.status().used_bytes == bench.used_bytes() == 5 * SLOT
    tier.close()
    assert exact(bench)


def test_a_copy_of_a_store_is_counted_anew(bench: Bench) -> None:
    write(bench.open(), range(5))
    bench.close()
    copy = Bench(bench.root.with_name("copy"))
    shutil.copytree(bench.root, copy.root)
    tier = copy.open()
    assert tier.status().used_bytes is None
    assert write(tier, [9]) == [Outcome.STORED]
    assert tier.status().used_bytes == copy.used_bytes()
    copy.close()


def test_containers_that_see_different_boots_believe_each_other(bench: Bench) -> None:
    one = bench.open()
    write(one, range(3))
    _another_boot(bench.root / ".ledger")
    seen = scans(bench)
    write(bench.open(), [3])
    assert len(seen) <= 4  # no record was counted
    assert exact(bench)


@pytest.mark.parametrize("thing", ["directory", "link", "fifo"])
def test_what_is_no_ledger_of_ours_stops_writing_and_stays(bench: Bench, thing: str) -> None:
    write(bench.open(), [1])
    bench.close()
    path = bench.root / ".ledger"
    path.unlink()
    {"directory": path.mkdir, "link": lambda: path.symlink_to("x"), "fifo": lambda: os.mkfifo(path)}[thing]()
    tier = bench.open()
    assert write(tier, [2]) == [Outcome.UNAVAILABLE]
    assert read(tier, [1]) == [Outcome.HIT]
    assert path.is_symlink() or path.exists()


@pytest.mark.parametrize("claimed", [0, 5 * SLOT])
def test_the_file_of_a_dead_client_is_removed_and_what_it_claimed_is_free_again(bench: Bench, claimed: int) -> None:
    write(bench.open(), range(3))
    bench.close()
    dead = bench.root / f".inflight-{'0' * 16}"
    dead.write_bytes(with_checksum(b"kvmemb1\n" + (10 * SLOT).to_bytes(8, "little") + claimed.to_bytes(8, "little")))
    seen = scans(bench)
    tier = bench.open()
    assert not dead.exists()
    tier.measure()
    assert (len(seen) > 4) == (claimed > 0)
    assert tier.status().used_bytes == bench.used_bytes()


def test_an_unknown_file_of_a_dead_client_is_counted_for(bench: Bench) -> None:
    write(bench.open(), range(3))
    bench.close()
    (bench.root / f".inflight-{'0' * 16}").write_bytes(b"?")
    tier = bench.open()
    assert tier.status().used_bytes is None
    tier.measure()
    assert tier.status().used_bytes == bench.used_bytes()


def test_the_smallest_capacity_of_all_who_live_holds_and_ends_with_its_client(bench: Bench) -> None:
    bench.capacity = 10 * SLOT
    large = bench.open()
    assert write(large, range(10)) == [Outcome.STORED] * 10
    bench.capacity = 4 * SLOT
    small = bench.open()
    assert write(large, [20]) == [Outcome.STORED]
    assert len(bench.records()) == 4
    small.close()
    assert write(large, range(30, 34)) == [Outcome.STORED] * 4
    assert len(bench.records()) == 8
    assert large.status().used_bytes == bench.used_bytes()


def test_a_client_that_was_killed_holds_nobody_to_its_capacity(bench: Bench) -> None:
    bench.capacity = 10 * SLOT
    large = bench.open()
    write(large, range(4))
    bench.capacity = 4 * SLOT
    small = bench.open()
    write(large, [4])
    assert len(bench.records()) == 4
    small._space._member.let_go()  # the kernel drops the lock with the process
    bench.seconds += CENSUS_INTERVAL
    assert write(large, [5, 6]) == [Outcome.STORED] * 2
    assert len(bench.records()) == 6


def test_a_lower_capacity_shrinks_the_store_at_the_next_start(bench: Bench) -> None:
    write(bench.open(), range(100))
    bench.close()
    bench.capacity = 7 * SLOT
    tier = bench.open()
    tier.measure()
    assert tier.status().used_bytes == bench.used_bytes() == 7 * SLOT
    assert sum(len(addresses) for _epoch, addresses in tier.take_evicted()) == 93


def test_a_lock_that_is_never_freed_stops_writing_and_serving_goes_on(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    with lock_held(bench):
        assert write(tier, [2]) == [Outcome.UNAVAILABLE]
        assert bench.counters.value("tier_errors_total", tier="disk", reason="ledger_locked") == 1
        assert write(tier, [3]) == [Outcome.SKIPPED]
        assert read(tier, [1]) == [Outcome.HIT]
        assert tier.delete([sample_address(1)]) == [Outcome.UNAVAILABLE]
        assert tier.status().notes == ("not writing: ledger_locked",)
        assert tier.status().used_bytes == SLOT
    bench.seconds += RETRY_SECONDS
    assert write(tier, [2]) == [Outcome.STORED]
    assert exact(bench)


def test_a_deadline_ends_the_wait_for_the_lock(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    record = sealed_record(SCOPE, sample_address(2), 2)
    with lock_held(bench):
        before = bench.seconds
        assert tier.write([sample_address(2)], [record], before + 0.05) == [Outcome.TIMEOUT]
        assert bench.seconds < before + 0.1
    assert tier.status().notes == ()
    assert write(tier, [2]) == [Outcome.STORED]


def test_a_claim_that_could_not_be_given_back_is_given_back_later(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    bench.calls.fail["write"] = errno.EIO
    held = lock_held(bench)
    bench.calls.before["write"] = held.__enter__
    assert write(tier, [2]) == [Outcome.UNAVAILABLE]
    assert tier.status().used_bytes == 2 * SLOT
    held.__exit__(None, None, None)
    bench.calls.fail.clear()
    bench.calls.before.clear()
    bench.seconds += RETRY_SECONDS
    assert write(tier, [3]) == [Outcome.STORED]
    assert tier.status().used_bytes == bench.used_bytes() == 2 * SLOT
    tier.close()
    assert exact(bench)


def test_a_damaged_record_is_never_waited_for_and_dropped_by_a_later_read(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    bench.record(sample_address(1)).write_bytes(bytes(SLOT))
    with lock_held(bench):
        assert read(tier, [1]) == [Outcome.DAMAGED]
        assert len(bench.records()) == 1
    assert read(tier, [1]) == [Outcome.DAMAGED]
    assert bench.records() == []
    assert tier.status().used_bytes == 0


def test_the_account_is_made_anew_if_it_is_removed_while_clients_run(bench: Bench) -> None:
    one, other = bench.open(), bench.open()
    write(one, range(3))
    for path in [bench.root / ".ledger", *bench.root.glob(".inflight-*")]:
        path.unlink()
    assert write(other, [3]) == [Outcome.STORED]
    assert write(one, [4]) == [Outcome.STORED]
    assert one.status().used_bytes == other.status().used_bytes == bench.used_bytes()
    bench.close()
    assert bench.leftovers() == []


@pytest.mark.parametrize("others_remove", [False, True])
def test_a_victim_that_is_gone_is_either_accounted_for_or_noticed(bench: Bench, others_remove: bool) -> None:
    bench.capacity = 8 * SLOT
    tier = bench.open()
    write(tier, range(8))
    assert write(tier, [8]) == [Outcome.STORED]  # now victims are known
    gone = [n for n in range(8) if read(tier, [n]) == [Outcome.HIT]][-4:]  # the tail is the oldest
    if others_remove:
        bench.open().delete([sample_address(n) for n in gone])
    else:
        for number in gone:
            bench.record(sample_address(number)).unlink()
    seen = scans(bench)
    assert write(tier, range(20, 25)) == [Outcome.STORED] * 5
    assert len(bench.records()) == 8
    assert tier.status().used_bytes == bench.used_bytes()
    assert (len(seen) > 8) == (not others_remove)


@pytest.mark.parametrize("sign", ["age", "misses"])
def test_records_that_vanish_though_they_are_no_victims_are_noticed(bench: Bench, sign: str) -> None:
    bench.capacity = 2000 * SLOT
    tier = bench.open()
    bench.capacity = 8 * SLOT
    write(tier, range(8))
    other = bench.open()
    write(other, [8])
    young = [n for n in range(9) if read(tier, [n]) == [Outcome.HIT]]
    victims = other._space._room._victims
    del victims._heap[2:]  # as if the store were much larger than what one search finds
    for number in range(3, 9):
        if number in young:
            bench.record(sample_address(number)).unlink()
    if sign == "age":
        bench.seconds += SEARCH_INTERVAL + 1
    else:
        bench.seconds += HINT_INTERVAL + 1
        read(other, range(3, 9))
    left = len(bench.records())
    assert write(other, [30]) == [Outcome.STORED]
    assert len(bench.records()) == left + 1
    assert other.status().used_bytes == bench.used_bytes()


def test_a_record_that_was_put_there_from_outside_is_noticed_by_the_next_search(bench: Bench) -> None:
    bench.capacity = 8 * SLOT
    tier = bench.open()
    write(tier, range(7))
    address = sample_address(7)
    place = bench.record(sample_address(1)).parent.parent / address.hex()[:2]
    place.mkdir(exist_ok=True)
    (place / f"{address.hex()}.safetensors").write_bytes(bytes(sealed_record(SCOPE, address, 7)))
    assert write(tier, [8, 9]) == [Outcome.STORED] * 2
    assert tier.status().used_bytes == bench.used_bytes() <= bench.capacity


def test_a_write_error_of_the_account_itself_leads_to_a_new_count(bench: Bench) -> None:
    tier = bench.open()
    write(tier, [1])
    for call in range(1, 12):
        notes = iter(range(1, 99))

        def fail_one(notes: Iterator[int] = notes, call: int = call) -> None:
            if next(notes) == call:
                raise OSError(errno.EIO, "note")

        bench.calls.before["note"] = fail_one
        write(tier, [100 + call])
        bench.calls.before.clear()
        bench.seconds += RETRY_SECONDS
        assert write(tier, [200 + call]) == [Outcome.STORED]
        assert tier.status().used_bytes == bench.used_bytes()
    tier.close()
    assert exact(bench)
    assert tier.contains([sample_address(1)], NEVER) == [Outcome.UNAVAILABLE]
