"""The first rows of each key, counted across several lots of rows, equal those counted in plain
Python.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointMismatchError
from penstock.limits.per_key import KeyCounts

KEYS = st.tuples(
    st.sampled_from(["a", "b", "ä", None]), st.sampled_from([0.0, -0.0, float("nan"), 1.5, None])
)
LOTS = st.lists(st.lists(KEYS, min_size=1, max_size=12), max_size=5)


def test_columns_without_values_are_refused() -> None:
    """They could claim any number of rows."""
    sound = KeyCounts.empty([pa.array(["a"])])
    assert KeyCounts.from_bytes(sound.to_bytes()).table.num_rows == 0
    for names in (["key_0", "count", "last"], ["key_0"]):
        bad = KeyCounts(pa.table({name: pa.nulls(1 << 20) for name in names}))
        with pytest.raises(CheckpointMismatchError, match="the state of the limit is malformed"):
            KeyCounts.from_bytes(bad.to_bytes())


def columns(lot: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([row[0] for row in lot], pa.string()), pa.array([row[1] for row in lot], pa.float64())]


def plain(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Spark groups every NaN together, and both zeros."""
    return key[0], None if key[1] is None else str(key[1] + 0.0)


@given(LOTS, st.integers(1, 3))
def test_the_first_rows_of_each_key_pass_once_across_all_lots(lots: list[list[Any]], rows: int) -> None:
    seen, counts = KeyCounts.empty(columns([])), Counter()
    for lot in lots:
        seen = KeyCounts.from_bytes(seen.to_bytes())
        passes, seen = seen.take(columns(lot), rows, 0)
        for row, passed in zip(lot, passes.tolist(), strict=True):
            key = repr(plain(row))
            assert passed == (counts[key] < rows)
            counts[key] += 1
    assert seen.table.num_rows == len(counts)


def test_a_key_is_forgotten_after_a_while_without_rows() -> None:
    both, first, second = (pa.array(keys) for keys in (["a", "b"], ["a"], ["a", "b"]))
    _, seen = KeyCounts.empty([both]).take([both], 1, 1_000)
    passes, seen = seen.since(1_000, 2_000).take([first], 1, 2_000)
    assert passes.tolist() == [False], "it is not forgotten yet"
    passes, _ = seen.since(1_001, 3_000).take([second], 1, 3_000)
    assert passes.tolist() == [False, True], (
        "a row that did not pass kept the first key, and nothing the other one"
    )


def test_keys_counted_without_expiry_start_to_expire_when_it_is_set() -> None:
    rows = pa.array(["a"])
    _, seen = KeyCounts.empty([rows]).take([rows], 1, 0)
    dated = seen.since(4_000, 5_000)
    passes, _ = dated.take([rows], 1, 5_000)
    assert passes.tolist() == [False], "its first row has passed"
    passes, _ = dated.since(5_001, 6_000).take([rows], 1, 6_000)
    assert passes.tolist() == [True]


def test_a_higher_limit_continues_from_the_count() -> None:
    rows = pa.array(["a"] * 3)
    _, seen = KeyCounts.empty([rows]).take([rows], 2, 0)
    passes, seen = seen.take([rows], 4, 0)
    assert passes.tolist() == [True, True, False]
    passes, _ = seen.take([rows], 1, 0)
    assert not passes.any()


@pytest.mark.parametrize(
    ("narrow", "wide", "known", "new"),
    [
        (pa.int32(), pa.int64(), 7, 3_000_000_000),
        (pa.float32(), pa.float64(), 0.5, 0.1),
        (pa.decimal128(4, 2), pa.decimal128(12, 2), Decimal("7.00"), Decimal("123456789.00")),
    ],
)
def test_keys_of_a_widened_column_keep_their_counts(
    narrow: pa.DataType, wide: pa.DataType, known: object, new: object
) -> None:
    before, after = pa.array([known], narrow), pa.array([known, new], wide)
    _, seen = KeyCounts.empty([before]).take([before], 1, 0)
    passes, seen = KeyCounts.from_bytes(seen.to_bytes()).take([after], 1, 0)
    assert passes.tolist() == [False, True]
    passes, seen = KeyCounts.from_bytes(seen.to_bytes()).take([before], 1, 0)
    assert (passes.tolist(), seen.table.schema.field(0).type) == ([False], wide)


@pytest.mark.parametrize(
    "now",
    [
        [pa.array(["1"])],
        [pa.array([1.0])],
        [pa.array([True])],
        [pa.array([1]), pa.array([1])],
    ],
)
def test_keys_of_another_type_are_refused(now: list[pa.Array]) -> None:
    """Their hashes differ, so they would be counted from the start."""
    before = [pa.array([1])]
    _, seen = KeyCounts.empty(before).take(before, 1, 0)
    with pytest.raises(CheckpointMismatchError, match="counted rows by a key of the type int64") as refused:
        seen.take(now, 1, 0)
    assert refused.value.condition == "CHECKPOINT_MISMATCH.LIMIT_PER"
