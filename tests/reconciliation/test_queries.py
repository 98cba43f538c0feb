"""Copies that queries fill: what a query writes is equal, and by its checkpoint lag is never a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError, TableRefusedError
from penstock.testing import temporary_store_url
from tests.support.postgres_source import Source
from tests.support.pumped import running
from tests.support.reconciled import CopiedTable
from tests.support.recovered import is_recovered, read_pump_state, recover, shift_versions
from tests.support.sql_tables import NOW
from tests.support.waiting import wait_until

COLUMNS = (
    "id int PRIMARY KEY, t text, n numeric(12, 3), u numeric, f float8, d date, at timestamptz, b bytea, "
    "j jsonb, a int[], i uuid, c char(4), ok boolean, s smallint"
)
ROW = (
    "n, repeat('text ', n), n / 8.0, n / 3.0, n / 7.0, date '2026-01-01' + n, "
    "timestamptz '2026-01-01 00:00+00' + n * interval '1.5 s', decode(lpad(to_hex(n), 4, '0'), 'hex'), "
    "jsonb_build_object('n', n), ARRAY[n, NULL], md5(n::text)::uuid, n % 99, n % 2 = 0, n % 100"
)


@contextmanager
def store_or_folder(kind: str, source: Source, folder: Path) -> Iterator[str]:
    if kind == "delta":
        yield f"delta://{folder}/tables"
        return
    with temporary_store_url(source.url if kind == "postgresql" else None) as url:
        with closing(penstock.connect(url)):
            pass
        yield url


@pytest.fixture
def table(source: Source) -> str:
    name = source.table(COLUMNS, "t")
    source.run(f"INSERT INTO {name} SELECT {ROW} FROM generate_series(1, 300) AS n")
    return name


def change(source: Source, table: str) -> None:
    source.run(
        f"DELETE FROM {table} WHERE id % 10 = 3",
        f"UPDATE {table} SET t = 'changed' WHERE id % 10 = 4",
        f"UPDATE {table} SET n = n + 1 WHERE id % 10 = 5",
        f"INSERT INTO {table} SELECT {ROW} FROM generate_series(301, 320) AS n ON CONFLICT DO NOTHING",
    )


@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "delta"])
@pytest.mark.one_kind
def test_a_copy_of_a_query_differs_by_what_was_lost_alone(
    spark: SparkSession, source: Source, table: str, kind: str, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with store_or_folder(kind, source, tmp_path) as url:
        made = CopiedTable(source, table, url, "copy")
        feed = source.feed(tables=[table], snapshot="initial")
        sink = penstock.TableSink(made.name, keys=["id"], url=url, apply_changes=True)

        def run() -> None:
            query = penstock.stream(spark, feed).write(sink).start(checkpoint=checkpoint, trigger=NOW)
            query.awaitTermination()

        def compare(**options: object) -> penstock.Reconciliation:
            return made.compare(source=feed, checkpoint=checkpoint, settle=3600.0, **options)

        run()
        found = compare()
        assert (found.equal, found.evidence) == (True, "checkpoint")
        change(source, table)
        found = compare(timeout=1.0)
        assert (found.differences, found.undecided) == (0, 110)
        run()
        assert compare().equal
        made.delete("id = 1")
        made.update("t", "'damaged'", "id = 2")
        made.update("u", "'0.3'", "id = 6")
        found = compare()
        assert {row.key["id"]: row.columns for row in found.differing_rows} == {1: (), 2: ("t",), 6: ("u",)}
        # Changes that the query has not written do not hide what it has lost.
        source.run(f"UPDATE {table} SET s = s + 1 WHERE id IN (7, 8)")
        found = compare(timeout=1.0)
        assert (found.differences, found.undecided) == (0, 5)
        run()
        found = compare(repair=True)
        assert (found.differences, found.repaired, found.undecided) == (3, 3, 0)
        change(source, table)
        run()
        assert compare().equal


@pytest.mark.parametrize("kind", ["postgresql", "delta"])
@pytest.mark.one_kind
def test_the_current_versions_of_a_table_with_history_are_compared(
    spark: SparkSession, source: Source, table: str, kind: str, tmp_path: Path
) -> None:
    with store_or_folder(kind, source, tmp_path) as url:
        made = CopiedTable(source, table, url, "copy")
        feed = source.feed(tables=[table], snapshot="initial")
        sink = penstock.TableSink(made.name, keys=["id"], url=url, apply_changes=True, scd_type=2)
        for _ in range(2):
            query = penstock.stream(spark, feed).write(sink)
            query.start(checkpoint=str(tmp_path / "checkpoint"), trigger=NOW).awaitTermination()
            change(source, table)
        source.run(f"DELETE FROM {table} WHERE id > 300")
        query.start(checkpoint=str(tmp_path / "checkpoint"), trigger=NOW).awaitTermination()
        assert made.compare().equal
        made.update("t", "'damaged'", "id = 2")
        made.delete("id = 1")
        assert sorted(row.key["id"] for row in made.compare().differing_rows) == [1, 2]
        with pytest.raises(TableRefusedError) as refused:
            made.compare(repair=True)
        assert refused.value.condition == "TABLE_REFUSED.HISTORY_NOT_REPAIRABLE"


@pytest.mark.parametrize("offset", [0, 10**12])
def test_a_copy_of_a_pumped_queue(
    spark: SparkSession, source: Source, table: str, tmp_path: Path, offset: int
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with store_or_folder("sqlite", source, tmp_path) as url:
        made = CopiedTable(source, table, f"delta://{tmp_path}/tables", "copy")
        feed = source.feed(tables=[table], snapshot="initial")
        if offset:
            with running(penstock.Pump(feed, url)) as failures:
                wait_until(lambda: failures or _rows_in(url, f"{source.name}.t") == 300, 60, "the copy")
            shift_versions(url, offset)
        with running(penstock.Pump(feed, url)) as failures:
            queue = penstock.QueueFeed(f"{source.name}.t", url)

            def run() -> None:
                sink = penstock.TableSink("copy", keys=["id"], url=made.url, apply_changes=True)
                query = penstock.stream(spark, queue).write(sink).start(checkpoint=checkpoint, trigger=NOW)
                query.awaitTermination()

            def arrived(rows: int) -> Callable[[], bool]:
                return lambda: _rows_in(url, f"{source.name}.t") >= rows

            wait_until(arrived(300), 60, "the copy in the queue")
            run()
            options = {"source": feed, "checkpoint": checkpoint, "queue_store": url, "settle": 3600.0}
            assert made.compare(**options).equal
            change(source, table)
            wait_until(arrived(300 + 110), 60, "the changes in the queue")
            found = made.compare(**options, timeout=1.0)
            assert (found.differences, found.undecided) == (0, 110)
            run()
            made.update("t", "'damaged'", "id = 2")
            found = made.compare(**options)
            assert [row.key["id"] for row in found.differing_rows] == [2]
            with pytest.raises(InvalidInputError) as refused:
                made.compare(source=feed, checkpoint=checkpoint)
            assert refused.value.condition == "INVALID_INPUT.OTHER_CHECKPOINT"
            assert not failures


def test_a_pump_that_recovers_has_not_read_all(
    spark: SparkSession, source: Source, table: str, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with store_or_folder("sqlite", source, tmp_path) as url:
        made = CopiedTable(source, table, f"delta://{tmp_path}/tables", "copy")
        feed = source.feed(tables=[table], snapshot="initial")
        queue = penstock.QueueFeed(f"{source.name}.t", url)
        options = {"source": feed, "checkpoint": checkpoint, "queue_store": url, "settle": 3600.0}

        def run() -> None:
            sink = penstock.TableSink("copy", keys=["id"], url=made.url, apply_changes=True)
            query = penstock.stream(spark, queue).write(sink).start(checkpoint=checkpoint, trigger=NOW)
            query.awaitTermination()

        with running(penstock.Pump(feed, url)) as failures:
            wait_until(lambda: failures or _rows_in(url, queue.queue) == 300, 60, "the copy")
        source.drop_slot()
        change(source, table)
        recover(url)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("penstock.pump.backfills.Backfills.step", lambda *_: None)
            with running(penstock.Pump(feed, url)) as failures:
                wait_until(lambda: failures or read_pump_state(url).get("recoveries"), 60, "the new slot")
                run()
                found = made.compare(**options, timeout=1.0)
                assert (found.differences, found.undecided) == (0, 110)
        with running(penstock.Pump(feed, url)) as failures:
            wait_until(lambda: failures or is_recovered(url), 60, "the end of the recovery")
            run()
            assert made.compare(**options).equal
        assert not failures


def _rows_in(store_url: str, queue: str) -> int:
    with closing(penstock.connect(store_url)) as store:
        return store.queue(queue).info().rows if queue in store.queues() else 0


def test_the_checkpoint_of_another_query_is_refused(
    spark: SparkSession, source: Source, table: str, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    rate = penstock.stream(spark, penstock.RateSource(5)).write(penstock.ConsoleSink())
    rate.start(checkpoint=checkpoint, trigger=penstock.Trigger.available_now()).awaitTermination()
    made = CopiedTable(source, table, f"delta://{tmp_path}", "copy")
    from tests.support.reconciled import source_rows, write_rows

    write_rows(made.url, "copy", source_rows(source, table), ["id"])
    source.make_slot()
    for wrong in (checkpoint, str(tmp_path / "nothing")):
        with pytest.raises(InvalidInputError) as refused:
            made.compare(checkpoint=wrong)
        assert refused.value.condition == "INVALID_INPUT.OTHER_CHECKPOINT"
