"""Debezium events are decoded into change rows: values by column type, and positions of each connector."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.changes.debezium import DebeziumFeed
from tests.changes.debezium.decimals import to_base64
from tests.changes.debezium.feed_rows import ORDERS, kinds
from tests.support.debezium_events import NOW, ROW, TYPES, mysql, postgres, topic

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - as collect() gives times
PLACEHOLDER = "__debezium_unavailable_value"
HEARTBEAT = json.dumps({"ts_ms": NOW})
READ = {
    **ROW,
    "price": Decimal("12.30"),
    "d": date(2022, 1, 8),
    "t": EPOCH + timedelta(seconds=1_700_000_000, microseconds=123_456),
    "n": EPOCH - timedelta(microseconds=1),
    "b": b"hi",
}


def test_every_operation_with_and_without_a_schema_and_tombstones_are_skipped(spark: SparkSession) -> None:
    old, new = {"id": 1, "name": "a"}, {"id": 1, "name": "b"}
    events = [
        postgres("r", after=old, lsn=1),
        postgres("c", after={"id": 2, "name": "z"}, lsn=2, wrapped=True),
        postgres("u", before=old, after=new, lsn=3, wrapped=True),
        postgres("u", after=old, lsn=4),
        postgres("d", before={"id": 1, "name": None}, lsn=5),
        None,
        "null",
        '{"schema":null,"payload":null}',
    ]
    feed = DebeziumFeed(ORDERS, "id")
    done = feed.unwrap(topic(spark, events))
    assert kinds(done, "id", "name") == [
        ("insert", 1, 3, 1, "a"),
        ("insert", 2, 5, 2, "z"),
        ("update_preimage", 3, 6, 1, "a"),
        ("update_postimage", 3, 7, 1, "b"),
        ("update_postimage", 4, 9, 1, "a"),
        ("delete", 5, 10, 1, None),
    ]
    first = done.where("_commit_version = 1").select("_commit_timestamp").collect()[0][0]
    assert first.replace(tzinfo=UTC).timestamp() == pytest.approx((NOW + 1) / 1000, abs=1e-4)
    assert first.microsecond == 1007
    assert (feed.contract.row_id, feed.contract.whole_commits) == (("id",), False)


def test_columns_of_every_kind_are_read_by_their_types(spark: SparkSession) -> None:
    texts = {
        **ROW,
        "id": 2,
        "price": 12.3,
        "d": "2022-01-08",
        "t": "2023-11-14T23:13:20.123456+01:00",
        "n": "1969-12-31T23:59:59.999999",
        "ok": 1,
        "i": "-5",
    }
    missing = {"id": 3}
    events = [postgres("c", after=row, lsn=place) for place, row in enumerate((ROW, texts, missing))]
    done = DebeziumFeed(TYPES, "id", optional="*").unwrap(topic(spark, events)).orderBy("id").collect()
    found = [{name: row[name] for name in ROW} for row in done]
    found = [{**row, "more": row["more"] and row["more"].asDict()} for row in found]
    assert found[0] == READ
    assert found[1] == {**READ, "id": 2}
    assert found[2] == {**dict.fromkeys(ROW), "id": 3}


def test_times_are_read_in_the_given_unit(spark: SparkSession) -> None:
    columns = "id bigint not null, a timestamp, b timestamp_ntz, c timestamp_ntz"
    row = {"id": 1, "a": 1_500, "b": -1_501_000, "c": 1_500}
    feed = DebeziumFeed(columns, "id", timestamps={"a": "millis", "b": "nanos", "c": "millis"})
    (found,) = feed.unwrap(topic(spark, [postgres("c", after=row)])).select("a", "b", "c").collect()
    assert found.a == found.c == EPOCH + timedelta(seconds=1.5)
    assert found.b == EPOCH - timedelta(microseconds=1_501)


def test_precise_decimals_are_read_from_the_bytes_of_their_unscaled_values(spark: SparkSession) -> None:
    feed = DebeziumFeed("id bigint not null, x decimal(38,2)", "id", decimals="precise")
    numbers = [0, -1, 1234, -(10**38 - 1)]
    events = [postgres("c", after={"id": place, "x": to_base64(x)}) for place, x in enumerate(numbers)]
    events.append(postgres("c", after={"id": 4, "x": None}))
    found = [row.x for row in feed.unwrap(topic(spark, events)).orderBy("id").collect()]
    assert [str(x) for x in found] == ["0.00", "-0.01", "12.34", f"-{'9' * 36}.99", "None"]


def test_mysql_versions_ascend_across_files_positions_and_rows_of_an_event(
    spark: SparkSession,
) -> None:
    places = [
        ("mysql-bin.000009", 999, 0),
        ("mysql-bin.000009", 10_000, 0),
        ("mysql-bin.000009", 10_000, 1),
        ("mysql-bin.000010", 4, 0),
        ("mysql-bin.1000000", 4, 0),
    ]
    events = [
        mysql("c", after={"id": number, "name": "x"}, file=file, pos=pos, row=row, wrapped=number % 2 == 0)
        for number, (file, pos, row) in enumerate(places)
    ]
    done = DebeziumFeed(ORDERS, "id", connector="mysql").unwrap(topic(spark, events))
    assert dict(done.dtypes)["_commit_version"] == "string"
    found = kinds(done, "id")
    assert [row[-1] for row in found] == [0, 1, 2, 3, 4]
    assert found[2][1] == f"mysql-bin.{9:020}:{10_000:020}:{1:020}"


@pytest.mark.parametrize(
    ("connector", "source", "version"),
    [
        ("oracle", {"scn": "123", "ssn": 2}, f"{123:020}:{2:020}"),
        (
            "sqlserver",
            {
                "commit_lsn": "0000002a:00000758:0005",
                "change_lsn": "0000002a:00000758:0003",
                "event_serial_no": 2,
            },
            f"0000002a:00000758:0005/0000002a:00000758:0003/{2:020}",
        ),
        # A row of a snapshot has the position at which it was read.
        ("oracle", {"scn": "123", "snapshot": "incremental"}, f"{123:020}:{0:020}"),
        (
            "sqlserver",
            {"commit_lsn": "0000002a:00000758:0005", "change_lsn": None, "snapshot": "true"},
            f"0000002a:00000758:0005//{0:020}",
        ),
    ],
)
def test_other_connectors_have_their_own_positions(
    spark: SparkSession, connector: str, source: dict[str, object], version: str
) -> None:
    kind = "r" if "snapshot" in source else "c"
    event = postgres(kind, after={"id": 1, "name": None}, lsn=None, connector=connector, **source)
    done = DebeziumFeed(ORDERS, "id", connector=connector).unwrap(topic(spark, [event]))
    ((*found, _, key),) = kinds(done, "id")
    assert (found, key) == (["insert", version], 1)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_replaying_the_changes_of_any_history_gives_the_source_table(
    spark: SparkSession, data: st.DataObject
) -> None:
    full = data.draw(st.booleans())
    wrapped = data.draw(st.booleans())
    state: dict[int, str | None] = {}
    events: list[str | None] = []
    for number in range(data.draw(st.integers(1, 30))):
        key = data.draw(st.integers(0, 4))
        name = data.draw(st.sampled_from(["p", "q", None]))
        old = {"id": key, "name": state.get(key)}
        parts: dict[str, object] = {"lsn": 100 + 7 * number, "order": number, "wrapped": wrapped}
        if key in state and data.draw(st.booleans()):
            del state[key]
            events += [postgres("d", before=old if full else {"id": key, "name": None}, **parts), None]
        elif key in state:
            state[key] = name
            new = {"id": key, "name": name}
            events.append(postgres("u", before=old if full else None, after=new, **parts))
        else:
            state[key] = name
            events.append(postgres("c", after={"id": key, "name": name}, **parts))
    feed = DebeziumFeed(ORDERS, "id")
    df = topic(spark, events).repartition(3)
    held: dict[int, str | None] = {}
    for kind, _, _, key, name in kinds(feed.unwrap(df), "id", "name"):
        if kind in ("delete", "update_preimage"):
            assert key in held
            assert not full or held[key] == name
            if kind == "delete":
                del held[key]
        else:
            held[key] = name
    assert held == state
    net = feed.read(df, deduplication_mode="netChanges", compute_updates=True)
    assert {row.id: row.name for row in net.collect()} == state


def test_events_other_than_row_changes_are_skipped(spark: SparkSession) -> None:
    begins = {
        "status": "BEGIN",
        "id": "571:53195829",
        "event_count": None,
        "data_collections": None,
        "ts_ms": NOW,
    }
    counts = [{"data_collection": "public.orders", "event_count": 1}]
    ends = {**begins, "status": "END", "event_count": 1, "data_collections": counts}
    message = json.loads(postgres("m", lsn=3))
    del message["before"], message["after"]
    message["message"] = {"prefix": "app", "content": "aGk="}
    events: list[str | None] = [HEARTBEAT, json.dumps(message)]
    events += [
        json.dumps(begins),
        json.dumps(ends),
        json.dumps({name: ends[name] for name in ends if name != "ts_ms"}),
    ]
    for event in list(events):
        events.append(
            json.dumps({"schema": {"type": "struct", "fields": []}, "payload": json.loads(str(event))})
        )
    row = {"id": 1, "name": "a"}
    done = DebeziumFeed(ORDERS, "id").unwrap(topic(spark, [*events, postgres("c", after=row)]))
    assert kinds(done, "id") == [("insert", 1, 3, 1)]


def test_a_column_of_the_schema_may_be_missing_before_it_was_added(spark: SparkSession) -> None:
    events = [postgres("c", after={"id": 1, "name": "a"}, lsn=1)]
    events.append(postgres("c", after={"id": 2, "name": "b", "note": "n"}, lsn=2))
    feed = DebeziumFeed(f"{ORDERS}, note string", "id", optional="note")
    assert [row[3:] for row in kinds(feed.unwrap(topic(spark, events)), "id", "note")] == [
        (1, None),
        (2, "n"),
    ]


def test_the_placeholder_is_read_as_a_value_on_request(spark: SparkSession) -> None:
    feed = DebeziumFeed(ORDERS, "id", unavailable=None)
    done = feed.unwrap(topic(spark, [postgres("u", after={"id": 1, "name": PLACEHOLDER})]))
    assert kinds(done, "name") == [("update_postimage", 1, 3, PLACEHOLDER)]
