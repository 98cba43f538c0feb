"""Columns of integers that are packed into bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.int_columns import count_rows, pack_columns, sort_by_first, unpack_columns

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TABLES = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=5), max_size=4)


def columns_of(rows: list[tuple[int, int, int]]) -> list[list[int]]:
    return [[row[place] for row in rows] for place in range(3)]


@given(TABLES)
def test_unpacking_concatenates_the_rows_of_packed_columns(tables: list[list[tuple[int, int, int]]]) -> None:
    packed = [pack_columns(columns_of(rows)) for rows in tables]
    assert [count_rows(each, 3) for each in packed] == [len(rows) for rows in tables]
    assert unpack_columns(packed, 3) == columns_of([row for rows in tables for row in rows])


@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, NUMBERS), max_size=9))
def test_sorting_by_the_first_column_is_stable(rows: list[tuple[int, int, int]]) -> None:
    assert sort_by_first(columns_of(rows)) == columns_of(sorted(rows, key=lambda row: row[0]))
