"""Quantities: a unit is required, nonsense is refused with an example, and what is shown is what is meant."""

from __future__ import annotations

import pytest

from kvstore.units import (
    GIB,
    align_up,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("512MiB", 512 * 2**20),
        ("0.5GiB", 536870912),
        ("4096B", 4096),
        ("1 TiB", 2**40),
        ("0", 0),
        (0, 0),
    ],
)
def test_a_size_is_its_number_times_its_unit(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [0.5, 5, "5", "1e3", -1, "-1GiB", "five", float("nan"), float("inf"), "5 G B", True, None, "5gib", "0.3B", ""],
)
def test_a_size_without_a_unit_or_sense_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("2s", 2), ("1.5m", 90), ("1h", 3600), ("7d", 604800), ("10us", 1e-5), (0, 0)],
)
def test_a_duration_is_its_number_times_its_unit(text: object, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", [1, 0.25, "1", "5GiB", "1 minute", "-1s", False])
def test_a_duration_without_a_unit_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="250ms"):
        parse_seconds(text)


def test_a_fraction_is_a_percentage_below_all_of_it() -> None:
    assert parse_fraction("5%") == 0.05
    assert parse_fraction(0) == 0
    for text in (0.05, "0.05", 5, "5ms", True):
        with pytest.raises(ValueError, match="5%"):
            parse_fraction(text)
    with pytest.raises(ValueError, match="below 100%"):
        parse_fraction("100%")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1020 * 1024, "1020 KiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (20 * GIB, "20.0 GiB"),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_bytes_are_shown_with_three_digits_and_no_exponent(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2, "2.00 s"), (0.25, "250 ms"), (0.02, "20.0 ms"), (0.9999, "1000 ms"), (5e-6, "5.00 us")]
)
def test_seconds_are_shown_with_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_alignment_goes_up_to_the_next_multiple() -> None:
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert align_up(7, 3) == 9
