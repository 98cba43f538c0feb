"""Segments that another program wrote: readers fail with an error that names them, and take no additional
memory.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from penstock import Store
from penstock.arrow.segments import MAX_VALUES_WITHOUT_BYTES, encode
from penstock.errors import InvalidInputError, StoreError
from penstock.queue import consumer as consumer_module
from penstock.store.log import reading
from penstock.store.log.reading import Range
from penstock.store.records.queue_columns import FIRST_COLUMNS
from tests.support.queues import SCHEMA, rows
from tests.support.raw_sql import overwrite, run_sql, write_unchecked


@pytest.mark.timeout(60)
@pytest.mark.parametrize("found", [0, 2, 4])
def test_a_segment_with_an_unexpected_number_of_rows_is_refused(store: Store, found: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    overwrite(
        store,
        "payload.data",
        encode(pa.RecordBatch.from_pylist(rows(*range(found)), schema=SCHEMA)).to_pybytes(),
    )
    with pytest.raises(StoreError, match=f"has {found} rows") as caught:
        queue.read(0, 0)
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    place = {"queue": "q", "partition": 0, "start": 0, "end": 3}
    assert {name: caught.value.parameters[name] for name in place} == place
    assert "queue 'q', partition 0, rows [0, 3)" in str(caught.value)


def test_an_unreadable_segment_is_named_by_its_queue_partition_and_rows(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for first in (1, 4):
        queue.append(rows(first, first + 1, first + 2))
    overwrite(store, "payload.data", b"nonsense")
    with pytest.raises(
        StoreError, match=r"queue 'q', partition 0, rows \[3, 6\): a segment of 8 bytes"
    ) as caught:
        queue.read(0, 4)
    assert (caught.value.parameters["start"], caught.value.parameters["end"]) == (3, 6)


def test_compaction_skips_a_segment_with_the_wrong_number_of_rows(store: Store) -> None:
    """Compacting it would make the rows of its neighbours unreadable, too."""
    queue = store.create_queue("q", SCHEMA)
    for number in range(40):
        queue.append(rows(number))
    other = encode(pa.RecordBatch.from_pylist(rows(7, 8), schema=SCHEMA)).to_pybytes()
    newest = "(select max(payload_id) from penstock.payload)"
    write_unchecked(store, f"payload set data = ? where payload_id = {newest}", other)
    with pytest.raises(StoreError, match=r"queue 'q', partition 0, rows \[39, 40\): .* has 2 rows"):
        queue.compact()
    assert queue.read(0, 0, 39).num_rows == 39


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", [[2**31 - 1], [5, 3], [-1, 3], [2**40], [], [2], [None], [0, 3]])
def test_timestamps_that_do_not_match_the_rows_are_refused_without_taking_memory(
    store: Store, ends: list[int | None]
) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    schema = pa.schema([(name, pa.int64()) for name in ("end", "append", "timestamp")])
    columns = [pa.array(ends, pa.int64()), *[pa.array(range(len(ends)), pa.int64())] * 2]
    overwrite(store, "payload.runs", encode(pa.RecordBatch.from_arrays(columns, schema=schema)).to_pybytes())
    before = pa.total_allocated_bytes()
    with pytest.raises(StoreError, match="do not match the segment's rows") as caught:
        list(reading.read(store.database, queue.record, [Range(0, 0, 3)], with_runs=True))
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    assert pa.total_allocated_bytes() < before + (1 << 20)


@pytest.mark.parametrize("claimed", [0, 2**50])
def test_a_page_is_limited_by_the_real_size_of_its_payloads(store: Store, claimed: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    for number in range(20):
        queue.append(rows(*range(number, number + 1000)))
    run_sql(store.database, f"update penstock.segment set bytes = {claimed}")
    size = len(bytes(run_sql(store.database, "select data from penstock.payload limit 1")[0][0]))
    chunks = list(reading.read(store.database, queue.record, [Range(0, 0, 20_000)], page_bytes=3 * size))
    assert sum(chunk.ends_page for chunk in chunks) >= 4
    assert chunks[-1].end == 20_000


@pytest.mark.parametrize("kind", [pa.null(), pa.struct([]), pa.struct([("a", pa.null())])])
def test_a_segment_cannot_claim_any_number_of_values_without_bytes(store: Store, kind: pa.DataType) -> None:
    """A list of two billion nulls takes two hundred bytes, until it becomes a Python list."""

    def lists(count: int) -> pa.Table:
        values = pa.nulls(count)
        if pa.types.is_struct(kind):
            values = pa.StructArray.from_buffers(kind, count, [None], children=[values] * kind.num_fields)
        offsets = pa.array([0, count], pa.int32())
        array = pa.ListArray.from_arrays(offsets, values, type=queue.schema.field("l").type)
        return pa.table([array], schema=queue.schema)

    queue = store.create_queue("q", pa.schema([("l", pa.list_(kind))]))
    queue.append(lists(1000))
    assert len(queue.read(0, 0).to_pylist()[0]["l"]) == 1000
    with pytest.raises(InvalidInputError, match="values without any bytes, more than a reader accepts"):
        queue.append(lists(MAX_VALUES_WITHOUT_BYTES + 1))
    (batch,) = lists(2**31 - 1).to_batches()
    overwrite(store, "payload.data", encode(batch).to_pybytes())
    with pytest.raises(StoreError, match="it claims 2147483647 values without any bytes"):
        queue.read(0, 0)


def claim(store: Store, batch: pa.RecordBatch, columns_id: int = FIRST_COLUMNS) -> None:
    """Replace the only segment with one that has these rows."""
    overwrite(store, "payload.data", encode(batch).to_pybytes())
    overwrite(store, "segment.columns_id", columns_id)
    overwrite(store, "segment.end_index", batch.num_rows)
    overwrite(store, "partition.next_index", batch.num_rows)


@pytest.mark.parametrize("width", [0, 1])
def test_a_segment_with_columns_that_its_queue_never_had_is_refused(store: Store, width: int) -> None:
    """Without columns, rows take no bytes, so the segment could claim any number of rows."""
    queue = store.create_queue("q", pa.schema([("nothing", pa.null()), ("id", pa.int64())]))
    queue.append([{"id": 1}])
    consumer = store.create_consumer("c")
    consumer.register("q")
    nothing = pa.StructArray.from_arrays([pa.nulls(10**9)] * width, ["nothing"] * width)
    claim(
        store, pa.RecordBatch.from_struct_array(nothing if width else no_columns(10**9)), columns_id=width + 1
    )
    before = pa.total_allocated_bytes()
    for read in (
        lambda: queue.read(0, 0),
        lambda: queue.read(0, 0, max_rows=1),
        lambda: queue.read(0, 0, max_rows=1, columns=["nothing"]),
        lambda: consumer.pull("q", 0, max_rows=1),
    ):
        with pytest.raises(StoreError, match=r"rows \[0, 1000000000\): the segment's rows have columns"):
            read()
    assert pa.total_allocated_bytes() <= before


def no_columns(rows: int) -> pa.StructArray:
    return pa.StructArray.from_buffers(pa.struct([]), rows, [None])


def test_compaction_does_not_fill_a_segment_of_more_rows_than_the_log_says(store: Store) -> None:
    queue = store.create_queue("q", pa.schema([("flag", pa.bool_())]))
    for _ in range(2):
        queue.append([{"flag": True}])
    queue.add_columns([("amount", pa.decimal128(38, 0))])
    queue.append([{"flag": True, "amount": 1}])
    many = pa.record_batch({"flag": pa.array([True]).take(pa.repeat(0, 1 << 24))})
    overwrite(store, "payload.data", encode(many).to_pybytes())
    overwrite(store, "segment.columns_id", FIRST_COLUMNS)
    before, peak = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(StoreError, match=f"has {1 << 24} rows"):
        queue.compact()
    assert max(pa.default_memory_pool().max_memory() - peak, pa.total_allocated_bytes() - before) < 64 << 20


def test_later_columns_are_filled_only_for_the_rows_that_are_read(store: Store) -> None:
    """A few bytes can stand for a hundred million rows, whose nulls take much more memory."""
    queue = store.create_queue("q", pa.schema([("flag", pa.bool_())]))
    queue.append([{"flag": True}])
    queue.add_columns([(f"amount{place}", pa.decimal128(38, 0)) for place in range(8)])
    queue.refresh()
    claim(store, pa.record_batch({"flag": pa.array([True]).take(pa.repeat(0, 1 << 24))}))
    before = pa.total_allocated_bytes()
    expected = {"flag": True} | dict.fromkeys(queue.schema.names[1:])
    assert queue.read(0, 5, max_rows=2).to_pylist() == [expected] * 2
    ends, largest = [], 0
    for chunk in reading.read(store.database, queue.record, [Range(0, 3, 1 << 24)], with_runs=True):
        ends.append(chunk.end)
        largest = max(largest, pa.total_allocated_bytes() - before)
    assert ends[-1] == 1 << 24
    assert len(ends) > 16
    assert ends == sorted(set(ends))
    assert largest < 128 << 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [2**53 + 1, -(2**63)])
def test_numbers_that_would_overflow_64_bits_are_refused(store: Store, value: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    for number in range(3):
        queue.append(rows(number))
    if store.database.dialect == "sqlite":
        overwrite(store, "store.next_block", value)
        with pytest.raises(StoreError, match="UNREADABLE_RECORD"):
            queue.append(rows(3))
        overwrite(store, "store.next_block", 9)
    overwrite(store, "segment.bytes", abs(value) - 1)
    with contextlib.suppress(StoreError):
        queue.compact()
    assert queue.read(0, 0).num_rows == 3


@pytest.mark.timeout(60)
def test_the_error_of_a_time_lookup_names_a_missing_segment(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    store.create_consumer("c").register("q")
    overwrite(store, "segment.start_index", 50)
    overwrite(store, "segment.end_index", 60)
    with pytest.raises(StoreError, match=r"lacks rows \[0, 1\)") as caught:
        store.consumer("c").seek("q", to=datetime(2020, 1, 1, tzinfo=UTC))
    assert caught.value.condition == "SEGMENT_MISSING"


def test_a_partition_whose_end_was_moved_is_refused_when_its_rows_are_read(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    overwrite(store, "partition.next_index", 10**12)
    with pytest.raises(StoreError) as caught:
        queue.read(0, 3)
    assert caught.value.condition == "STORE_ERROR.PAST_END"
    queue.append(rows(4))
    with pytest.raises(StoreError, match=r"lacks rows \[3, 1000000000000\)") as caught:
        queue.read(0, 0)
    assert caught.value.condition == "SEGMENT_MISSING"


def test_a_pull_returns_fewer_rows_if_they_decompress_to_a_large_size(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "_PULL_BYTES", 2 << 20)
    queue = store.create_queue("q", pa.schema([("v", pa.binary())]))
    consumer = store.create_consumer("c")
    consumer.register("q")
    for _ in range(5):
        queue.append([{"v": bytes(1 << 20)}])
    found = []
    while (pulled := consumer.pull("q", 0)).end > pulled.start:
        assert pulled.table.num_rows == pulled.end - pulled.start
        found.append(pulled.table.num_rows)
        consumer.advance("q", 0, old=pulled.start, new=pulled.end)
    assert found == [2, 2, 1]
