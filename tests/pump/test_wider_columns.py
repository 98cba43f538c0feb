"""Columns of a table that get wider types: their queue does, too, and no row is lost or changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import QueueNotFoundError, StoreNotFoundError, StoreUnavailableError
from penstock.feeds.postgres import following
from penstock.feeds.postgres.following import Step
from penstock.feeds.queue_feed import QueueFeed
from penstock.pump import backfills, last_changes
from penstock.pump.appender import Appender
from penstock.pump.last_changes import LastChanges
from tests.support.backfilled import add_to_publication, await_queue, create_evolving_pump, paused_backfill
from tests.support.postgres_source import Source
from tests.support.pumped import change_rows, create_pump, running, sort_by_commit
from tests.support.recovered import fold, is_recovered, queue_rows, recover
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until

BIG = 1 << 40


def await_rows(store_url: str, queue: str, count: int, failures: list[Exception]) -> None:
    def there() -> bool:
        with suppress(StoreNotFoundError, QueueNotFoundError):
            return len(change_rows(store_url, queue)) >= count
        return False

    wait_until(lambda: failures or there(), 30, "the rows")
    assert not failures


def values(store_url: str, queue: str) -> list[tuple[object, ...]]:
    return [
        (row["_change_type"], row["id"], row["price"], row["x"])
        for row in sort_by_commit(change_rows(store_url, queue))
    ]


def test_the_queue_follows_the_types_of_its_table(shop: Source, store_url: str) -> None:
    table = shop.table("id int PRIMARY KEY, price numeric(6, 2), x real", "w")
    shop.run(f"INSERT INTO {table} VALUES (1, 1.50, 0.5)")

    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        await_rows(store_url, table, 1, failures)
        shop.run(
            f"ALTER TABLE {table} ALTER COLUMN id TYPE bigint",
            f"INSERT INTO {table} VALUES ({BIG}, 2, 0.5)",
        )
        await_rows(store_url, table, 2, failures)
    shop.run(
        f"UPDATE {table} SET price = 3 WHERE id = 1",
        f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(12, 4), ALTER COLUMN x TYPE double precision, "
        "ADD COLUMN note text",
        f"INSERT INTO {table} VALUES (2, 12345678.1234, 0.1, 'n')",
        f"DELETE FROM {table} WHERE id = {BIG}",
    )
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        await_rows(store_url, table, 5, failures)
    found = [(kind, number, str(price), x) for kind, number, price, x in values(store_url, table)]
    assert found == [
        ("insert", 1, "1.5000", 0.5),
        ("insert", BIG, "2.0000", 0.5),
        ("update_postimage", 1, "3.0000", 0.5),
        ("insert", 2, "12345678.1234", 0.1),
        ("delete", BIG, "None", None),
    ]
    schema = QueueFeed(table, store_url).open().describe().schema
    assert [schema.field(name).type for name in ("id", "price", "x")] == [
        pa.int64(),
        pa.decimal128(12, 4),
        pa.float64(),
    ]


@one_store
@pytest.mark.parametrize(
    ("kind", "narrower"),
    [
        ("text", "varchar(2) USING left(v, 2)"),
        ("varchar(9)", "varchar(2) USING left(v, 2)"),
        ("timestamp", "timestamp(0)"),
        ("numeric(12, 4)", "numeric(6, 2)"),
        ("numeric(12, 4)", "numeric(12, 6)"),
        ("double precision", "real"),
    ],
)
def test_a_type_that_may_have_changed_values_is_refused(
    shop: Source, store_url: str, kind: str, narrower: str
) -> None:
    table = shop.table(f"id int PRIMARY KEY, n int, v {kind}", "w")
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        shop.run(f"INSERT INTO {table} VALUES (1, 1, NULL)")
        await_rows(store_url, table, 1, failures)
        shop.run(
            f"ALTER TABLE {table} ALTER COLUMN n TYPE bigint, ALTER COLUMN v TYPE {narrower}",
            f"INSERT INTO {table} VALUES (2, 2, NULL)",
        )
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED"
    assert len(change_rows(store_url, table)) == 1


@one_store
def test_a_type_that_gets_narrower_again_is_refused(shop: Source, store_url: str) -> None:
    table = shop.table("id int PRIMARY KEY, price numeric(6, 2)", "w")
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        for number in (0, 1):
            shop.run(f"INSERT INTO {table} VALUES ({number}, 1.5)")
            await_rows(store_url, table, number + 1, failures)
        shop.run(
            f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(12, 4)",
            f"INSERT INTO {table} VALUES (2, 1.2345)",
            f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(6, 2)",
            f"INSERT INTO {table} VALUES (3, 1.5)",
        )
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED"
    assert [row["id"] for row in sort_by_commit(change_rows(store_url, table))] == [0, 1, 2]


@one_store
@pytest.mark.parametrize(
    ("kind", "wider"), [("real", "double precision"), ("numeric(6, 2)", "numeric(12, 4)")]
)
def test_a_key_whose_text_changes_is_refused(shop: Source, store_url: str, kind: str, wider: str) -> None:
    """While a table is read, its rows are known by the text of their keys."""
    table = shop.table(f"id {kind} PRIMARY KEY", "w")
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        shop.run(f"INSERT INTO {table} VALUES (0.1)")
        await_rows(store_url, table, 1, failures)
        shop.run(f"ALTER TABLE {table} ALTER COLUMN id TYPE {wider}", f"INSERT INTO {table} VALUES (0.2)")
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED"


def test_a_type_gets_wider_inside_a_commit_that_is_appended_in_parts(
    shop: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption, the commit is read again from its start, where it has the narrower type."""
    monkeypatch.setattr(following, "_PART_BYTES", 1 << 12)
    table = shop.table("id int PRIMARY KEY, price numeric(6, 2), x real", "w")
    append, interrupted = Appender.append, threading.Event()

    def append_and_stop(appender: Appender, step: Step, *, store_position: bool = False) -> None:
        append(appender, step, store_position=store_position)
        types = [base for base in appender.readers.tables.by_name[table].bases if base[0] == 701]
        if types and appender.position.part_rows and not interrupted.is_set():
            interrupted.set()
            raise StoreUnavailableError("the process ends here")

    monkeypatch.setattr(Appender, "append", append_and_stop)
    with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
        shop.run(f"INSERT INTO {table} VALUES (0, 1.5, 0.5)")
        await_rows(store_url, table, 1, failures)
        with shop.connection.transaction():
            shop.run(
                f"INSERT INTO {table} SELECT n, n / 4.0, 0.1 FROM generate_series(1, 500) AS n",
                f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(12, 4), ALTER COLUMN x TYPE float8",
                f"INSERT INTO {table} SELECT n, n / 16.0, 0.1 FROM generate_series(501, 2000) AS n",
            )
        shop.run(f"INSERT INTO {table} VALUES (2001, 12345678.1234, 0.1)")
        await_rows(store_url, table, 2002, failures)
    assert interrupted.is_set()
    found = [(row["id"], row["price"], row["x"]) for row in sort_by_commit(change_rows(store_url, table))]
    assert found == shop.rows(f"SELECT id, price, x FROM {table} ORDER BY id")


@one_store
def test_a_wider_type_travels_on_into_a_table(
    spark: SparkSession, shop: Source, pg_url: str, store_url: str, tmp_path: Path
) -> None:
    table, copy = shop.table("id int PRIMARY KEY, price numeric(6, 2)", "w"), f"copy_{tmp_path.name}"
    copies = pg_url
    shop.run(f"INSERT INTO {table} VALUES (1, 1.50), (2, 2.50)")

    def copied() -> list[tuple[object, ...]]:
        sink = penstock.TableSink(copy, keys=["id"], url=copies, apply_changes=True, schema_changes="evolve")
        query = (
            penstock.stream(spark, QueueFeed(table, store_url))
            .write(sink)
            .start(checkpoint=str(tmp_path / "checkpoint"), trigger=penstock.Trigger.available_now())
        )
        query.awaitTermination()
        with psycopg.connect(copies) as connection:
            text = f'select id, price::text from "{copy}" order by id'
            return connection.execute(text.encode()).fetchall()

    def pump_until(count: int) -> None:
        with running(create_pump(shop, store_url, schema_changes="evolve")) as failures:
            await_rows(store_url, table, count, failures)

    pump_until(2)
    assert copied() == [(1, "1.50"), (2, "2.50")]
    shop.run(
        f"UPDATE {table} SET price = 3 WHERE id = 1",
        f"ALTER TABLE {table} ALTER COLUMN id TYPE bigint, ALTER COLUMN price TYPE numeric(12, 4)",
        f"INSERT INTO {table} VALUES ({BIG}, 12345678.1234)",
        f"DELETE FROM {table} WHERE id = 2",
    )
    pump_until(5)
    assert copied() == [(1, "3.0000"), (BIG, "12345678.1234")]


@pytest.mark.parametrize(("kind", "wider"), [("int", "bigint"), ("numeric(6, 2)", "numeric(20, 2)")])
def test_a_table_gets_wider_types_while_its_rows_are_read(
    source: Source, store_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, wider: str
) -> None:
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 100)
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    table = source.table(f"id {kind} PRIMARY KEY, v int", "added")
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {table}",
        f"INSERT INTO {table} SELECT n, n FROM generate_series(1, 1000) AS n",
    )

    def copied() -> dict[object, object]:
        last = {row["id"]: row for row in sort_by_commit(change_rows(store_url, table))}
        return {number: row["v"] for number, row in last.items() if row["_change_type"] != "delete"}

    with running(create_evolving_pump(source, store_url)) as failures:
        with paused_backfill(source, store_url, failures, monkeypatch):
            source.run(
                f"ALTER TABLE {table} ALTER COLUMN id TYPE {wider}, ALTER COLUMN v TYPE bigint",
                f"UPDATE {table} SET v = v + {BIG} WHERE id % 100 = 0",
                f"UPDATE {table} SET id = id + {BIG} WHERE id % 100 = 1",
            )
        expected = dict(source.rows(f"SELECT id, v FROM {table}"))
        wait_until(lambda: failures or copied() == expected, 60, "the rows of the table", interval=0.5)
        assert not failures


def test_a_column_of_a_table_that_is_being_read_gets_narrower_and_wider_again(
    source: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "_CHUNK_ROWS", 100)
    monkeypatch.setattr(backfills, "_SCHEMA_CHANGE_SECONDS", 3)
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    table = source.table("id int PRIMARY KEY, v bigint", "added")
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {table}",
        f"INSERT INTO {table} SELECT n, n FROM generate_series(1, 1000) AS n",
    )

    with running(create_evolving_pump(source, store_url)) as failures:
        with paused_backfill(source, store_url, failures, monkeypatch):
            source.run(
                f"ALTER TABLE {table} ALTER COLUMN v TYPE int, ADD COLUMN note text",
                f"UPDATE {table} SET v = 0 WHERE id = 1",
                f"ALTER TABLE {table} ALTER COLUMN v TYPE bigint",
            )
        wait_until(lambda: failures or len(change_rows(store_url, table)) == 1001, 60, "the rows")
        assert not failures


def test_deletes_of_a_recovery_have_keys_of_a_wider_type(source: Source, store_url: str) -> None:
    """Its queue still has the earlier type: no row has come since."""
    table = source.table("id int PRIMARY KEY, v int", "w")
    source.run(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
        await_rows(store_url, table, 2, failures)
    source.drop_slot()
    source.run(f"DELETE FROM {table}", f"ALTER TABLE {table} ALTER COLUMN id TYPE bigint")
    recover(store_url)
    with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
        wait_until(lambda: failures or is_recovered(store_url), 30, "the recovery")
        assert not failures
        assert fold(queue_rows(store_url, table), ["id"], ["id", "v"]) == {}
        source.run(f"INSERT INTO {table} VALUES ({BIG}, 3)")
        await_rows(store_url, table, 5, failures)


def test_a_key_gets_a_wider_type_while_a_recovery_looks_for_deleted_rows(
    source: Source, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = source.table("id int PRIMARY KEY, v int", "w")
    source.run(f"INSERT INTO {table} VALUES (1, 1), (2, 2)")
    with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
        await_rows(store_url, table, 2, failures)
    source.drop_slot()
    source.run(f"DELETE FROM {table} WHERE id = 1")
    recover(store_url)
    original, began = LastChanges.read_new_rows, threading.Event()

    def reading(changes: LastChanges, ends: Callable[[], bool] = lambda: False) -> None:
        if not began.is_set():
            began.set()
            with psycopg.connect(source.url, autocommit=True) as connection:
                Source(source.url, source.name, connection).run(
                    f"ALTER TABLE {table} ALTER COLUMN id TYPE bigint",
                    f"INSERT INTO {table} VALUES ({BIG}, 3)",
                )
            await_rows(store_url, table, 4, failures)
        original(changes, ends)

    monkeypatch.setattr(LastChanges, "read_new_rows", reading)
    with running(create_pump(source, store_url, schema_changes="evolve")) as failures:
        wait_until(lambda: failures or is_recovered(store_url), 30, "the recovery")
        assert not failures
    assert began.is_set()
    assert fold(queue_rows(store_url, table), ["id"], ["id", "v"]) == {
        (2,): {"id": 2, "v": 2},
        (BIG,): {"id": BIG, "v": 3},
    }


def test_the_last_change_of_a_key_is_found_whatever_type_it_was_written_in(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_changes, "_PAGE_ROWS", 1)
    key = [("n", pa.int16()), ("x", pa.float32()), ("d", pa.decimal128(4, 2))]
    rest = [("_commit_version", pa.int64()), ("_commit_sequence", pa.int64()), ("_change_type", pa.string())]
    queue = store.create_queue("q", pa.schema([*key, *rest]))
    names = [name for name, _ in key]

    def add_to_publication(version: int, kind: str, *values: object) -> None:
        queue.append(
            [
                dict(
                    zip(names, values, strict=True),
                    _commit_version=version,
                    _commit_sequence=0,
                    _change_type=kind,
                )
            ]
        )

    add_to_publication(1, "insert", 1, 0.5, Decimal(1))
    add_to_publication(2, "insert", 2, -0.0, Decimal(2))
    add_to_publication(3, "insert", 3, 0.25, Decimal(3))
    changes = LastChanges(store.queue("q"), names)
    changes.read_new_rows()
    queue.widen_columns([("n", pa.int64()), ("x", pa.float64()), ("d", pa.decimal128(12, 2))])
    add_to_publication(4, "update_postimage", 1, 0.5, Decimal(1))
    add_to_publication(5, "delete", 2, -0.0, Decimal(2))
    add_to_publication(6, "insert", BIG, 0.1, Decimal(10) ** 8)
    changes.read_new_rows()
    assert [each.to_pylist() for each in changes.live_keys(9, 9)] == [
        [1, 3, BIG],
        [0.5, 0.25, 0.1],
        [Decimal(1), Decimal(3), Decimal(10) ** 8],
    ]
    changes.close()


@pytest.mark.parametrize("more", ["", ", ADD COLUMN note text"])
def test_a_table_is_added_with_rows_from_before_its_types_got_wider(
    source: Source, store_url: str, more: str
) -> None:
    source.table("id int PRIMARY KEY", "first", f"INSERT INTO {source.name}.first VALUES (1)")
    table = source.table("id int PRIMARY KEY, price numeric(6, 2), x real, n int", "added")
    source.run(
        f"ALTER PUBLICATION {source.name} DROP TABLE {table}", f"INSERT INTO {table} VALUES (1, 1.5, 0.1, 1)"
    )
    with running(create_evolving_pump(source, store_url)) as failures:
        await_queue(source, store_url, failures)
    add_to_publication(source)
    source.run(
        f"INSERT INTO {table} VALUES (2, 2.5, 0.2, 2)",
        f"UPDATE {table} SET price = 3 WHERE id = 1",
        f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(12, 4), ALTER COLUMN x TYPE double precision, "
        f"ALTER COLUMN n TYPE bigint{more}",
        f"INSERT INTO {table} (id, price, x, n) VALUES (3, 12345678.1234, 0.1, {BIG})",
    )
    with running(create_evolving_pump(source, store_url)) as failures:
        await_rows(store_url, table, 3, failures)
        source.run(f"UPDATE {table} SET n = n + 1 WHERE id < 3", f"DELETE FROM {table} WHERE id = 3")
        await_rows(store_url, table, 6, failures)
        found = fold(queue_rows(store_url, table), ["id"], ["id", "price", "x", "n"])
        expected = source.rows(f"SELECT id, price, x, n FROM {table} ORDER BY id")
        assert [tuple(found[key].values()) for key in sorted(found)] == expected
        source.run(
            f"ALTER TABLE {table} ALTER COLUMN price TYPE numeric(6, 2), ALTER COLUMN x TYPE real, "
            f"ALTER COLUMN n TYPE int",
            f"INSERT INTO {table} (id, price) VALUES (4, 1)",
        )
        wait_until(lambda: failures, 30, "the pump to stop")
    assert failures[0].condition == "FEED_UNAVAILABLE.COLUMN_TYPE_CHANGED"
