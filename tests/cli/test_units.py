"""Sizes, ages and counts, as typed and as shown."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock.cli.units import age_text, counted, parse_age, parse_count, parse_size, size_text
from penstock.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "rows"),
    [("0", 0), ("1000", 1000), ("1_000", 1000), ("10k", 10_000), ("1.5M", 1_500_000), (" 2G ", 2 * 10**9)],
)
def test_counts(text: str, rows: int) -> None:
    assert parse_count(text, "--retention-rows") == rows


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10),
        ("512MiB", 512 << 20),
        ("1.5 kb", 1500),
        ("7", 7),
        ("7B", 7),
        ("2TiB", 2 << 40),
        ("1tb", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--retention-bytes") == size


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        ("90min", timedelta(minutes=90)),
        ("90m", timedelta(minutes=90)),
        ("1d12h", timedelta(days=1.5)),
        ("1 d 12 h", timedelta(days=1.5)),
        ("1.5h", timedelta(minutes=90)),
        ("2w", timedelta(weeks=2)),
        ("250ms", timedelta(milliseconds=250)),
        ("0s", timedelta(0)),
    ],
)
def test_ages(text: str, age: timedelta) -> None:
    assert parse_age(text, "--retention-age") == age


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "10 GB", "1e3", "٣x", "0.0001k"])
def test_an_invalid_count_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--rows is a whole number"):
        parse_count(text, "--rows")


@pytest.mark.parametrize("text", ["", "big", "10 GX", "-5MB", "1.5B"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--bytes is a size such as"):
        parse_size(text, "--bytes")


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7y", "1d12", "9999999999w"])
def test_an_invalid_age_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--age is a duration such as"):
        parse_age(text, "--age")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (123_456, "123 kB"),
        (999_500, "1.0 MB"),
        (5 * 10**15, "5,000.0 TB"),
    ],
)
def test_sizes_are_shown_with_their_unit(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.234, "1.23 s"), (60, "1 min"), (3_661, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_ages_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
    assert age_text(timedelta(seconds=seconds)) == text


def test_counted_nouns_are_singular_for_one() -> None:
    assert (counted(1, "row"), counted(0, "row"), counted(1234, "row")) == ("1 row", "0 rows", "1,234 rows")
