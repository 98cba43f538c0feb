"""Widening columns: stored rows are read as the new type, and old readers and writers keep working."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.arrow.schema import schema_to_bytes
from penstock.errors import SchemaMismatchError, StoreError
from penstock.store.log import partition_log
from penstock.store.log.segmenting import to_segments
from tests.support.raw_sql import run_sql

FIRST = pa.schema(
    [pa.field("id", pa.int32(), nullable=False), ("amount", pa.decimal128(6, 2)), ("x", pa.float32())]
)
LONG = pa.field("id", pa.int64())
BIG = 1 << 40


def row(number: int, amount: str = "1.50", x: float = 0.5) -> dict[str, Any]:
    return {"id": number, "amount": Decimal(amount), "x": x}


def test_older_rows_are_read_in_the_new_types(store: penstock.Store) -> None:
    queue = store.create_queue("q", FIRST)
    queue.append([row(1)])
    wider = [LONG, pa.field("amount", pa.decimal128(12, 4)), pa.field("x", pa.float64())]
    queue.widen_columns(wider)
    queue.append([row(BIG, "12345678.1234", 0.1)])
    expected = [row(1, "1.5000"), row(BIG, "12345678.1234", 0.1)]
    for _ in range(2):
        found = queue.read(0, 0)
        assert found.to_pylist() == expected
        assert found.schema.field("id") == pa.field("id", pa.int64(), nullable=False)
        found.validate(full=True)
        assert queue.read(0, 0, columns=["x", "id"]).to_pylist() == [
            {"x": each["x"], "id": each["id"]} for each in expected
        ]
        queue.compact()
    assert store.queue("q").schema == queue.schema == queue.info().schema


def test_equal_keys_stay_together(store: penstock.Store) -> None:
    queue = store.create_queue("q", FIRST, partitions=8, key=["id", "amount"])
    rows = [row(number) for number in range(40)]
    queue.append(rows)
    queue.add_partitions(3)
    queue.widen_columns([LONG, pa.field("amount", pa.decimal128(20, 2)), pa.field("x", pa.float64())])
    queue.append(rows)
    queue.append([row(BIG)])
    for partition in range(11):
        found = [each["id"] for each in queue.read(partition, 0).to_pylist() if each["id"] != BIG]
        assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_program_with_the_narrower_type_continues_until_a_value_does_not_fit(store: penstock.Store) -> None:
    queue, old = store.create_queue("q", FIRST), store.queue("q")
    queue.widen_columns(LONG)
    queue.add_columns(pa.field("note", pa.string()))
    old.append([row(1)])
    queue.append([{**row(2), "note": "b"}])
    assert old.read(0, 0).to_pylist() == [row(1), row(2)]
    assert old.read(0, 0).schema == FIRST
    queue.append([row(BIG)])
    assert old.read(0, 0, 2).to_pylist() == [row(1), row(2)]
    assert old.read(0, 0, columns=["x"]).num_rows == 3
    with pytest.raises(
        SchemaMismatchError, match="is now int64, and has a value that does not fit into int32"
    ) as caught:
        old.read(0, 0)
    assert caught.value.condition == "SCHEMA_MISMATCH.COLUMN_WIDENED"
    old.append([row(BIG + 1)])
    assert [each["id"] for each in old.read(0, 0).to_pylist()] == [1, 2, BIG, BIG + 1]


def test_rows_are_not_stored_with_older_columns_that_another_thread_has_loaded(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = store.create_queue("q", FIRST)
    placed = [queue.current_placement()]
    queue.widen_columns(LONG)
    current = queue.current_placement
    monkeypatch.setattr(queue, "current_placement", lambda: placed.pop() if placed else current())
    queue.append([row(BIG)])
    assert not placed
    assert queue.read(0, 0).to_pylist() == [row(BIG)]


def test_an_append_that_runs_while_a_column_is_widened_has_the_earlier_type(store: penstock.Store) -> None:
    """This applies to PostgreSQL. In SQLite the next writer waits for the append anyway."""
    queue = store.create_queue("q", FIRST)
    record = queue.record
    segments = to_segments(pa.Table.from_pylist([row(1)], schema=FIRST), 0)
    with store.database.transaction() as tx:
        partition_log.append(tx, record, segments)
        if store.database.dialect == "postgres":
            store.queue("q").widen_columns(LONG)
    queue.widen_columns(LONG)
    queue.append([row(BIG)])
    assert [each["id"] for each in store.queue("q").read(0, 0).to_pylist()] == [1, BIG]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (pa.field("id", pa.int16()), None),
        (pa.field("id", pa.int32()), None),
        (pa.field("id", pa.string()), "is int32, and cannot become string"),
        (pa.field("id", pa.float64()), "cannot become double"),
        (pa.field("amount", pa.decimal128(7, 4)), "cannot become decimal"),
        (pa.field("amount", pa.decimal128(9, 4)), None),
        (pa.field("x", pa.int64()), "is float, and cannot become int64"),
        (pa.field("X", pa.float64()), "there is no column 'X'"),
        (pa.field("missing", pa.int64()), "there is no column"),
    ],
)
def test_only_wider_types_are_accepted(store: penstock.Store, field: pa.Field, message: str | None) -> None:
    queue = store.create_queue("q", FIRST)
    if message is None:
        queue.widen_columns(field)
        return
    with pytest.raises(SchemaMismatchError, match=message):
        queue.widen_columns([pa.field("x", pa.float64()) if field.name in FIRST.names[:2] else LONG, field])
    assert queue.schema == store.queue("q").schema == FIRST


def test_a_decimal_in_the_key_keeps_its_scale(store: penstock.Store) -> None:
    queue = store.create_queue("q", FIRST, key="amount")
    with pytest.raises(SchemaMismatchError, match="keeps its scale if the column is in the key"):
        queue.widen_columns(pa.field("amount", pa.decimal128(9, 4)))
    assert queue.widen_columns(pa.field("amount", pa.decimal128(9, 2))).field("amount").type.precision == 9


def test_an_added_column_can_be_widened_repeatedly(store: penstock.Store) -> None:
    queue = store.create_queue("q", FIRST)
    for number, kind in enumerate([pa.int16(), pa.int32(), pa.int64()]):
        (queue.widen_columns if number else queue.add_columns)(pa.field("n", kind))
        queue.append([{**row(number), "n": (1 << 10 * number)}])
    assert [each["n"] for each in queue.read(0, 0).to_pylist()] == [1, 1 << 10, 1 << 20]
    queue.compact()
    assert [each["n"] for each in queue.read(0, 0).to_pylist()] == [1, 1 << 10, 1 << 20]
    with pytest.raises(SchemaMismatchError, match="is int64, not int32"):
        queue.add_columns(pa.field("n", pa.int32()))


def test_the_error_of_add_columns_says_how_to_widen_a_column(store: penstock.Store) -> None:
    queue = store.create_queue("q", FIRST)
    with pytest.raises(SchemaMismatchError, match="widen_columns gives it that type"):
        queue.add_columns(LONG)


@pytest.mark.parametrize(
    "field",
    [
        pa.field("ID", pa.int64()),
        pa.field("id", pa.int16()),
        pa.field("x", pa.string()),
        pa.field("without_id", pa.string()),
    ],
)
def test_a_record_of_columns_that_penstock_did_not_write_is_refused(
    store: penstock.Store, field: pa.Field
) -> None:
    store.create_queue("q", FIRST)
    if field.name != "without_id":
        field = field.with_metadata({"penstock.columns_id": "00000000000000ff"})
    columns = schema_to_bytes(pa.schema([field])).hex()
    text = f"x'{columns}'" if store.database.dialect == "sqlite" else f"'\\x{columns}'"
    run_sql(store.database, f"update penstock.queue set added_columns = {text}")
    with pytest.raises(StoreError, match="schema of a queue"):
        _ = store.queue("q").schema
