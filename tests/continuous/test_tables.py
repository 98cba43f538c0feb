"""SQL tables as sinks of continuous queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import ContinuousRefusedError, InvalidOptionError, SchemaMismatchError, TableRefusedError
from penstock.store.database import Transaction
from penstock.store.staging import Attempt
from penstock.tables.columns import Layout, layout_of
from penstock.tables.names import resolve
from penstock.tables.row_encoding import database_schema, projected_schema
from penstock.tables.sql.staging import SegmentStage
from tests.continuous.queue_copy import SimulatedCrash, crash_after
from tests.support.spark_queues import one_store
from tests.support.sql_tables import NOW, Feed, named, query, rows, sql_name
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("label", pa.string())])
CONTINUOUS = penstock.Trigger.continuous("50 ms")
TIMEOUT = 60


class TableFeed(Feed):
    """Queue, and continuous queries that append its rows to tables."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        super().__init__(spark, url, folder, SCHEMA)
        self.running: list[Any] = []

    def start(
        self, transform: Any = None, *, sink: Any = None, trigger: Any = CONTINUOUS, **options: object
    ) -> Any:
        pipeline = self.pipeline(sink or self.table("t"), transform, **options)
        self.running.append(pipeline.start(checkpoint=self.folder / "ck", trigger=trigger))
        return self.running[-1]

    def add_ids(self, start: int, end: int, label: str = "") -> None:
        self.add(*({"id": i, "label": label} for i in range(start, end)))

    def count_staged(self) -> int:
        table = "penstock_staged" if self.url.startswith("sqlite") else sql_name(self.url, "staged")
        return int(query(self.url, f"select count(*) from {table}")[0][0])

    def drop_table(self) -> None:
        query(self.url, f"drop table {sql_name(self.url, 't')}")


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Iterator[TableFeed]:
    feed = TableFeed(spark, store_url, tmp_path)
    yield feed
    for running in feed.running:
        running.stop(10)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_rows_are_added_to_the_table(feed: TableFeed, guarantee: str) -> None:
    feed.add_ids(0, 5)
    running = feed.start(lambda frame: frame.where("id % 2 = 0").select("id"), guarantee=guarantee)
    running.processAllAvailable()
    assert rows(feed.url, "t") == [(0,), (2,), (4,)]
    feed.add_ids(5, 10)
    running.processAllAvailable()
    assert rows(feed.url, "t") == [(0,), (2,), (4,), (6,), (8,)]
    assert running.stop()
    assert feed.count_staged() == 0
    assert feed.store.consumer("c").lag("in").rows == 0


def _select_many_types(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(
        "label", "id", "id % 2 = 0 as even", "id / 2 as half", "cast(id as decimal(10, 2)) as price",
        "timestamp_micros(id) as at", "date_from_unix_date(id) as day", "cast(string(id) as binary) as raw",
        "array(named_struct('a', id, 'b', null)) as parts", "cast(null as string) as nothing",
    )  # fmt: skip


def test_either_engine_continues_the_checkpoint_of_the_other_and_writes_the_same_rows(
    feed: TableFeed,
) -> None:
    triggers = {"a": NOW, "b": CONTINUOUS, "c": CONTINUOUS, "d": NOW}
    for label, trigger in triggers.items():
        feed.add_ids(0, 4, label)
        running = feed.start(_select_many_types, trigger=trigger)
        if trigger is CONTINUOUS:
            running.processAllAvailable()
            assert running.stop()
        else:
            running.awaitTermination()
    written = rows(feed.url, "t")
    assert Counter(label for label, *_ in written) == dict.fromkeys(triggers, 4)
    assert len({repr(row[1:]) for row in written}) == 4, "one for each id"


@pytest.mark.parametrize(
    "is_first",
    [
        # `test_queries` runs this case among the fast tests.
        pytest.param(True, id="the first epoch", marks=pytest.mark.soak),
        pytest.param(False, id="a later epoch"),
    ],
)
def test_the_micro_batch_engine_recovers_an_epoch_that_only_the_table_has(
    feed: TableFeed, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The driver of the continuous query dies after the commit to the table."""
    running = feed.start()
    if not is_first:
        feed.add_ids(0, 3)
        running.processAllAvailable()
    crash_after(monkeypatch, running.execution, running.execution.sink, "commit")
    feed.add_ids(3, 6)
    assert running.execution.join(TIMEOUT)
    assert isinstance(running.execution.failure, SimulatedCrash)
    committed = running.execution.checkpoint.last_commit()
    assert running.execution.sink.newest().number == (0 if committed is None else committed + 1)
    feed.add_ids(6, 9)
    feed.start(trigger=NOW).awaitTermination()
    assert rows(feed.url, "t", "id") == [(i,) for i in range(3 if is_first else 0, 9)]
    # The recovered epoch, and a micro-batch with the remaining rows.
    assert running.execution.checkpoint.last_commit() == (1 if committed is None else committed + 2)
    assert feed.store.consumer("c").lag("in").rows == 0


def test_an_existing_key_ends_the_query_and_no_row_of_the_epoch_is_written(feed: TableFeed) -> None:
    running = feed.start(sink=feed.table("t", "id"))
    feed.add_ids(0, 3, "first")
    running.processAllAvailable()
    feed.add_ids(2, 5, "second")
    with pytest.raises(TableRefusedError, match="already has a row with the key") as refused:
        running.awaitTermination(TIMEOUT)
    assert refused.value.condition == "TABLE_REFUSED.KEY_EXISTS"
    assert rows(feed.url, "t") == [(0, "first"), (1, "first"), (2, "first")]
    assert feed.store.consumer("c").lag("in").rows == 3


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_table_dropped_during_a_query_ends_it_with_an_error_that_names_the_table(
    feed: TableFeed, guarantee: str
) -> None:
    running = feed.start(guarantee=guarantee)
    feed.add_ids(0, 3)
    running.processAllAvailable()
    feed.drop_table()
    feed.add_ids(3, 5)
    with pytest.raises(
        TableRefusedError, match=r'"t" has been dropped or renamed since the query started'
    ) as caught:
        running.awaitTermination(TIMEOUT)
    assert caught.value.condition == "TABLE_REFUSED.TABLE_GONE"
    restarted = feed.start(guarantee=guarantee)
    restarted.processAllAvailable()
    assert rows(feed.url, "t", "id") == [(3,), (4,)]


def test_staged_rows_of_crashed_runs_are_removed_when_the_next_run_starts(feed: TableFeed) -> None:
    feed.add_ids(0, 3)
    running = feed.start()
    running.processAllAvailable()
    running.stop()
    layout = feed.store.database.run(lambda tx: _layout(tx, feed.url))
    columns = database_schema(projected_schema(layout), layout.dialect)
    chunk = pa.RecordBatch.from_pydict({"c0": [7], "c1": ["dead"]}, schema=columns)
    for number in (1, 1000):
        stage = SegmentStage.of(layout, columns, running.id, number)
        stage.stage_chunk(feed.store.database, Attempt(running.id, number, 0, f"dead {number}"), chunk, 0)
    assert feed.count_staged() == 2
    running = feed.start()
    assert feed.count_staged() == 0
    feed.add_ids(3, 5)
    running.processAllAvailable()
    assert rows(feed.url, "t", "id") == [(i,) for i in range(5)]


def _layout(tx: Transaction, url: str) -> Layout:
    return layout_of(resolve(tx, named(url, "t")), SCHEMA, (), tx.dialect)


def test_many_rows_of_one_epoch_are_staged_in_chunks(feed: TableFeed) -> None:
    count = 300_000
    feed.queue.append(pa.table({"id": range(count), "label": [""] * count}, schema=SCHEMA))
    running = feed.start()
    running.processAllAvailable()
    statement = f"select count(*), count(distinct id), sum(id) from {sql_name(feed.url, 't')}"
    assert query(feed.url, statement) == [(count, count, count * (count - 1) // 2)]


@one_store
def test_unsupported_modes_tables_and_guarantees_are_refused_before_the_query_starts(
    feed: TableFeed, tmp_path: Path
) -> None:
    with pytest.raises(
        ContinuousRefusedError, match=r"output mode 'update' replaces rows of TableSink\('t'\)"
    ) as caught:
        feed.start(sink=feed.table("t", "id"), mode="update")
    assert caught.value.condition == "CONTINUOUS_REFUSED.SINK"
    with pytest.raises(ContinuousRefusedError, match="applies changes"):
        feed.start(sink=feed.table("t", "id", apply_changes=True))
    with pytest.raises(ContinuousRefusedError, match="is a Delta table"):
        feed.start(sink=penstock.TableSink("t", url=f"delta://{tmp_path}/tables"))
    with pytest.raises(
        ContinuousRefusedError, match="rows are repeated after a failure, when their keys exist already"
    ):
        feed.start(sink=feed.table("t", "id"), guarantee="at_least_once")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*output mode append, not 'complete'"):
        feed.start(mode="complete")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*exactly_once or at_least_once"):
        feed.start(lambda frame: frame.select("id"), guarantee="idempotent")
    assert not query(feed.url, "select name from sqlite_schema where name = 't'")


def test_an_incompatible_table_is_refused_before_the_query_starts(feed: TableFeed) -> None:
    query(feed.url, f"create table {sql_name(feed.url, 't')} (id integer, label integer)")
    with pytest.raises(SchemaMismatchError, match=r"column .label. is (integer|INTEGER)"):
        feed.start()
    with pytest.raises(SchemaMismatchError, match="the table has no column 'other'"):
        feed.start(lambda frame: frame.selectExpr("id as other"))
    assert not feed.running


@one_store
def test_a_null_key_ends_the_query(feed: TableFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.continuous.driver import execution

    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    running = feed.start(sink=feed.table("t", "label"))
    feed.add({"id": 1, "label": None})
    with pytest.raises(TableRefusedError, match="no value in 'label'"):
        running.awaitTermination(TIMEOUT)
    wait_until(lambda: not running.isActive, TIMEOUT, "the query has ended")
    assert rows(feed.url, "t") == []


@pytest.mark.parametrize("target", ["table", "queue"])
def test_micro_batches_continue_after_an_epoch_missing_from_the_checkpoint(
    feed: TableFeed, target: str
) -> None:
    """The driver of the continuous query crashed after the sink's commit, before the checkpoint's entries."""
    sink: Any = feed.table("t")
    if target == "queue":
        out = feed.store.create_queue("out", SCHEMA)
        sink = penstock.QueueSink("out", feed.url)
    for start in (0, 5):
        feed.add_ids(start, start + 5)
        running = feed.start(sink=sink)
        running.processAllAvailable()
        assert running.stop()
    for folder in ("offsets", "commits"):
        newest = max((feed.folder / "ck" / folder).glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
    feed.add_ids(10, 15)
    feed.start(sink=sink, trigger=NOW).awaitTermination()
    written = (
        [row_id for row_id, _ in rows(feed.url, "t")]
        if target == "table"
        else out.read(0, 0)["id"].to_pylist()
    )
    assert sorted(written) == list(range(15))
