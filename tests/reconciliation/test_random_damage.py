"""What is found is what was damaged, for random rows, damage and ranges; a repair undoes all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.postgres_source import Source
from tests.support.reconciled import KINDS, CopiedTable, copied_table

_TEXTS = st.none() | st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=8
)
_ROWS = st.dictionaries(
    st.tuples(st.integers(-9, 9), st.sampled_from(["a", "B", "é", ""])), _TEXTS, max_size=25
)


@pytest.fixture
def keyed(source: Source, tmp_path: Path) -> Iterator[dict[str, CopiedTable]]:
    table = source.table("n int, k text, v text, PRIMARY KEY (n, k)", "t")
    with (
        copied_table(source, table, "postgresql", tmp_path) as first,
        copied_table(source, table, "sqlite", tmp_path) as second,
        copied_table(source, table, "delta", tmp_path) as third,
    ):
        yield dict(zip(KINDS, (first, second, third), strict=True))


def literal(value: str | None) -> str:
    return "NULL" if value is None else "'" + value.replace("'", "''") + "'"


def fill(run: Callable[..., object], name: str, rows: dict[tuple[int, str], str | None]) -> None:
    run(f"DELETE FROM {name}")
    values = [f"({n}, {literal(k)}, {literal(v)})" for (n, k), v in rows.items()]
    if values:
        run(f"INSERT INTO {name} VALUES {', '.join(values)}")


def fill_copy(made: CopiedTable, rows: dict[tuple[int, str], str | None]) -> None:
    if made.kind != "delta":
        fill(made.run, "COPY", rows)
        return
    made.delete("true")
    if rows:
        made.insert([{"n": n, "k": k, "v": v} for (n, k), v in rows.items()])


@pytest.mark.parametrize("kind", KINDS)
def test_the_differences_are_the_damage(keyed: dict[str, CopiedTable], kind: str) -> None:
    made = keyed[kind]

    @settings(max_examples=40 if kind != "delta" else 15, suppress_health_check=list(HealthCheck))
    @given(source=_ROWS, copy=_ROWS, size=st.integers(1, 30), common=st.booleans())
    def check(source: Any, copy: Any, size: int, common: bool) -> None:
        if common:
            copy = {**source, **dict(list(copy.items())[:3])}
        fill(made.source.run, made.table, source)
        fill_copy(made, copy)
        expected = dict.fromkeys(source.keys() - copy.keys(), "missing")
        expected |= dict.fromkeys(copy.keys() - source.keys(), "extra")
        expected |= {key: "different" for key in source.keys() & copy.keys() if source[key] != copy[key]}
        found = made.compare(range_rows=size, most_rows=100)
        assert {(row.key["n"], row.key["k"]): row.kind for row in found.differing_rows} == expected
        assert found.equal == (not expected)
        assert (found.rows, found.copy_rows) == (len(source), len(copy))
        by_range = [(each.missing, each.extra, each.different) for each in found.differing_ranges]
        totals = tuple(map(sum, zip(*by_range, strict=True))) if by_range else (0, 0, 0)
        assert totals == (found.missing, found.extra, found.different)
        repaired = made.compare(range_rows=size, repair=True)
        assert repaired.repaired == len(expected)
        assert {(n, k): v for n, k, v in made.rows("n, k, v")} == source

    check()
