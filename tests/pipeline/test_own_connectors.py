"""User-defined sources and sinks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

import penstock
from penstock.continuous.connectors.protocol import (
    ContinuousSink,
    Epoch,
    SinkDriver,
    SinkEpoch,
    SinkWriter,
    WriterFactory,
)
from penstock.errors import ContinuousRefusedError, InvalidInputError, InvalidOptionError
from penstock.json_text import Json, JsonValue
from tests.support.spark_queues import fill, make_queue, one_store

NOW = penstock.Trigger.available_now()
SCHEMA = """
    create table if not exists totals (name text primary key, rows integer not null);
    create table if not exists committed (app_id text, batch_id integer, primary key (app_id, batch_id));
"""


class Interrupted(Exception):
    pass


@dataclass(frozen=True)
class Totals(penstock.BatchSink):
    """Counts of rows by name, in a database that Penstock knows nothing of."""

    guarantees = ("exactly_once",)

    path: str
    dies_at: int = -1
    """The micro-batch after whose commit it fails, before Spark logs it."""

    def write(self, rows: DataFrame, batch: penstock.MicroBatch) -> None:
        counts = [(row["name"], row["count"]) for row in rows.groupBy("name").count().collect()]
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("begin immediate")
            if not self._enter(connection, batch):
                return
            connection.executemany(
                "insert into totals values (?, ?) on conflict do update set rows = rows + excluded.rows",
                counts,
            )
        if batch.batch_id == self.dies_at:
            raise Interrupted(f"after micro-batch {batch.batch_id}")

    def _enter(self, connection: sqlite3.Connection, batch: penstock.MicroBatch) -> bool:
        ids = (batch.app_id, batch.batch_id)
        return connection.execute("insert or ignore into committed values (?, ?)", ids).rowcount > 0


@dataclass(frozen=True)
class Names(penstock.Source):
    """Rows of a folder of JSON files."""

    folder: str

    def to_df(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("id bigint, name string").json(self.folder)


@dataclass(frozen=True)
class Files(penstock.Sink, ContinuousSink):
    """A file of ids for each epoch; its name makes a repeat a no-op."""

    guarantees = ("exactly_once",)

    folder: Path

    def stream_writer(self, rows: DataFrame, settings: penstock.WriteSettings) -> Any:
        raise NotImplementedError

    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> SinkDriver:
        return FilesDriver(self.folder)

    def ids(self) -> list[int]:
        return sorted(int(line) for file in self.folder.iterdir() for line in file.read_text().split())


@dataclass(frozen=True)
class FilesDriver(SinkDriver):
    folder: Path

    @property
    def description(self) -> str:
        return "files"

    def check(self, schema: StructType) -> None:
        assert schema.names == ["id", "name"]

    def writer_factory(self) -> WriterFactory:
        return Lines()

    def newest(self) -> SinkEpoch:
        return SinkEpoch(max((int(file.stem) for file in self.folder.iterdir()), default=-1))

    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        ids = sorted(i for lines in epoch.attempts.values() for i in lines)
        (self.folder / f"{epoch.number}.txt").write_text("\n".join(map(str, ids)))


class Lines(WriterFactory):
    def open(self, task: int) -> SinkWriter:
        return LinesWriter(task)


class LinesWriter(SinkWriter):
    def __init__(self, task: int) -> None:
        self._task = str(task)
        self._ids: list[int] = []

    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        self._ids += [i for batch in rows for i in batch["id"].to_pylist()]

    def end(self, epoch: int) -> Json:
        ids, self._ids = self._ids, []
        return {self._task: ids}

    def close(self) -> None:
        pass


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "totals.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
    return path


def totals(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("select name, rows from totals"))


def source(store: penstock.Store, url: str) -> penstock.QueueSource:
    make_queue(store, "in")
    store.create_consumer("c").register("in")
    fill(store.queue("in"), range(30))
    return penstock.QueueSource("in", "c", url, options={"maxRowsPerTrigger": 10})


def by_parity(frame: DataFrame) -> DataFrame:
    return frame.withColumn("name", F.expr("if(id % 3 = 0, 'threes', 'others')"))


@one_store
def test_a_user_defined_sink_is_exactly_once_through_micro_batch_ids(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path, database: Path
) -> None:
    rows = penstock.stream(spark, source(store, store_url)).transform(by_parity)
    dying = rows.write(Totals(str(database), dies_at=1)).start(checkpoint=tmp_path / "ck", trigger=NOW)
    with pytest.raises(Exception, match="after micro-batch 1"):
        dying.awaitTermination()
    assert totals(database) == {"threes": 7, "others": 13}
    again = rows.write(Totals(str(database))).start(checkpoint=tmp_path / "ck", trigger=NOW)
    again.awaitTermination()
    assert totals(database) == {"threes": 10, "others": 20}
    assert store.consumer("c").lag("in").rows == 0


@one_store
def test_a_user_defined_source_is_read(
    spark: SparkSession, store: penstock.Store, tmp_path: Path, database: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.json").write_text('{"id": 1, "name": "x"}\n{"id": 2, "name": "y"}\n')
    query = (
        penstock.stream(spark, Names(str(tmp_path / "files")))
        .write(Totals(str(database)))
        .start(checkpoint=tmp_path / "ck", trigger=NOW)
    )
    query.awaitTermination()
    assert totals(database) == {"x": 1, "y": 1}


@one_store
def test_a_guarantee_that_a_user_defined_sink_does_not_give_is_refused(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    stream = penstock.stream(spark, source(store, store_url))
    sink = Totals("totals.db")
    assert stream.write(sink).guarantee == "exactly_once"
    with pytest.raises(
        InvalidOptionError, match=r"OPTION.VALUE\] Totals takes guarantee exactly_once, not 'at_least_once'"
    ):
        stream.write(sink, guarantee="at_least_once")
    with pytest.raises(
        InvalidOptionError, match=r"OPTION.VALUE\] Totals takes output mode append, not 'complete'"
    ):
        stream.write(sink, output_mode="complete")
    with pytest.raises(InvalidOptionError, match=r"a queue never change.* not 'update'.* TableSink"):
        stream.write(penstock.QueueSink("q", url=store_url), output_mode="update")
    with pytest.raises(ContinuousRefusedError, match="Totals only supports micro-batches"):
        stream.write(sink).start(trigger=penstock.Trigger.continuous())
    with pytest.raises(InvalidInputError, match=r"another penstock\.Sink"):
        stream.write("totals.db")  # type: ignore[arg-type]  # on purpose


@one_store
def test_a_user_defined_continuous_sink_gets_each_epoch(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    (tmp_path / "epochs").mkdir()
    sink = Files(tmp_path / "epochs")
    stream = penstock.stream(spark, source(store, store_url)).transform(
        lambda frame: frame.where("id % 2 = 0")
    )
    trigger = penstock.Trigger.continuous("50 ms")
    for more in (range(30, 30), range(30, 40)):
        query = stream.write(sink).start(checkpoint=tmp_path / "ck", trigger=trigger)
        fill(store.queue("in"), more)
        query.processAllAvailable()
        assert query.stop()
    assert sink.ids() == list(range(0, 40, 2))


def test_a_continuous_query_that_its_sink_refuses_leaves_no_temporary_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(penstock.FunctionSink):
        def continuous_driver(self, *_: object) -> Any:
            raise ValueError("no such function")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipeline = penstock.stream(spark, penstock.RateSource()).write(Refusing(print))
    with pytest.raises(ValueError, match="no such function"):
        pipeline.start(trigger=penstock.Trigger.continuous("100 ms"))
    assert not list(tmp_path.glob("penstock-continuous-*"))


def test_a_function_that_takes_a_dataframe_and_a_number_is_refused_before_the_start() -> None:
    def show(rows: object, batch: int) -> None: ...

    with pytest.raises(InvalidInputError, match=r"FUNCTION_PARAMETERS.*'show' does not take just one"):
        penstock.FunctionSink(show)  # type: ignore[arg-type]
    assert penstock.FunctionSink(print).function is print
