"""Change rows of Debezium events are ordered by position, and repeated events count once."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import SparkSession

import penstock
from penstock.changes.debezium import DebeziumFeed
from penstock.errors import (
    InvalidChangelogSchemaError,
)
from tests.changes.debezium.feed_rows import ORDERS, kinds
from tests.support.change_frames import Sink
from tests.support.debezium_events import NOW, postgres, topic


@pytest.mark.parametrize("compute_updates", [True, False])
def test_repeated_events_leave_net_changes_as_they_are(spark: SparkSession, compute_updates: bool) -> None:
    """A connector that is started again sends the end of its log again, before new events."""
    chance = random.Random(7)
    events: list[str | None] = []
    state: dict[int, object] = {}
    for lsn in range(5, 400):
        key, value = chance.randrange(120), chance.choice([1.5, "NaN"])
        old = {"id": key, "f": state.get(key)}
        if key in state and chance.random() < 0.5:
            del state[key]
            events += [postgres("d", before=old, lsn=lsn), None]
        else:
            op = "u" if key in state else chance.choice("cr")
            before = old if op == "u" and chance.random() < 0.5 else None
            state[key] = value
            events.append(postgres(op, before=before, after={"id": key, "f": value}, lsn=lsn))
    sent: list[str | None] = []
    for first in range(0, len(events), 40):
        sent += events[max(0, first - chance.randrange(120)) : first + 40]
    assert len(sent) > len(events)
    feed = DebeziumFeed("id bigint not null, f double", "id")

    def net(sent: list[str | None]) -> list[str]:
        frame = topic(spark, sent).repartition(2)
        options = {"deduplication_mode": "netChanges", "compute_updates": compute_updates}
        return list(map(str, kinds(feed.read(frame, **options), "id", "f")))

    assert net(sent) == net(events) != []


@pytest.mark.parametrize("connector", ["postgresql", "mysql", "mariadb", "sqlserver"])
def test_repeated_events_of_each_connector_count_once(spark: SparkSession, connector: str) -> None:
    where: dict[str, object] = {"lsn": 5, "connector": connector}
    where |= {"file": "log.1", "pos": 4, "scn": "7", "ssn": 1, "commit_lsn": "0a:01", "change_lsn": "0a:02"}
    event = postgres("c", after={"id": 1, "name": "a"}, event_serial_no=1, **where)
    read = DebeziumFeed(ORDERS, "id", connector=connector).read
    net = read(topic(spark, [event, event, event]), deduplication_mode="netChanges")
    assert [(row._change_type, row.name) for row in net.collect()] == [("insert", "a")]


def test_two_events_at_one_position_are_refused_as_repeated(spark: SparkSession) -> None:
    events = [postgres("c", after={"id": 1, "name": name}, lsn=7) for name in "ab"]
    feed = DebeziumFeed(ORDERS, "id")
    with pytest.raises(PythonException) as caught:
        feed.read(topic(spark, events), deduplication_mode="netChanges").collect()
    assert "CHANGELOG_CONTRACT_VIOLATION.REPEATED_CHANGE_DIFFERS" in str(caught.value)


def test_the_version_of_a_transaction_does_not_identify_an_event(spark: SparkSession) -> None:
    assert DebeziumFeed(ORDERS, "id").contract.repeated_changes
    assert not DebeziumFeed(ORDERS, "id", version="source.ts_ms").contract.repeated_changes
    assert not DebeziumFeed(ORDERS, "id", connector="oracle").contract.repeated_changes


def test_a_contract_with_repeated_changes_needs_their_order() -> None:
    with pytest.raises(InvalidChangelogSchemaError) as caught:
        penstock.ChangeContract("id", repeated_changes=True)
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.REPEATED_WITHOUT_SEQUENCE"


def test_rows_of_an_incremental_snapshot_have_one_position_and_several_times(spark: SparkSession) -> None:
    def read(key: int, name: str, time: int) -> str:
        return postgres("r", after={"id": key, "name": name}, lsn=50, ts_us=NOW * 1000 + time)

    change = postgres("u", after={"id": 2, "name": "new"}, lsn=60)
    # The chunk is read again after a restart of the connector.
    events = [read(1, "a", 1), read(2, "b", 2), change, read(1, "a", 7), read(2, "b", 8)]
    net = DebeziumFeed(ORDERS, "id").read(topic(spark, events), deduplication_mode="netChanges")
    assert sorted((row.id, row._change_type, row.name) for row in net.collect()) == [
        (1, "insert", "a"),
        (2, "insert", "new"),
    ]


def test_rows_of_one_version_are_ordered_by_the_transaction(spark: SparkSession) -> None:
    events = [
        postgres("u", before={"id": 1, "name": "a"}, after={"id": 1, "name": "b"}, lsn=9, order=1, ts_us=NOW),
        postgres("u", before={"id": 1, "name": "b"}, after={"id": 1, "name": "c"}, lsn=8, order=2, ts_us=NOW),
        postgres("d", before={"id": 2, "name": "x"}, lsn=7, order=3, ts_us=NOW),
        postgres("c", after={"id": 2, "name": "y"}, lsn=6, order=4, ts_us=NOW),
    ]
    feed = DebeziumFeed(ORDERS, "id", version="transaction.id", version_type="string")
    net = feed.read(topic(spark, events), deduplication_mode="netChanges", compute_updates=True)
    assert kinds(net, "id", "name") == [
        ("update_preimage", "571:24023128", 2, 1, "a"),
        ("update_postimage", "571:24023128", 5, 1, "c"),
        ("update_preimage", "571:24023128", 6, 2, "x"),
        ("update_postimage", "571:24023128", 9, 2, "y"),
    ]
    by_time = DebeziumFeed(ORDERS, "id", version="source.ts_ms").unwrap(topic(spark, events))
    assert {row[1] for row in kinds(by_time)} == {NOW + lsn for lsn in (6, 7, 8, 9)}


def test_net_changes_of_hours_count_repeated_events_once(spark: SparkSession, tmp_path: Path) -> None:
    source, sink = tmp_path / "in", Sink(tmp_path)
    source.mkdir()
    hour = 3_600_000_000
    first = NOW * 1000 // hour * hour

    def event(op: str, key: int, name: str, hours: float) -> str:
        micros = first + int(hours * hour)
        return postgres(op, after={"id": key, "name": name}, lsn=int(hours * 100), ts_us=micros)

    a, b, c = event("c", 1, "a", 0.1), event("u", 1, "b", 0.2), event("c", 2, "c", 0.3)
    d, e, f = event("u", 1, "d", 1.1), event("u", 2, "e", 3.1), event("u", 1, "f", 6.1)

    def run(number: int, *events: str) -> list[object]:
        pq.write_table(pa.table({"value": pa.array(events)}), source / f"{number}.parquet")
        frame = spark.readStream.schema("value string").parquet(str(source))
        changes = DebeziumFeed(ORDERS, "id").read(
            frame, deduplication_mode="netChanges", net_window="1 hour", watermark_delay="30 minutes"
        )
        sink.batches.clear()
        query = (
            changes.select("_change_type", "id", "name")
            .writeStream.foreachBatch(sink._keep)
            .option("checkpointLocation", str(sink.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(sink.rows().elements())

    assert run(0, a, b, a, c, b) == []
    assert run(1, b, c, a, d) == []
    assert run(2, d, d, e) == [("insert", 1, "b"), ("insert", 2, "c"), ("update_postimage", 1, "d")]
    assert run(3, e, f) == [("update_postimage", 2, "e")]
    with pytest.raises(StreamingQueryException, match="LATE_COMMIT"):
        run(4, c)


def test_a_table_equals_the_source_when_events_arrive_twice_and_in_any_order(
    spark: SparkSession, tmp_path: Path, url: str
) -> None:
    """Several events share a system change number, and only their sequence orders them."""

    def event(op: str, key: int, name: str, scn: int, step: int) -> str:
        row = {"id": key, "name": name}
        images = {"before": row} if op == "d" else {"after": row}
        return postgres(op, lsn=None, connector="oracle", scn=str(scn), ssn=step, **images)

    events = [
        event("c", 1, "a", 5, 1),
        event("u", 1, "b", 5, 2),
        event("c", 2, "a", 5, 3),
        event("d", 2, "a", 5, 4),
        event("c", 3, "a", 5, 5),
        event("u", 3, "b", 5, 6),
        event("d", 3, "b", 6, 1),
        event("c", 3, "c", 6, 2),
    ]
    source = tmp_path / "in"
    source.mkdir()
    for number, places in enumerate(([0, 2, 3, 2], [1, 4], [5, 7, 0], [6, 3, 1])):
        table = pa.table({"value": [events[place] for place in places]})
        pq.write_table(table, source / f"{number}.parquet")
        os.utime(source / f"{number}.parquet", (NOW // 1000 + number,) * 2)
    frame = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).parquet(str(source))
    changes = DebeziumFeed(ORDERS, "id", connector="oracle").unwrap(frame)
    sink = penstock.TableSink("orders", ["id"], url, apply_changes=True)
    query = (
        penstock.stream(spark, changes)
        .write(sink)
        .start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now())
    )
    query.awaitTermination()
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as found:
        assert sorted(found.execute("select id, name from orders")) == [(1, "b"), (3, "c")]


def test_a_version_shared_by_several_events_is_refused_as_order_for_a_table(
    spark: SparkSession, url: str
) -> None:
    feed = DebeziumFeed(ORDERS, "id", version="source.ts_ms")
    changes = feed.unwrap(topic(spark, []))
    refusal = penstock.TableSink("orders", ["id"], url, apply_changes=True).refusal(changes, "append")
    assert "leave version out" in str(refusal)
    own = penstock.TableSink("orders", ["id"], url, apply_changes=True, sequence_by="name")
    assert own.refusal(changes, "append") is None
