"""Changes that omit long values which they left unchanged: every kind of table keeps those values."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.errors import InvalidInputError, TableRefusedError
from tests.support.sql_tables import NOW, named, rows

LONG = {
    "text": pa.string(),
    "raw": pa.binary(),
    "list": pa.list_(pa.string()),
    "amount": pa.decimal128(20, 3),
}
SCHEMA = pa.schema(
    [("id", pa.int64()), ("n", pa.int64()), *LONG.items(), ("_unchanged", pa.list_(pa.string()))]
)
CONTRACT = penstock.ChangeContract(
    "id", whole_commits=True, intermediate_changes=True, unchanged="_unchanged"
)
START = datetime(2026, 1, 1, tzinfo=UTC)
Row = dict[str, Any]


def value(name: str, number: int) -> Any:
    text = f"{number}é"
    return {"text": text, "raw": text.encode(), "list": [text, None], "amount": Decimal(number) / 8}[name]


def change(kind: str, number: int, n: int, *unchanged: str, **values: Any) -> Row:
    known = {name: None if name in unchanged else values.get(name, value(name, n)) for name in LONG}
    return {"_change_type": kind, "id": number, "n": n, "_unchanged": list(unchanged) or None, **known}


class Written:
    """A feed, and what a query makes of it."""

    def __init__(self, spark: SparkSession, folder: Path, url: str, scd_type: int) -> None:
        self._spark, self.folder, self._url, self._scd_type = spark, folder, url, scd_type
        self.feed = self._feed("part")
        self.whole = self._feed("whole")
        self._version = 0

    def _feed(self, name: str) -> penstock.QueueFeed:
        self.folder.mkdir(exist_ok=True)
        store = f"sqlite:///{self.folder}/{name}.db"
        penstock.connect(store, create=True).close()
        return penstock.QueueFeed.create("changes", SCHEMA, CONTRACT, store=store)

    def commit(self, *rows: Row, whole: tuple[Row, ...] = ()) -> None:
        """One commit; in ``whole`` the same with all values."""
        self._version += 1
        for feed, found in ((self.feed, rows), (self.whole, whole)):
            if found:
                feed.append_commit(self._version, START + timedelta(seconds=self._version), list(found))

    def run(
        self,
        change: Callable[[DataFrame], DataFrame] = lambda df: df,
        *,
        whole: bool = False,
        sequence_by: str | None = None,
    ) -> None:
        name = "whole" if whole else "part"
        changes = change(penstock.changes.read_stream(self._spark, self.whole if whole else self.feed))
        sink = penstock.TableSink(
            named(self._url, name),
            ["id"],
            self._url,
            apply_changes=True,
            scd_type=self._scd_type,
            sequence_by=sequence_by,
        )
        pipeline = penstock.stream(self._spark, changes).write(sink)
        pipeline.start(checkpoint=self.folder / "checkpoints" / name, trigger=NOW).awaitTermination()

    def rows(self, name: str = "part", columns: str = "*") -> list[tuple[Any, ...]]:
        return rows(self._url, name, columns)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.soak)])
def scd_type(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def written(spark: SparkSession, tmp_path: Path, url: str, scd_type: int) -> Written:
    return Written(spark, tmp_path, url, scd_type)


def test_changes_with_omitted_values_give_the_same_table_as_complete_ones(written: Written) -> None:
    chance, rows = random.Random(7), dict[int, Row]()
    for number in range(1, 31):
        part, whole = [], []
        for key in chance.sample(range(6), 3):
            kind = "insert" if key not in rows else chance.choice(["delete", *["update_postimage"] * 4])
            if kind == "update_postimage":
                left_out = chance.sample(sorted(LONG), chance.randrange(5))
                kept = {name: rows[key][name] for name in left_out}
                whole.append(change(kind, key, number, **kept))
                part.append(change(kind, key, number, *left_out))
            else:
                whole.append(change(kind, key, number))
                part.append(whole[-1])
            rows[key] = whole[-1]
            if kind == "delete":
                del rows[key]
        written.commit(*part, whole=tuple(whole))
        if number in (4, 5, 12, 20):
            written.run()
    written.run()
    written.run(whole=True)
    found = written.rows()
    assert len(found) >= len(rows)
    assert found == written.rows("whole")


@pytest.mark.few(3)
@pytest.mark.parametrize("together", [True, False], ids=["one micro-batch", "late"])
def test_an_omitted_value_is_that_of_the_earlier_changes_that_have_arrived(
    written: Written, together: bool, scd_type: int
) -> None:
    """The order of arrival matters to them: they take what is there, and a late change does not go back to
    those after it."""
    for change_row in (
        change("insert", 1, 1),
        change("update_postimage", 1, 3, "text"),
        change("update_postimage", 1, 2),
    ):
        written.commit(change_row)
        if not together:
            written.run(sequence_by="n")
    if together:
        written.run(sequence_by="n")
    last = (3, "2é" if together else "1é")
    history = [(1, "1é"), (2, "2é"), last] if scd_type == 2 else [last]
    assert sorted(written.rows(columns="n, text")) == history


@pytest.mark.parametrize("scd_type", [1], indirect=True)
def test_columns_may_be_renamed_or_left_out(written: Written) -> None:
    written.commit(change("insert", 1, 1))
    written.commit(change("update_postimage", 1, 2, "text", "raw"))
    written.run(
        lambda df: df.drop("raw", "list", "amount").withColumnsRenamed({"text": "words", "_unchanged": "u"})
    )
    written.commit(change("update_postimage", 1, 3, "text", "raw"))
    written.run(
        lambda df: df.drop("raw", "list", "amount").withColumnsRenamed({"text": "words", "_unchanged": "u"})
    )
    assert written.rows(columns="id, n, words") == [(1, 3, "1é")]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([change("update_postimage", 2, 5, "text")], "no row with the key"),
        ([change("delete", 1, 5), change("insert", 2, 5, "text")], "another key"),
    ],
)
def test_an_omitted_value_that_no_row_has_is_refused_and_nothing_is_written(
    written: Written, rows: list[Row], why: str
) -> None:
    written.commit(change("insert", 1, 1))
    written.run()
    before = written.rows()
    written.commit(*rows)
    with pytest.raises(TableRefusedError, match=rf"'text'.*{why}"):
        written.run()
    assert written.rows() == before


@pytest.mark.parametrize("scd_type", [1], indirect=True)
def test_a_column_computed_from_an_omitted_value_is_refused(written: Written) -> None:
    def upper(df: DataFrame) -> DataFrame:
        return df.withColumn("loud", F.upper("text"))

    written.commit(change("insert", 1, 1))
    written.run(upper)
    written.commit(change("update_postimage", 1, 2))
    written.run(upper)
    written.commit(change("update_postimage", 1, 3, "text"))
    with pytest.raises(TableRefusedError, match="computed columns loud"):
        written.run(upper)
    assert written.rows(columns="id, n, loud") == [(1, 2, "2É")]


@pytest.mark.parametrize("scd_type", [1], indirect=True)
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_user_defined_contract_can_name_omitted_values(written: Written, spark: SparkSession) -> None:
    def with_contract(df: DataFrame) -> DataFrame:
        plain = (
            spark.readStream.format("penstock")
            .option("url", f"sqlite:///{written.folder}/part.db")
            .load("changes")
        )
        return penstock.changes.post_process(plain, CONTRACT)

    written.commit(change("insert", 1, 1))
    written.commit(change("update_postimage", 1, 2, "text"))
    written.run(with_contract)
    assert written.rows(columns="id, n, text") == [(1, 2, "1é")]


@pytest.mark.parametrize("url", ["sqlite", "delta", "iceberg"], indirect=True)
@pytest.mark.parametrize("scd_type", [1], indirect=True)
def test_columns_taken_from_a_feed_of_several_tables(
    written: Written, spark: SparkSession, tmp_path: Path
) -> None:
    """Such a feed has a struct for each of them."""
    note = pa.struct([pa.field("id", pa.int64()), pa.field("text", pa.string()), pa.field("n", pa.int64())])
    names = [("_table", pa.string()), ("_key", pa.string())]
    schema = pa.schema([*names, ("notes", note), ("_unchanged", pa.list_(pa.string()))])
    contract = penstock.ChangeContract(["_table", "_key"], whole_commits=True, unchanged="_unchanged")
    url = f"sqlite:///{tmp_path}/several.db"
    penstock.connect(url, create=True).close()
    feed = penstock.QueueFeed.create("several", schema, contract, store=url)

    def notes(df: DataFrame) -> DataFrame:
        of_all = penstock.changes.read_stream(spark, feed).where("_table = 'notes'")
        return of_all.select("notes.*", "_change_type", "_commit_version", "_unchanged")

    def whole(df: DataFrame) -> DataFrame:
        of_all = penstock.changes.read_stream(spark, feed).select("*", F.col("notes.id").alias("id"))
        return of_all.withColumn("_key", F.lit("")).withColumn("_table", F.lit(""))

    for version, (kind, text, unchanged) in enumerate(
        [("insert", "long", None), ("update_postimage", None, ["text"])]
    ):
        row = {"_change_type": kind, "_table": "notes", "_key": "1", "_unchanged": unchanged}
        row |= {"notes": {"id": 1, "text": text, "n": version}}
        feed.append_commit(version, START + timedelta(seconds=version), [row])
    written.run(notes)
    assert written.rows() == [(1, "long", 1)]
    with pytest.raises(TableRefusedError, match=r"computed columns .*notes"):
        Written(spark, tmp_path / "other", f"delta://{tmp_path}/whole", 1).run(whole)


@pytest.mark.parametrize("scd_type", [1], indirect=True)
def test_a_table_without_long_columns_needs_no_such_column(written: Written) -> None:
    def short(df: DataFrame) -> DataFrame:
        return df.select("id", "n", "_change_type", "_commit_version", "_unchanged")

    written.commit(change("insert", 1, 1))
    written.commit(change("update_postimage", 1, 2, "text"))
    written.run(short)
    assert written.rows() == [(1, 2)]


@pytest.mark.parametrize("scd_type", [1], indirect=True)
def test_rows_without_the_column_that_names_omitted_values_are_refused(written: Written) -> None:
    with pytest.raises(
        InvalidInputError, match=r"CHANGE_COLUMN_MISSING\].*_unchanged, is not among the rows: select it too"
    ):
        written.run(lambda df: df.drop("_unchanged"))
    written.commit(change("insert", 1, 1))
    written.run(lambda df: df.select("id", "n", "_change_type", "_commit_version"))
    assert written.rows() == [(1, 1)]
