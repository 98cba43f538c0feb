"""Taken rows: a list, a table, and how they are displayed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

import penstock


def taken(
    spark: SparkSession, table: pa.Table, asked: int = 3, *, complete: bool = True, seen: int | None = None
) -> penstock.TakeResult:
    frame = spark.createDataFrame(table)
    return penstock.TakeResult.of(frame, [frame.toArrow()], asked, 1.25, complete=complete, seen=seen)


@pytest.fixture(scope="module")
def three(spark: SparkSession) -> penstock.TakeResult:
    table = pa.table(
        {
            "id": [1, 22, None],
            "name": ["<a> & b", "x" * 80, "two\nlines"],
            "at": pa.array([datetime(2026, 1, 1, 12, tzinfo=UTC), None, None], pa.timestamp("us", "UTC")),
        }
    )
    return taken(spark, table)


def test_the_result_is_a_list_of_rows(three: penstock.TakeResult) -> None:
    assert isinstance(three, Sequence)
    assert three[0] == Row(id=1, name="<a> & b", at=datetime(2026, 1, 1, 12, tzinfo=UTC).replace(tzinfo=None))
    assert [row.id for row in three] == [1, 22, None]
    assert [row.id for row in three[1:]] == [22, None]
    assert three[-1].name == "two\nlines"
    assert (len(three), bool(three), three == list(three), three == [1]) == (3, True, True, False)
    assert three[1] in three


def test_the_text_has_aligned_columns_and_a_note(three: penstock.TakeResult) -> None:
    assert str(three) == repr(three)
    lines = str(three).splitlines()
    assert lines[0] == f"  id  {'name':<60}  at"
    assert lines[2] == f"   1  {'<a> & b':<60}  2026-01-01 12:00:00"
    assert lines[3] == f"  22  {'x' * 59}…  null"
    assert lines[4].startswith("null  two\\nlines")
    assert lines[-1] == "(3 rows)"


def test_notebooks_get_a_table_with_escaped_markup(three: penstock.TakeResult) -> None:
    shown = three._repr_html_()
    assert "&lt;a&gt; &amp; b" in shown
    assert "<a>" not in shown
    assert '<th title="int64" style="text-align: right">id</th>' in shown
    assert shown.count("<tr>") == 4
    assert "<p>3 rows</p>" in shown


def test_times_are_shown_in_the_sessions_zone(spark: SparkSession) -> None:
    instants = pa.array([datetime(2026, 7, 1, 12, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    table = pa.table({"at": instants, "nested": pa.StructArray.from_arrays([instants], ["start"])})
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
        shown = str(taken(spark, table)).splitlines()[2]
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert shown == "2026-07-01 14:00:00  {start=2026-07-01 14:00:00}"


def test_many_rows_are_truncated_and_counted(spark: SparkSession) -> None:
    rows = taken(spark, pa.table({"id": list(range(1_234))}), 2_000, complete=False)
    lines = str(rows).splitlines()
    assert len(lines) == 54
    assert lines[-2:] == ["(… 1,184 more)", "(1,234 rows of 2,000: there were no more within 1.25 s)"]
    assert rows._repr_html_().count("<tr>") == 51


def test_a_sample_shows_the_size_of_its_population(spark: SparkSession) -> None:
    assert taken(spark, pa.table({"id": [7]}), seen=1_000).note == "1 row, a sample of 1,000"
