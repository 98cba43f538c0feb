"""A column that gets another type at the source: its values are those of the schema's type, or refused."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.changes.debezium import DebeziumFeed
from penstock.feeds.contract import DEAD_LETTERS
from penstock.json_text import Json
from tests.changes.debezium.decimals import to_base64
from tests.support.debezium_events import postgres, topic

CONNECT, TIME = "org.apache.kafka.connect.data", "io.debezium.time"
PLACEHOLDER = "__debezium_unavailable_value"
BYTES = list(PLACEHOLDER.encode())
MOMENT = datetime(2023, 11, 14, 22, 13, 20, 123_000)  # noqa: DTZ001 - a local time
MICROS = 1_700_000_000_123_000
REFUSED = None
ISO_TIMESTAMP = {"type": "string", "name": f"{TIME}.IsoTimestamp"}
"""As time.precision.mode=isostring gives a local time."""


def decimal(scale: int) -> Json:
    return {"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": str(scale)}}


def count(name: str, kind: str = "int64") -> Json:
    return {"type": kind, "name": name}


def plain(kind: str) -> Json:
    return {"type": kind}


def read(spark: SparkSession, tmp_path: Path, column: str, *values: Any, **options: Any) -> list[Any]:
    """Read values of one column, each with the schema that its event declares, if any."""
    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url, create=True) as store:
        store.create_queue("dead", DEAD_LETTERS)
    events = [
        postgres("c", after={"id": place, "x": value}, lsn=place + 1, declared=schema and {"x": schema})
        for place, (value, schema) in enumerate(values)
    ]
    feed = DebeziumFeed(
        f"id bigint not null, x {column}", "id", dead_letters=penstock.QueueSink("dead", url=url), **options
    )
    found = {row.id: row.x for row in feed.unwrap(topic(spark, events)).select("id", "x").collect()}
    with penstock.connect(url) as store:
        letters = {row["offset"]: row["reason"] for row in store.queue("dead").read(0, 0).to_pylist()}
    assert all(reason.startswith("after.x") for reason in letters.values()), letters
    assert len(found) + len(letters) == len(values)
    return [found.get(place, REFUSED) for place in range(len(values))]


# Events that declare their types.


def test_a_decimal_has_the_scale_that_its_event_declares(spark: SparkSession, tmp_path: Path) -> None:
    values = [
        (to_base64(1255), decimal(2)),
        (to_base64(1255), decimal(3)),
        (to_base64(1250), decimal(3)),
        (to_base64(-125), decimal(0)),
        (12, plain("int32")),
        ("12.5", plain("string")),
        (to_base64(1250), plain("bytes")),
    ]
    expected = ["12.55", REFUSED, "1.25", "-125.00", "12.00", "12.50", REFUSED]
    for decimals in ("precise", "string"):
        found = read(spark, tmp_path / decimals, "decimal(10,2)", *values, decimals=decimals)
        assert [None if x is None else str(x) for x in found] == expected


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("precise", "string"):
        (tmp_path / name).mkdir()


def test_local_times_have_the_unit_that_their_event_declares(spark: SparkSession, tmp_path: Path) -> None:
    values = [
        (MICROS, count(f"{TIME}.MicroTimestamp")),
        (MICROS // 1000, count(f"{TIME}.Timestamp")),
        (MICROS // 1000, count(f"{CONNECT}.Timestamp")),
        (MICROS * 1000, count(f"{TIME}.NanoTimestamp")),
        (MICROS * 1000 + 1, count(f"{TIME}.NanoTimestamp")),
        (19_000, count(f"{TIME}.Date", "int32")),
        (MICROS, count(f"{TIME}.MicroTime")),
        (MICROS, plain("int64")),
        ("2023-11-14T22:13:20.123Z", {"type": "string", "name": f"{TIME}.ZonedTimestamp"}),
        ("2023-11-14T22:13:20.123", plain("string")),
        ("2023-11-14T22:13:20.123Z", ISO_TIMESTAMP),
    ]
    found = read(spark, tmp_path, "timestamp_ntz", *values)
    assert found == [MOMENT] * 4 + [REFUSED] * 5 + [MOMENT] * 2


def test_instants_are_no_local_times(spark: SparkSession, tmp_path: Path) -> None:
    values = [
        ("2023-11-14T22:13:20.123Z", {"type": "string", "name": f"{TIME}.ZonedTimestamp"}),
        ("2023-11-14T22:13:20.123Z", ISO_TIMESTAMP),
        (MICROS, count(f"{TIME}.MicroTimestamp")),
        (MICROS, None),
        ("2023-11-14T22:13:20.123", None),
        ("2023-11-14T22:13:20.123456000Z", None),
        ("2023-11-14T22:13:20.1234567Z", None),
    ]
    found = read(spark, tmp_path, "timestamp", *values)
    exact = MOMENT.replace(microsecond=123_456)
    assert found == [MOMENT, REFUSED, REFUSED, REFUSED, REFUSED, exact, REFUSED]
    # A converter may count instants: then the column is named.
    values = [(MICROS, None), (MICROS, plain("int64")), (MICROS // 1000, count(f"{CONNECT}.Timestamp"))]
    (tmp_path / "named").mkdir()
    assert read(spark, tmp_path / "named", "timestamp", *values, timestamps={"x": "micros"}) == [MOMENT] * 3


def test_dates_bytes_and_text_are_not_read_from_other_types(spark: SparkSession, tmp_path: Path) -> None:
    day = date(2022, 1, 8)
    dates = [
        (19_000, count(f"{TIME}.Date", "int32")),
        (19_000, count(f"{CONNECT}.Date", "int32")),
        (19_000, plain("int32")),
        (19_000, count(f"{TIME}.Timestamp")),
        ("2022-01-08", plain("string")),
        ("19000", plain("string")),
        ("2022-01-08Z", {"type": "string", "name": f"{TIME}.IsoDate"}),
    ]
    assert read(spark, tmp_path / "precise", "date", *dates) == [
        day, day, REFUSED, REFUSED, day, REFUSED, day
    ]  # fmt: skip
    numbers = [(1234, plain("int32")), ("aGk=", plain("bytes")), ("aGk=", decimal(2))]
    assert read(spark, tmp_path, "binary", *numbers) == [REFUSED, bytearray(b"hi"), REFUSED]
    texts = [("aGk=", plain("bytes")), (19_000, dates[0][1]), (7, plain("int32")), ("x", plain("string"))]
    assert read(spark, tmp_path / "string", "string", *texts) == [REFUSED, REFUSED, "7", "x"]


def test_events_with_different_schemas_are_read_by_their_own(spark: SparkSession, tmp_path: Path) -> None:
    units = [(MICROS, f"{TIME}.MicroTimestamp"), (MICROS // 1000, f"{TIME}.Timestamp")]
    values = [(value, count(name)) for value, name in units * 3] + [(MICROS, None), ("junk", None)]
    assert read(spark, tmp_path, "timestamp_ntz", *values) == [MOMENT] * 7 + [REFUSED]


def test_a_schema_of_another_shape_declares_nothing(spark: SparkSession) -> None:
    row = {"id": 1, "x": MICROS}
    event = json.loads(postgres("c", after=row, declared={"x": count(f"{TIME}.Timestamp")}))
    shapes: list[object] = [
        5, "x", [], {}, {"type": 5}, {"type": "struct", "fields": 5}, {"type": "struct", "fields": [5]},
        {"type": "struct", "fields": [{"type": "struct", "field": "after", "fields": [{"field": "x"}]}]},
        {"type": "struct", "fields": [{"type": "struct", "field": "after", "fields": {"x": 1}}]},
        json.loads('{"type":"struct","fields":[' * 200 + "]}" * 200),
    ]  # fmt: skip
    events = [json.dumps({**event, "schema": shape}) for shape in shapes]
    feed = DebeziumFeed("id bigint not null, x timestamp_ntz", "id")
    assert {row.x for row in feed.unwrap(topic(spark, events)).collect()} == {MOMENT}


# Events without a schema: the form of a value has to be of the type.


def bare(*values: object) -> list[tuple[Any, Any]]:
    return [(value, None) for value in values]


def test_a_number_that_a_float_would_round_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    floats = bare(16777217.123, 0.1, 16777216.0, 1.5, 123456789, "NaN", "-Infinity", 1e300, 1e-300)
    found = read(spark, tmp_path, "float", *floats)
    assert [str(x) for x in found] == [
        "None", "0.10000000149011612", "16777216.0", "1.5", "None", "nan", "-inf", "None", "None"
    ]  # fmt: skip
    # As Java before 19 writes a float.
    assert read(spark, tmp_path / "string", "float", *bare(1.18846831e13)) == [11884683067392.0]
    doubles = bare(9007199254740993, 9007199254740992, "0.12345678901234567891", 0.1, 5.684341886080801e-14)
    assert read(spark, tmp_path / "precise", "double", *doubles) == [
        REFUSED, 9007199254740992.0, REFUSED, 0.1, 5.684341886080801e-14
    ]  # fmt: skip


@pytest.mark.parametrize("column", ["int", "bigint", "double", "decimal(10,0)"])
def test_text_that_is_not_written_as_a_number_is_refused(
    spark: SparkSession, tmp_path: Path, column: str
) -> None:
    found = read(spark, tmp_path, column, *bare("007", "0x1F", "+7", " 7", "", "-7", 7))
    assert found == [REFUSED] * 5 + [-7, 7]


def test_times_with_more_than_microseconds_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    values = bare(1_500_000, 1_500_999, "2023-11-14T22:13:20.1230000", "2023-11-14T22:13:20.1234567")
    found = read(spark, tmp_path, "timestamp_ntz", *values, *bare("2023-11-14"), timestamps="nanos")
    assert found == [datetime(1970, 1, 1, microsecond=1_500), REFUSED, MOMENT, REFUSED, REFUSED]  # noqa: DTZ001


def test_precise_decimals_have_the_bytes_that_they_need(spark: SparkSession, tmp_path: Path) -> None:
    values = bare(to_base64(1234), "AAE=", "12.5", "BNJ=")
    found = read(spark, tmp_path, "decimal(10,2)", *values, decimals="precise")
    assert found == [Decimal("12.34"), REFUSED, REFUSED, REFUSED]


# Values in arrays, maps and structs.


def test_values_in_arrays_maps_and_structs_are_read_as_others_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    micros = {"type": "array", "items": count(f"{TIME}.MicroTimestamp")}
    millis = {"type": "array", "items": count(f"{TIME}.Timestamp")}
    values = [
        ([MICROS, None], micros), ([MICROS // 1000, None], millis), ([MICROS, None], None), ([], None),
        (["x"], None), ([1, "x", "y"], micros),
    ]  # fmt: skip
    times = [MOMENT, None]
    found = read(spark, tmp_path, "array<timestamp_ntz>", *values)
    assert found == [times, times, times, [], REFUSED, REFUSED]
    scaled = {"type": "map", "keys": plain("string"), "values": decimal(3)}
    maps = [
        ({"a": to_base64(1250)}, scaled),
        ({"a": to_base64(1255)}, scaled),
        ({"a": "1.5", "b": None}, None),
    ]
    assert read(spark, tmp_path / "string", "map<string,decimal(10,2)>", *maps) == [
        {"a": Decimal("1.25")}, REFUSED, {"a": Decimal("1.50"), "b": None}
    ]  # fmt: skip
    structs = bare({"f": 0.1, "b": ["6869", None]}, {"f": 16777217.123}, {"b": ["xx"]}, {"g": 1})
    found = read(spark, tmp_path / "precise", "struct<f:float,b:array<binary>>", *structs, binaries="hex")
    assert [x and x.asDict() for x in found] == [
        {"f": pytest.approx(0.1), "b": [bytearray(b"hi"), None]}, None, None, {"f": None, "b": None}
    ]  # fmt: skip


# Unchanged TOAST values.

UNCHANGED = [
    ("string", PLACEHOLDER),
    ("string", json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":"))),
    ("decimal(10,2)", PLACEHOLDER),
    ("array<string>", [PLACEHOLDER]),
    ("array<string>", ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"]),
    ("array<binary>", ["X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="]),
    ("array<int>", BYTES),
    ("array<bigint>", BYTES),
    ("array<date>", BYTES),
    ("array<double>", [float(byte) for byte in BYTES]),
    ("array<decimal(10,2)>", [f"{byte / 100:.2f}" for byte in BYTES]),
    ("map<string,string>", {PLACEHOLDER: PLACEHOLDER}),
    ("struct<a:string>", {"a": PLACEHOLDER}),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("column", "value"), UNCHANGED)
def test_unchanged_toast_values_are_refused_in_any_column(
    spark: SparkSession, column: str, value: object
) -> None:
    feed = DebeziumFeed(f"id bigint not null, x {column}", "id")
    with pytest.raises(Exception, match=r"after\.x.* is an unchanged TOAST value, which was not sent"):
        feed.unwrap(topic(spark, [postgres("u", after={"id": 1, "x": value})])).collect()


def test_other_values_are_not_taken_for_placeholders(spark: SparkSession, tmp_path: Path) -> None:
    values = bare(BYTES[:-1], BYTES[::-1], [*BYTES[:-1], None])
    assert read(spark, tmp_path, "array<int>", *values) == [value for value, _ in values]
    assert read(spark, tmp_path / "string", "array<string>", *bare([PLACEHOLDER]), unavailable=None) == [
        [PLACEHOLDER]
    ]
