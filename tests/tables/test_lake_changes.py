"""Change rows applied to tables of a lake, with current rows alone or every version of them: what a user's
query sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError, SchemaMismatchError, TableRefusedError
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import Feed
from tests.tables.change_tables import SCHEMA, change
from tests.tables.delta.tables import DeltaTables
from tests.tables.iceberg.tables import IcebergTables

pytestmark = one_store

LakeTables = DeltaTables | IcebergTables


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Feed:
    return Feed(spark, store_url, tmp_path, SCHEMA)


@pytest.fixture(params=["delta", "iceberg"])
def tables(request: pytest.FixtureRequest, feed: Feed, tmp_path: Path) -> LakeTables:
    kind = DeltaTables if request.param == "delta" else IcebergTables
    return kind(feed, tmp_path / "tables of ours")


def people(tables: LakeTables, scd_type: int = 1, *keys: str, **more: Any) -> penstock.TableSink:
    return tables.sink("people", *(keys or ("id",)), apply_changes=True, scd_type=scd_type, **more)


def test_inserts_updates_and_deletes_are_applied_once(tables: LakeTables) -> None:
    feed = tables.feed
    feed.add(change(1, "ada", "insert", 1), change(2, "bob", "insert", 1), change(3, "cyd", "insert", 1))
    feed.run(people(tables))
    assert tables.rows("people") == [(1, "ada"), (2, "bob"), (3, "cyd")]
    feed.add(
        change(1, "ada", "update_preimage", 2),
        change(1, "eve", "update_postimage", 2),
        change(2, "bob", "delete", 3),
        change(3, "cyd", "update_preimage", 3),
        change(4, "cyd", "update_postimage", 3),
    )
    feed.run(people(tables))
    assert tables.rows("people") == [(1, "eve"), (4, "cyd")], "a row whose key changed leaves its old key"
    version = tables.version("people")
    replay_last_batch(feed.folder / "ck")
    feed.run(people(tables))
    assert tables.version("people") == version
    assert tables.staged("people") == []
    assert feed.store.consumer("c").lag("in").rows == 0


def test_the_last_change_of_a_key_wins_even_if_others_arrive_late_or_again(
    tables: LakeTables,
) -> None:
    feed = tables.feed
    feed.add(
        change(1, "third", "update_postimage", 3),
        change(1, "first", "insert", 1),
        change(2, "gone", "insert", 1),
        change(1, "second", "update_postimage", 2),
        change(2, "gone", "delete", 2),
        change(3, None, "delete", 5),
        change(1, "third", "update_postimage", 3),
    )
    feed.run(people(tables))
    assert tables.rows("people") == [(1, "third")]
    version = tables.version("people")
    feed.add(change(1, "second", "update_postimage", 2), change(3, "late", "insert", 4)).run(people(tables))
    feed.add(change(1, "third", "update_postimage", 3), change(3, None, "delete", 5)).run(people(tables))
    assert tables.rows("people") == [(1, "third")]
    assert tables.version("people") == version, "what is old makes no version"
    feed.add(change(3, "again", "insert", 6)).run(people(tables))
    assert tables.rows("people") == [(1, "third"), (3, "again")]


def test_deletes_of_absent_keys_are_remembered(tables: LakeTables) -> None:
    feed = tables.feed
    feed.add(change(1, None, "delete", 5)).run(people(tables))
    assert tables.rows("people") == []
    feed.add(change(1, "late", "insert", 4)).run(people(tables))
    assert tables.rows("people") == []


def test_every_version_of_a_row_is_kept(tables: LakeTables) -> None:
    feed, sink = tables.feed, people(tables, 2)
    feed.add(change(1, "ada", "insert", 1), change(2, "bob", "insert", 1)).run(sink)
    feed.add(
        change(1, "ada", "update_preimage", 2),
        change(1, "eve", "update_postimage", 2),
        change(2, "bob", "delete", 3),
        change(2, "bea", "insert", 5),
        change(1, "eve", "update_preimage", 6),
        change(3, "eve", "update_postimage", 6),
    )
    feed.run(sink)
    history = [
        (1, "ada", 1, 2),
        (1, "eve", 2, 6),
        (2, "bea", 5, None),
        (2, "bob", 1, 3),
        (3, "eve", 6, None),
    ]
    assert tables.rows("people") == history
    version = tables.version("people")
    replay_last_batch(feed.folder / "ck")
    feed.run(sink)
    feed.add(change(1, "eve", "update_postimage", 2), change(2, "bob", "delete", 3)).run(sink)
    assert tables.rows("people") == history
    assert tables.version("people") == version


def test_a_late_change_is_inserted_at_its_position(tables: LakeTables) -> None:
    feed, sink = tables.feed, people(tables, 2)
    feed.add(change(1, None, "delete", 7), change(1, "e", "update_postimage", 5)).run(sink)
    assert tables.rows("people") == [(1, "e", 5, 7)]
    feed.add(change(1, "a", "insert", 1), change(1, None, "delete", 3), change(2, None, "delete", 4))
    feed.run(sink)
    assert tables.rows("people") == [(1, "a", 1, 3), (1, "e", 5, 7)]
    feed.add(change(1, "f", "insert", 6), change(2, "x", "insert", 2), change(1, "c", "insert", 3))
    feed.run(sink)
    assert tables.rows("people") == [
        (1, "a", 1, 3),
        (1, "c", 3, 5),
        (1, "e", 5, 6),
        (1, "f", 6, 7),
        (2, "x", 2, 4),
    ]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_several_keys_of_any_name_with_a_user_defined_order_column(tables: LakeTables, scd_type: int) -> None:
    def odd(frame: Any) -> Any:
        return frame.selectExpr(
            "id as `a.b`",
            'cast(id % 2 as decimal(4, 1)) as `say "k"`',
            "name as `Größe ☃`",
            "named_struct('n', name) as nested",
            "_change_type",
            "date_from_unix_date(_commit_version) as `at.`",
        ).drop("_commit_version")

    sink = people(tables, scd_type, "A.B", 'say "k"', sequence_by="at.")
    tables.feed.add(change(1, "a", "insert", 1), change(2, "b", "insert", 1)).run(sink, odd)
    tables.feed.add(change(1, "c", "update_postimage", 2), change(2, "b", "delete", 2)).run(sink, odd)
    found = tables.lines("people")
    current = [row for row in found if row.get("_valid_to") is None and row["Größe ☃"] != "b"]
    assert [(row["a.b"], row["Größe ☃"], row["nested"], str(row["at."])) for row in current] == [
        (1, "c", {"n": "c"}, "1970-01-03")
    ]
    assert len(found) == {1: 1, 2: 3}[scd_type]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_different_changes_with_the_same_position_are_refused(tables: LakeTables, scd_type: int) -> None:
    feed = tables.feed
    feed.add(change(1, "one", "insert", 1), change(1, "other", "insert", 1))
    with pytest.raises(TableRefusedError, match=r"'id' = 1.* name a column as sequence_by") as caught:
        feed.run(people(tables, scd_type))
    assert caught.value.condition == "TABLE_REFUSED.AMBIGUOUS_ORDER"
    assert tables.rows("people") == []


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("row", "condition"),
    [
        (change(1, "x", "upsert", 1), "TABLE_REFUSED.UNKNOWN_CHANGE_TYPE"),
        ({"id": 1, "_change_type": "insert"}, "TABLE_REFUSED.NULL_SEQUENCE"),
        ({"_change_type": "delete", "_commit_version": 1}, "TABLE_REFUSED.NULL_KEY"),
    ],
)
def test_an_invalid_change_is_refused(tables: LakeTables, row: dict[str, Any], condition: str) -> None:
    tables.feed.add(change(1, "later", "insert", 9), row)
    with pytest.raises(TableRefusedError) as caught:
        tables.feed.run(people(tables))
    assert caught.value.condition == condition


def test_mismatches_are_reported_when_the_query_starts(tables: LakeTables) -> None:
    feed = tables.feed
    feed.add(change(1, "ada", "insert", 1)).run(people(tables, 2))
    with pytest.raises(SchemaMismatchError, match=r"TABLE_DIFFERS\].*'_valid_from'.*scd_type=2"):
        feed.run(people(tables), checkpoint="b")
    with pytest.raises(SchemaMismatchError, match=r"KEYS_CHANGED\].*keep keys and sequence_by"):
        feed.run(people(tables, 2, "name"), checkpoint="b")
    with pytest.raises(SchemaMismatchError, match="no column 'more'"):
        feed.run(people(tables, 2), lambda frame: frame.selectExpr("*", "1 as more"), checkpoint="b")
    with pytest.raises(SchemaMismatchError, match="'_valid_from' is long in the table and string"):
        feed.run(
            people(tables, 2, sequence_by="_change_type"),
            checkpoint="b",
        )
    with pytest.raises(InvalidInputError, match=r"COLUMN_NAME\].*withColumnRenamed"):
        feed.run(people(tables, 2), lambda frame: frame.selectExpr("*", "id as _valid_to"), checkpoint="b")
    with pytest.raises(InvalidInputError, match=r"CHANGE_COLUMN_MISSING\].*have no _change_type"):
        feed.run(people(tables), lambda frame: frame.drop("_change_type"), checkpoint="b")
    with pytest.raises(InvalidInputError, match=r"INPUT.COLUMN_TYPE\].*cast it"):
        feed.run(
            people(tables, sequence_by="f"), lambda frame: frame.selectExpr("*", "1.5f as f"), checkpoint="b"
        )
