"""SQL tables that continuous queries add rows to."""

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
from tests.continuous.copying import Died, will_die_behind
from tests.support.spark_queues import one_store
from tests.support.sql_tables import NOW, Feed, named, query, rows, sql_name
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("turn", pa.string())])
SOON = penstock.Trigger.continuous("50 ms")
PATIENCE = 60


class Filled(Feed):
    """A queue, and continuous queries that add its rows to tables."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        super().__init__(spark, url, folder, SCHEMA)
        self.running: list[Any] = []

    def start(self, transform: Any = None, *, sink: Any = None, trigger: Any = SOON, **more: object) -> Any:
        pipeline = self.pipeline(sink or self.table("t"), transform, **more)
        self.running.append(pipeline.start(checkpoint=self.folder / "ck", trigger=trigger))
        return self.running[-1]

    def add_ids(self, start: int, end: int, turn: str = "") -> None:
        self.add(*({"id": i, "turn": turn} for i in range(start, end)))

    def staged(self) -> int:
        table = "penstock_staged" if self.url.startswith("sqlite") else sql_name(self.url, "staged")
        return int(query(self.url, f"select count(*) from {table}")[0][0])

    def gone(self) -> None:
        query(self.url, f"drop table {sql_name(self.url, 't')}")


@pytest.fixture
def filled(spark: SparkSession, store_url: str, tmp_path: Path) -> Iterator[Filled]:
    found = Filled(spark, store_url, tmp_path)
    yield found
    for each in found.running:
        each.stop(10)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_rows_are_added_to_the_table(filled: Filled, guarantee: str) -> None:
    filled.add_ids(0, 5)
    running = filled.start(lambda frame: frame.where("id % 2 = 0").select("id"), guarantee=guarantee)
    running.processAllAvailable()
    assert rows(filled.url, "t") == [(0,), (2,), (4,)]
    filled.add_ids(5, 10)
    running.processAllAvailable()
    assert rows(filled.url, "t") == [(0,), (2,), (4,), (6,), (8,)]
    assert running.stop()
    assert filled.staged() == 0
    assert filled.store.consumer("c").lag("in").rows == 0


def _of_every_kind(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(
        "turn", "id", "id % 2 = 0 as even", "id / 2 as half", "cast(id as decimal(10, 2)) as price",
        "timestamp_micros(id) as at", "date_from_unix_date(id) as day", "cast(string(id) as binary) as raw",
        "array(named_struct('a', id, 'b', null)) as parts", "cast(null as string) as nothing",
    )  # fmt: skip


def test_either_engine_continues_the_checkpoint_of_the_other_and_writes_the_same_rows(filled: Filled) -> None:
    triggers = {"a": NOW, "b": SOON, "c": SOON, "d": NOW}
    for turn, trigger in triggers.items():
        filled.add_ids(0, 4, turn)
        running = filled.start(_of_every_kind, trigger=trigger)
        if trigger is SOON:
            running.processAllAvailable()
            assert running.stop()
        else:
            running.awaitTermination()
    found = rows(filled.url, "t")
    assert Counter(turn for turn, *_ in found) == dict.fromkeys(triggers, 4)
    assert len({repr(row[1:]) for row in found}) == 4, "one for each id"


@pytest.mark.parametrize(
    "first",
    [
        # As with queues: `test_queries` has it among the fast tests.
        pytest.param(True, id="the first epoch", marks=pytest.mark.soak),
        pytest.param(False, id="a later epoch"),
    ],
)
def test_the_micro_batch_engine_finds_an_epoch_that_only_the_table_has(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The driver of the continuous query dies after the commit to the table."""
    running = filled.start()
    if not first:
        filled.add_ids(0, 3)
        running.processAllAvailable()
    will_die_behind(monkeypatch, running.execution, running.execution.sink, "commit")
    filled.add_ids(3, 6)
    assert running.execution.join(PATIENCE)
    assert isinstance(running.execution.failure, Died)
    committed = running.execution.checkpoint.last_commit()
    assert running.execution.sink.newest().number == (0 if committed is None else committed + 1)
    filled.add_ids(6, 9)
    filled.start(trigger=NOW).awaitTermination()
    assert rows(filled.url, "t", "id") == [(i,) for i in range(3 if first else 0, 9)]
    # The epoch, and a micro-batch for the rest.
    assert running.execution.checkpoint.last_commit() == (1 if committed is None else committed + 2)
    assert filled.store.consumer("c").lag("in").rows == 0


def test_an_existing_key_ends_the_query_and_nothing_of_the_epoch_is_written(filled: Filled) -> None:
    running = filled.start(sink=filled.table("t", "id"))
    filled.add_ids(0, 3, "first")
    running.processAllAvailable()
    filled.add_ids(2, 5, "second")
    with pytest.raises(TableRefusedError, match="already has a row with the key") as refused:
        running.awaitTermination(PATIENCE)
    assert refused.value.condition == "TABLE_REFUSED.KEY_EXISTS"
    assert rows(filled.url, "t") == [(0, "first"), (1, "first"), (2, "first")]
    assert filled.store.consumer("c").lag("in").rows == 3


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_table_dropped_during_the_query_ends_it_and_is_named(filled: Filled, guarantee: str) -> None:
    running = filled.start(guarantee=guarantee)
    filled.add_ids(0, 3)
    running.processAllAvailable()
    filled.gone()
    filled.add_ids(3, 5)
    with pytest.raises(
        TableRefusedError, match=r'"t" has been dropped or renamed since the query started'
    ) as gone:
        running.awaitTermination(PATIENCE)
    assert gone.value.condition == "TABLE_REFUSED.TABLE_GONE"
    again = filled.start(guarantee=guarantee)
    again.processAllAvailable()
    assert rows(filled.url, "t", "id") == [(3,), (4,)]


def test_staged_rows_of_dead_runs_are_removed_when_the_next_one_starts(filled: Filled) -> None:
    filled.add_ids(0, 3)
    running = filled.start()
    running.processAllAvailable()
    running.stop()
    layout = filled.store.database.run(lambda tx: _layout(tx, filled.url))
    columns = database_schema(projected_schema(layout), layout.dialect)
    chunk = pa.RecordBatch.from_pydict({"c0": [7], "c1": ["dead"]}, schema=columns)
    for number in (1, 1000):
        stage = SegmentStage.of(layout, columns, running.id, number)
        stage.stage_chunk(filled.store.database, Attempt(running.id, number, 0, f"dead {number}"), chunk, 0)
    assert filled.staged() == 2
    running = filled.start()
    assert filled.staged() == 0
    filled.add_ids(3, 5)
    running.processAllAvailable()
    assert rows(filled.url, "t", "id") == [(i,) for i in range(5)]


def _layout(tx: Transaction, url: str) -> Layout:
    return layout_of(resolve(tx, named(url, "t")), SCHEMA, (), tx.dialect)


def test_many_rows_of_one_epoch_are_staged_in_parts(filled: Filled) -> None:
    count = 300_000
    filled.queue.append(pa.table({"id": range(count), "turn": [""] * count}, schema=SCHEMA))
    running = filled.start()
    running.processAllAvailable()
    statement = f"select count(*), count(distinct id), sum(id) from {sql_name(filled.url, 't')}"
    assert query(filled.url, statement) == [(count, count, count * (count - 1) // 2)]


@one_store
def test_unsupported_modes_tables_and_guarantees_are_refused_before_the_query_starts(
    filled: Filled, tmp_path: Path
) -> None:
    with pytest.raises(
        ContinuousRefusedError, match=r"output mode 'update' replaces rows of TableSink\('t'\)"
    ) as no:
        filled.start(sink=filled.table("t", "id"), mode="update")
    assert no.value.condition == "CONTINUOUS_REFUSED.SINK"
    with pytest.raises(ContinuousRefusedError, match="applies changes"):
        filled.start(sink=filled.table("t", "id", apply_changes=True))
    with pytest.raises(ContinuousRefusedError, match="is a Delta table"):
        filled.start(sink=penstock.TableSink("t", url=f"delta://{tmp_path}/tables"))
    with pytest.raises(
        ContinuousRefusedError, match="rows are repeated after a failure, when their keys exist already"
    ):
        filled.start(sink=filled.table("t", "id"), guarantee="at_least_once")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*output mode append, not 'complete'"):
        filled.start(mode="complete")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*exactly_once or at_least_once"):
        filled.start(lambda frame: frame.select("id"), guarantee="idempotent")
    assert not query(filled.url, "select name from sqlite_schema where name = 't'")


def test_an_incompatible_table_is_refused_before_the_query_starts(filled: Filled) -> None:
    query(filled.url, f"create table {sql_name(filled.url, 't')} (id integer, turn integer)")
    with pytest.raises(SchemaMismatchError, match=r"column .turn. is (integer|INTEGER)"):
        filled.start()
    with pytest.raises(SchemaMismatchError, match="the table has no column 'other'"):
        filled.start(lambda frame: frame.selectExpr("id as other"))
    assert not filled.running


@one_store
def test_a_null_key_ends_the_query(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.continuous.driver import execution

    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    running = filled.start(sink=filled.table("t", "turn"))
    filled.add({"id": 1, "turn": None})
    with pytest.raises(TableRefusedError, match="no value in 'turn'"):
        running.awaitTermination(PATIENCE)
    wait_until(lambda: not running.isActive, PATIENCE, "the query has ended")
    assert rows(filled.url, "t") == []


@pytest.mark.parametrize("into", ["table", "queue"])
def test_micro_batches_continue_after_an_epoch_missing_from_the_checkpoint(filled: Filled, into: str) -> None:
    """The driver of the continuous query died between the sink's commit and the entries of the checkpoint."""
    sink: Any = filled.table("t")
    if into == "queue":
        out = filled.store.create_queue("out", SCHEMA)
        sink = penstock.QueueSink("out", filled.url)
    for first in (0, 5):
        filled.add_ids(first, first + 5)
        running = filled.start(sink=sink)
        running.processAllAvailable()
        assert running.stop()
    for folder in ("offsets", "commits"):
        newest = max((filled.folder / "ck" / folder).glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
    filled.add_ids(10, 15)
    filled.start(sink=sink, trigger=NOW).awaitTermination()
    found = (
        [each for each, _ in rows(filled.url, "t")] if into == "table" else out.read(0, 0)["id"].to_pylist()
    )
    assert sorted(found) == list(range(15))
