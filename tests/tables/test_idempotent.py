"""Tables whose rows are identified by their origin, and stored once however often they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    CommitRefusedError,
    InvalidInputError,
    InvalidOptionError,
    SchemaMismatchError,
    TableRefusedError,
)
from penstock.testing import replay_last_batch
from tests.support.spark_queues import one_store
from tests.support.sql_tables import NOW, Feed, query, rows, sql_name

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


class Copy(Feed):
    """A queue with its rows' places, and the query that copies it."""

    def pipeline(self, sink: penstock.TableSink, transform: Any = None, **more: Any) -> penstock.Pipeline:
        options = {"includeMetadataColumns": more.pop("places", True)}
        stream = penstock.stream(self.spark, penstock.QueueSource("in", "c", self.url, options=options))
        if transform is not None:
            stream = stream.transform(transform)
        return stream.write(sink, guarantee="idempotent", output_mode=more.pop("mode", "append"))

    def ids(self) -> list[int]:
        return [row[0] for row in rows(self.url, "copy", "id")]


@pytest.fixture
def feed(spark: SparkSession, store_url: str, tmp_path: Path) -> Copy:
    return Copy(spark, store_url, tmp_path, SCHEMA)


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"name {number}"}


def test_a_repeated_micro_batch_adds_nothing(feed: Copy) -> None:
    sink = feed.table("copy")
    feed.add(row(1), row(2)).run(sink, lambda frame: frame.drop("_timestamp"))
    replay_last_batch(feed.folder / "ck")
    feed.add(row(3)).run(sink, lambda frame: frame.drop("_timestamp"))
    assert feed.ids() == [1, 2, 3]
    assert feed.store.consumer("c").lag("in").rows == 0


def test_a_partly_written_micro_batch_is_completed(feed: Copy) -> None:
    """As after a run that died: the next one, even with a new checkpoint, begins where the consumer
    stands.
    """
    feed.add(*map(row, range(6))).run(feed.table("copy"), lambda frame: frame.where("id % 2 = 0"))
    query(feed.url, f"delete from {sql_name(feed.url, 'copy')} where id = 4")
    feed.store.consumer("c").seek("in", to="earliest")
    feed.run(feed.table("copy"), checkpoint="new")
    assert feed.ids() == [0, 1, 2, 3, 4, 5]


def test_a_recreated_queue_has_rows_of_its_own(feed: Copy) -> None:
    feed.add(row(1)).run(feed.table("copy"))
    feed.store.drop_queue("in", force=True)
    feed.queue = feed.store.create_queue("in", SCHEMA)
    feed.store.create_consumer("d").register("in")
    feed.add(row(2))
    source = penstock.QueueSource("in", "d", feed.url, options={"includeMetadataColumns": True})
    penstock.stream(feed.spark, source).write(feed.table("copy"), guarantee="idempotent").start(
        checkpoint=feed.folder / "d", trigger=NOW
    ).awaitTermination()
    assert feed.ids() == [1, 2]


def test_several_output_rows_for_one_input_row_are_refused(feed: Copy) -> None:
    feed.add(row(1))
    with pytest.raises(TableRefusedError, match="_row_index' = 0") as caught:
        feed.run(feed.table("copy"), lambda frame: frame.selectExpr("*", "explode(array(1, 2)) as part"))
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    assert feed.store.consumer("c").lag("in").rows == 1


@one_store
def test_unsupported_queries_are_refused_before_they_start(feed: Copy) -> None:
    sink = feed.table("copy")
    with pytest.raises(InvalidInputError, match=r"METADATA_COLUMNS_MISSING\].*includeMetadataColumns"):
        feed.run(sink, places=False)
    with pytest.raises(CommitRefusedError, match=r"NOT_IDEMPOTENT\].*Repartition"):
        feed.run(sink, lambda frame: frame.repartition("id"))
    with pytest.raises(InvalidInputError, match=r"SEVERAL_READS\].*reads its queue once"):
        feed.run(sink, lambda frame: frame.union(frame))
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*output mode append"):
        feed.run(feed.table("copy", "id"), mode="update")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*leave keys out"):
        feed.run(feed.table("copy", "id"))
    query(feed.url, f"create table {sql_name(feed.url, 'other')} (id integer, name text)")
    with pytest.raises(SchemaMismatchError, match="_generation"):
        feed.run(feed.table("other"))
