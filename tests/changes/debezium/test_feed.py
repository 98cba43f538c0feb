"""Debezium's events become change rows, or are refused with the reason and their position."""

from __future__ import annotations

import base64
import json
import os
import random
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.changes.debezium import DebeziumFeed
from penstock.errors import (
    InvalidChangelogSchemaError,
    InvalidChangeOptionError,
    QueueNotFoundError,
    SchemaMismatchError,
)
from penstock.feeds.contract import DEAD_LETTERS
from penstock.json_text import Json
from penstock.testing import replay_last_batch
from tests.changes.debezium.decimals import to_base64
from tests.support.change_frames import Sink
from tests.support.debezium_events import NOW, ROW, TYPES, mysql, postgres, topic

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - as collect() gives times
PLACEHOLDER = "__debezium_unavailable_value"
ORDERS = "id bigint not null, name string"
HEARTBEAT = json.dumps({"ts_ms": NOW})
READ = {
    **ROW,
    "price": Decimal("12.30"),
    "d": date(2022, 1, 8),
    "t": EPOCH + timedelta(seconds=1_700_000_000, microseconds=123_456),
    "n": EPOCH - timedelta(microseconds=1),
    "b": b"hi",
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a queue of dead letters."""
    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url, create=True) as store:
        store.create_queue("dead", DEAD_LETTERS)
    return url


def letters(url: str) -> list[Json]:
    with penstock.connect(url) as store:
        found: list[Json] = store.queue("dead").read(0, 0).to_pylist()
    return sorted(found, key=lambda letter: letter["offset"])


def kinds(df: DataFrame, *columns: str) -> list[tuple[object, ...]]:
    chosen = df.select("_change_type", "_commit_version", "_sequence", *columns)
    return [tuple(row) for row in chosen.orderBy("_commit_version", "_sequence").collect()]


# What comes out.


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


# A table that is changed.


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


def test_a_column_of_the_schema_may_be_missing_before_it_was_added(spark: SparkSession) -> None:
    events = [postgres("c", after={"id": 1, "name": "a"}, lsn=1)]
    events.append(postgres("c", after={"id": 2, "name": "b", "note": "n"}, lsn=2))
    feed = DebeziumFeed(f"{ORDERS}, note string", "id", optional="note")
    assert [row[3:] for row in kinds(feed.unwrap(topic(spark, events)), "id", "note")] == [
        (1, None),
        (2, "n"),
    ]


# What is refused.

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


def test_the_placeholder_is_read_as_a_value_on_request(spark: SparkSession) -> None:
    feed = DebeziumFeed(ORDERS, "id", unavailable=None)
    done = feed.unwrap(topic(spark, [postgres("u", after={"id": 1, "name": PLACEHOLDER})]))
    assert kinds(done, "name") == [("update_postimage", 1, 3, PLACEHOLDER)]


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


# On a stream.


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
