"""Debezium events that cannot be read become dead letters or fail the query, with reason and position."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.changes.debezium import DebeziumFeed
from penstock.errors import (
    InvalidChangelogSchemaError,
    InvalidChangeOptionError,
    QueueNotFoundError,
    SchemaMismatchError,
)
from penstock.json_text import Json
from penstock.testing import replay_last_batch
from tests.changes.debezium.feed_rows import ORDERS, kinds, letters
from tests.support.change_frames import Sink
from tests.support.debezium_events import NOW, ROW, TYPES, postgres, topic

PLACEHOLDER = "__debezium_unavailable_value"
HEARTBEAT = json.dumps({"ts_ms": NOW})
REFUSED = [
    ("nonsense", "it is not a JSON object"),
    ("", "it is not a JSON object"),
    ("[1]", "it is not a JSON object"),
    ('{"op":"c"', "it is not a JSON object"),
    (']},{"events":[', "it is not a JSON object"),
    (f"{postgres('c', after=ROW)}{postgres('c', after=ROW)}", "there is more text after its JSON object"),
    (f"{postgres('c', after=ROW)}\n{{}}", "there is more text after its JSON object"),
    (f"{postgres('c', after=ROW)},{postgres('c', after=ROW)}", "there is more text after its JSON object"),
    (f"{postgres('c', after=ROW)}]", "there is more text after its JSON object"),
    (
        f'{{"schema":null,"payload":{postgres("c", after=ROW)}}}null',
        "there is more text after its JSON object",
    ),
    (postgres("c", after=ROW)[:-9], "it is not a JSON object"),
    ("{}", "op is missing"),
    (json.dumps({"id": 1, "name": "flat"}), "ExtractNewRecordState has flattened it"),
    (postgres("t"), "truncates the table"),
    (
        json.dumps({"source": {"file": "f"}, "ts_ms": NOW, "ddl": "DROP TABLE orders"}),
        "do not read the schema change topic",
    ),
    (json.dumps({"ts_ms": NOW, "id": 1}), "op is missing"),
    (json.dumps({"status": "BEGIN", "id": 1, "ts_ms": NOW}), "op is missing"),
    (postgres("m", after=ROW), "op is not one of c, r, u, d: m"),
    (postgres("c"), "after is missing"),
    (postgres("d"), "REPLICA IDENTITY is NOTHING"),
    (postgres("c", after=ROW, lsn=None), "source.lsn is missing"),
    (postgres("c", after=ROW, lsn="x"), "the wrong type"),
    (
        postgres("c", after=ROW, lsn=5, ts_ms=0, ts_us=None).replace(f'"ts_ms": {NOW + 500}', '"ts_ms": 0'),
        "source.ts_ms is missing",
    ),
    (
        postgres("c", after=ROW, ts_ms=2**63 - 1, ts_us=2**63 - 1).replace(
            f'"ts_ms": {NOW + 500}', '"ts_ms": null'
        ),
        "source.ts_ms is missing",
    ),
    (postgres("c", after={**ROW, "id": None}), "after.id is missing or null"),
    (postgres("d", before={**ROW, "id": None}), "before.id is missing or null"),
    (postgres("c", after={**ROW, "id": "x"}), "after.id cannot be read as bigint: x"),
    (postgres("c", after={**ROW, "id": 2**63}), "after.id cannot be read as bigint"),
    (postgres("c", after={**ROW, "i": 1.5}), "after.i cannot be read as int: 1.5"),
    (postgres("c", after={**ROW, "s": 70_000}), "after.s cannot be read as smallint"),
    (postgres("c", after={**ROW, "price": "12.345"}), "after.price cannot be read"),
    (postgres("c", after={**ROW, "price": "123456789.00"}), "after.price cannot be read"),
    (postgres("u", before={**ROW, "price": "x"}, after=ROW), "before.price cannot be read"),
    (postgres("c", after={**ROW, "d": "yesterday"}), "after.d cannot be read as date"),
    (postgres("c", after={**ROW, "d": 10**12}), "after.d cannot be read as date"),
    (postgres("c", after={**ROW, "t": "2023-11-14T23:13:20"}), "after.t cannot be read as timestamp"),
    (postgres("c", after={**ROW, "t": 10**15}), "after.t cannot be read as timestamp, which has to be text"),
    (postgres("c", after={**ROW, "n": 9 * 10**18}), "after.n cannot be read as timestamp_ntz"),
    (postgres("c", after={**ROW, "n": 10**18}), "after.n cannot be read as timestamp_ntz"),
    (postgres("c", after={**ROW, "ok": 2}), "after.ok cannot be read as boolean"),
    (postgres("c", after={**ROW, "b": "?"}), "after.b cannot be read as binary"),
    (postgres("c", after={**ROW, "tags": 5}), "the wrong type"),
    (postgres("c", after={**ROW, "more": {"a": "x"}}), "after.more.a cannot be read as int: x"),
    (postgres("c", after="row"), "the wrong type"),
    (postgres("u", after={**ROW, "text": PLACEHOLDER}), "after.text is an unchanged TOAST value"),
    (
        postgres("u", after={**ROW, "b": base64.b64encode(PLACEHOLDER.encode()).decode()}),
        "after.b is an unchanged TOAST value",
    ),
]


def test_a_row_whose_columns_differ_from_the_schema_is_refused(spark: SparkSession, url: str) -> None:
    """What is left is the rows that have just the columns of the schema: no value of theirs is lost, and none
    is made up."""
    new: list[Json] = [
        {"id": 1, "name": "a", "note": "added"},
        {"id": 2},
        {"id": 3, "label": "renamed"},
        {"id": 4, "name": None},
    ]
    events = [postgres("c", after=row, lsn=row["id"], wrapped=row["id"] == 3) for row in new]
    # What the row before lacks does not matter, as a table may log no more than its key.
    events.append(postgres("u", before={"id": 5}, after={"id": 5, "name": "b"}, lsn=5))
    feed = DebeziumFeed(ORDERS, "id", dead_letters=penstock.QueueSink("dead", url=url))
    found = kinds(feed.unwrap(topic(spark, events)), "id", "name")
    assert [row[3:] for row in found] == [(4, None), (5, None), (5, "b")]
    assert [letter["reason"].split(":")[0] for letter in letters(url)] == [
        "after has a column note that the schema lacks",
        "after has no column name, which was dropped or renamed, or added later",
        "after has no column name, which was dropped or renamed, or added later",
    ]
    lenient = DebeziumFeed(ORDERS, "id", optional="name", ignored=["note", "label"])
    assert [row[3:] for row in kinds(lenient.unwrap(topic(spark, events[:4])), "id", "name")] == [
        (1, "a"),
        (2, None),
        (3, None),
        (4, None),
    ]


def test_invalid_events_become_dead_letters_with_reason_and_position(spark: SparkSession, url: str) -> None:
    events = [event for event, _ in REFUSED]
    feed = DebeziumFeed(TYPES, "id", dead_letters=penstock.QueueSink("dead", url=url))
    good = postgres("c", after=ROW)
    assert feed.unwrap(topic(spark, [*events, good, None])).count() == 1
    found = letters(url)
    assert [letter["offset"] for letter in found] == list(range(len(events)))
    for letter, (event, reason) in zip(found, REFUSED, strict=True):
        assert reason in letter["reason"], letter
        assert (letter["value"], letter["topic"], letter["partition"]) == (event, "shop.public.orders", 0)


def test_a_dead_letter_queue_may_get_columns(spark: SparkSession, url: str) -> None:
    with penstock.connect(url) as store:
        store.queue("dead").add_columns(pa.field("handled", pa.bool_()))
    feed = DebeziumFeed(ORDERS, "id", dead_letters=penstock.QueueSink("dead", url=url))
    assert feed.unwrap(topic(spark, ["bad"])).count() == 0
    assert [(letter["offset"], letter["handled"]) for letter in letters(url)] == [(0, None)]


def test_without_a_dead_letter_queue_the_query_fails_with_reason_and_position(spark: SparkSession) -> None:
    events = [postgres("c", after={"id": 1, "name": "a"}), postgres("t")]
    with pytest.raises(Exception, match="truncates the table") as error:
        DebeziumFeed(ORDERS, "id").unwrap(topic(spark, events)).count()
    assert "UNREADABLE_EVENT" in str(error.value)
    assert "topic shop.public.orders, partition 0, offset 1" in str(error.value)


def test_non_nullable_columns_are_required_in_whole_rows_only(spark: SparkSession, url: str) -> None:
    feed = DebeziumFeed(
        "id bigint not null, name string not null", "id", dead_letters=penstock.QueueSink("dead", url=url)
    )
    events = [postgres("d", before={"id": 1}), postgres("c", after={"id": 1})]
    assert kinds(feed.unwrap(topic(spark, events)), "name") == [("delete", 1, 2, None)]
    assert [letter["reason"] for letter in letters(url)] == ["after.name is missing or null"]


def test_wrong_arguments_are_refused_before_the_query_starts(spark: SparkSession, url: str) -> None:
    wrong: list[tuple[Json, type[Exception], str]] = [
        ({"connector": "postgres"}, InvalidChangeOptionError, "postgresql"),
        ({"decimals": "exact"}, InvalidChangeOptionError, "precise"),
        ({"timestamps": {"name": "seconds"}}, InvalidChangeOptionError, "micros"),
        ({"timestamps": {"nme": "millis"}}, InvalidChangelogSchemaError, "'name'"),
        ({"version": "lsn"}, InvalidChangeOptionError, "source.ts_ms"),
        ({"row_id": "ident"}, InvalidChangelogSchemaError, "'ident'"),
        ({"optional": "nme"}, InvalidChangelogSchemaError, "'name'"),
        ({"schema": "id bigint, _sequence int"}, InvalidChangelogSchemaError, "rename the column"),
        ({"value": "valu"}, InvalidChangelogSchemaError, "'value'"),
        ({"dead_letters": penstock.QueueSink("none", url=url)}, QueueNotFoundError, "none"),
        (
            {"dead_letters": penstock.QueueSink("other", url=url)},
            SchemaMismatchError,
            r"TABLE_DIFFERS\].*DEAD_LETTERS",
        ),
    ]
    with penstock.connect(url) as store:
        store.create_queue("other", pa.schema([("id", pa.int64())]))
    df = topic(spark, [])
    for given_wrong, kind, parts in wrong:
        with pytest.raises(kind, match=parts):
            DebeziumFeed(**{"schema": ORDERS, "row_id": "id", **given_wrong}).unwrap(df)


def test_a_repeated_micro_batch_writes_each_dead_letter_once_and_counts_tombstones(
    spark: SparkSession, tmp_path: Path, url: str
) -> None:
    source, sink = tmp_path / "in", Sink(tmp_path)
    source.mkdir()
    progress: list[Json] = []

    def write(number: int, *events: str | None) -> None:
        columns = {
            "value": pa.array(events, pa.string()),
            "offset": pa.array(range(number * 10, number * 10 + len(events)), pa.int64()),
        }
        pq.write_table(pa.table(columns), source / f"{number}.parquet")

    def run() -> Counter[object]:
        feed = DebeziumFeed(ORDERS, "id", dead_letters=penstock.QueueSink("dead", url=url))
        frame = spark.readStream.schema("value string, offset bigint").option("maxFilesPerTrigger", 2)
        changes = feed.read(frame.parquet(str(source)))
        sink.batches.clear()
        query = (
            changes.select("id", "_change_type")
            .writeStream.foreachBatch(sink._keep)
            .option("checkpointLocation", str(sink.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress.extend(
            each.observedMetrics["debezium"].asDict() for each in query.recentProgress if each.observedMetrics
        )
        return sink.rows()

    write(0, postgres("c", after={"id": 1, "name": "a"}), "bad", None, HEARTBEAT)
    write(1, "worse", postgres("c", after={"id": 2, "name": "b"}))
    assert run() == Counter([(1, "insert"), (2, "insert")])
    assert [letter["offset"] for letter in letters(url)] == [1, 10]
    assert progress == [{"events": 6, "tombstones": 1, "others": 1}]

    assert replay_last_batch(sink.checkpoint) == 0
    assert run() == Counter([(1, "insert"), (2, "insert")])
    assert [letter["offset"] for letter in letters(url)] == [1, 10]

    write(2, "worst")
    run()
    assert [letter["offset"] for letter in letters(url)] == [1, 10, 20]
    assert letters(url)[2]["topic"] is None
