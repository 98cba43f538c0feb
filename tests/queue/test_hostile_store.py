"""A store written by somebody else: readers fail with a named error, and never loop forever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from penstock import Consumer, QueueFeed, Retention, Store
from penstock.arrow.segments import MOST_WITHOUT_BYTES, encode
from penstock.commit.owner import Owner
from penstock.errors import InvalidInputError, StoreError
from penstock.feeds.contract import ChangeContract
from penstock.json_text import MOST_CHARACTERS
from penstock.queue import consumer as consumer_module
from penstock.store.log import reading
from penstock.store.log.reading import Range
from penstock.store.records import catalog
from penstock.store.statements import qualify
from tests.support.queues import SCHEMA, rows
from tests.support.raw_sql import long_text, raw_connection, run_sql


def put(store: Store, column: str, value: object) -> None:
    """Set a column of all rows of a table."""
    database = store.database
    table, name = column.split(".")
    mark = "?" if database.dialect == "sqlite" else "%s"
    text = qualify(f"update penstock.{table} set {name} = {mark}", database.dialect, database.url.schema)
    connection = raw_connection(database, checks=False)
    connection.execute(text, (value,))
    connection.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("found", [0, 2, 4])
def test_a_segment_with_an_unexpected_number_of_rows_is_refused(store: Store, found: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    put(
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
    put(store, "payload.data", b"nonsense")
    with pytest.raises(
        StoreError, match=r"queue 'q', partition 0, rows \[3, 6\): a segment of 8 bytes"
    ) as caught:
        queue.read(0, 4)
    assert (caught.value.parameters["start"], caught.value.parameters["end"]) == (3, 6)


def test_compaction_leaves_a_segment_of_other_rows_alone(store: Store) -> None:
    """It would make the rows of its neighbours unreadable, too."""
    queue = store.create_queue("q", SCHEMA)
    for number in range(40):
        queue.append(rows(number))
    other = encode(pa.RecordBatch.from_pylist(rows(7, 8), schema=SCHEMA)).to_pybytes()
    newest = "(select max(payload_id) from penstock.payload)"
    connection = raw_connection(store.database)
    mark = "?" if store.database.dialect == "sqlite" else "%s"
    text = f"update penstock.payload set data = {mark} where payload_id = {newest}"
    connection.execute(qualify(text, store.database.dialect, store.database.url.schema), (other,))
    connection.close()
    with pytest.raises(StoreError, match=r"queue 'q', partition 0, rows \[39, 40\): .* has 2 rows"):
        queue.compact()
    assert queue.read(0, 0, 39).num_rows == 39


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", [[2**31 - 1], [5, 3], [-1, 3], [2**40], [], [2], [None], [0, 3]])
def test_times_of_other_rows_are_refused_and_take_no_memory(store: Store, ends: list[int | None]) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    schema = pa.schema([(name, pa.int64()) for name in ("end", "append", "timestamp")])
    columns = [pa.array(ends, pa.int64()), *[pa.array(range(len(ends)), pa.int64())] * 2]
    put(store, "payload.runs", encode(pa.RecordBatch.from_arrays(columns, schema=schema)).to_pybytes())
    before = pa.total_allocated_bytes()
    with pytest.raises(StoreError, match="are stored for other rows") as caught:
        list(reading.read(store.database, queue.record, [Range(0, 0, 3)], with_runs=True))
    assert caught.value.condition == "SEGMENT_UNREADABLE"
    assert pa.total_allocated_bytes() < before + (1 << 20)


def test_a_partition_of_more_rows_than_fit_is_refused_where_it_is_read(store: Store) -> None:
    """To plan tasks for them would take all memory."""
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    put(store, "partition.next_index", (1 << 62) - 1)
    for read in (
        lambda: queue.read(0, 0),
        queue.info,
        lambda: store.database.run(lambda tx: catalog.partitions(tx, queue.record), write=False),
    ):
        with pytest.raises(
            StoreError, match=r"partition 0 of queue 'q' is not what Penstock writes"
        ) as caught:
            read()
        assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize("column", ["retention_rows", "retention_age", "retention_bytes"])
def test_a_negative_retention_is_not_the_callers_mistake(store: Store, column: str) -> None:
    store.create_queue("q", SCHEMA)
    put(store, f"queue.{column}", -1)
    with pytest.raises(StoreError, match="the retention of queue 'q' is not what Penstock writes") as caught:
        store.queue("q")
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_a_generation_that_has_no_successor_is_refused_by_name(store: Store) -> None:
    store.create_queue("q", SCHEMA)
    consumer = store.create_consumer("c")
    put(store, "store.last_generation", (1 << 63) - 1)
    with pytest.raises(StoreError, match="the last generation is not what Penstock writes") as caught:
        consumer.register("q")
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize("claimed", [0, 2**50])
def test_a_page_is_bounded_by_the_payloads_whatever_the_log_says(store: Store, claimed: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    for number in range(20):
        queue.append(rows(*range(number, number + 1000)))
    run_sql(store.database, f"update penstock.segment set bytes = {claimed}")
    size = len(bytes(run_sql(store.database, "select data from penstock.payload limit 1")[0][0]))
    chunks = list(reading.read(store.database, queue.record, [Range(0, 0, 20_000)], page_bytes=3 * size))
    assert sum(chunk.ends_page for chunk in chunks) >= 4
    assert chunks[-1].end == 20_000


@pytest.mark.parametrize("kind", [pa.null(), pa.struct([]), pa.struct([("a", pa.null())])])
def test_values_without_bytes_may_not_be_claimed_in_any_number(store: Store, kind: pa.DataType) -> None:
    """A list of two thousand million nulls takes two hundred bytes, until it is a list of Python."""

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
        queue.append(lists(MOST_WITHOUT_BYTES + 1))
    (batch,) = lists(2**31 - 1).to_batches()
    put(store, "payload.data", encode(batch).to_pybytes())
    with pytest.raises(StoreError, match="it claims 2147483647 values without any bytes"):
        queue.read(0, 0)


def test_a_record_of_very_many_characters_is_not_parsed(store: Store) -> None:
    store.create_queue("q", SCHEMA)
    put(store, "queue.key_columns", "[" + "[]," * (MOST_CHARACTERS // 3) + "[]]")
    with pytest.raises(StoreError, match=r"the key of queue 'q' is not what Penstock writes .*characters"):
        store.queue("q")


def test_plans_that_penstock_did_not_write_are_not_read_by_lists(store: Store) -> None:
    """Each may be as long as a value of the database."""
    store.create_queue("q", SCHEMA)
    for name in ("a", "b"):
        store.create_consumer(name).register("q")
    put(store, "registration.plan", "x" * (MOST_CHARACTERS + 1))
    assert [each.plan for each in store.registrations()] == [None, None]
    assert store.queue("q").info().consumers == ("a", "b")


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("registration", "owner = {long}"),
        ("registration", "app_id = {long}"),
        ("registration", "plan = {longest}"),
        ("mark", "app_id = {long}"),
        ("mark", "source = {long}"),
        ("marked_source", "app_id = {long}"),
        ("ledger", "sink = {long}"),
        ("ledger", "app_id = {long}"),
        ("ledger", "ranges = {longest}"),
        ("ledger", "logged = {longest}"),
        ("producer", "session = {long}"),
        ("producer", "owner = {long}"),
        ("staged", "app_id = {long}"),
        ("staged", "attempt = {long}"),
        ("feed_commit", "ends = {longest}"),
    ],
)
def test_nobody_writes_longer_texts_than_penstock_does(store: Store, table: str, values: str) -> None:
    """Whoever reads them, and many of them, would need any amount of memory."""
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c").register("q")
    store.producer("q", "s")
    number = queue.record.queue_id
    for row in (
        "mark (source, app_id, partition, next_index) values ('s', 'a', 0, 0)",
        "marked_source (source, app_id, generation) values ('s', 'a', 0)",
        (
            "ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
            "values ('s', 'a', 0, -1, '', 0, 0)"
        ),
        (
            "staged (app_id, batch_id, attempt, task, ordinal, queue_id, partition, row_count, bytes, "
            f"payload_id, created_at) values ('a', 0, 't', 0, 0, {number}, 0, 1, 1, 1, 0)"
        ),
        f"feed_commit (queue_id, version, timestamp, row_count, ends) values ({number}, 1, 1, 1, '[]')",
    ):
        run_sql(store.database, f"insert into penstock.{row}")
    long, longest = (long_text(store.database, characters) for characters in (10_000, (1 << 24) + 2))
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.{table} set {values.format(long=long, longest=longest)}")


@pytest.mark.parametrize(
    ("column", "value"),
    [("hashes", b""), ("hashes", bytes(10_000)), ("hashes", bytes((1 << 24) + 1)), ("partitions", 0)],
)
def test_key_homes_that_penstock_did_not_write_are_refused_by_name(
    store: Store, column: str, value: object
) -> None:
    queue = store.create_queue("q", SCHEMA, key="n")
    queue.append(rows(1))
    queue.add_partitions(1)
    put(store, f"key_home.{column}", value)
    with pytest.raises(StoreError, match="the keys that queue 'q' had when it grew"):
        store.queue("q").append(rows(2))


def test_a_key_of_no_column_is_refused_by_name(store: Store) -> None:
    store.create_queue("q", SCHEMA, key="n")
    put(store, "queue.key_columns", '["nope"]')
    with pytest.raises(StoreError, match="the key of queue 'q' is not what Penstock writes"):
        store.queue("q").append(rows(1))


def test_a_bad_queue_does_not_keep_the_others_from_being_maintained(store: Store) -> None:
    for name in ("a bad one", "good"):
        store.create_queue(name, SCHEMA, retention=Retention(rows=1)).append(rows(1))
    queue = store.queue("good")
    for number in range(3):
        queue.append(rows(number))
    run_sql(store.database, "update penstock.queue set partitions = 0 where name = 'a bad one'")
    assert store.queues() == ["a bad one", "good"]
    with pytest.raises(StoreError, match="the number of partitions of queue 'a bad one'"):
        store.maintain()
    assert queue.info().partitions[0].rows == 1


def test_a_time_beyond_any_date_does_not_stop_retention(store: Store) -> None:
    keeps = Retention(rows=1, age=timedelta(days=1))
    queue = store.create_queue("q", SCHEMA, retention=keeps)
    for number in range(3):
        queue.append(rows(number))
    put(store, "partition.last_timestamp", 4_611_686_018_427_380_000)
    queue.maintain()
    (part,) = store.database.run(lambda tx: catalog.partitions(tx, queue.record), write=False)
    assert part.rows == 1


def test_sums_of_what_others_have_written_do_not_overflow(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    columns = (
        "app_id, batch_id, attempt, task, ordinal, queue_id, partition, row_count, bytes, payload_id, "
        "created_at"
    )
    for ordinal in range(2):
        run_sql(
            store.database,
            f"insert into penstock.staged ({columns}) select 'a', 0, 'x', 0, {ordinal}, queue_id, 0, 1, "
            f"9223372036854775807, {ordinal}, 1 from penstock.queue",
        )
        run_sql(
            store.database,
            "insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
            f"values ('table:t', 'a', {ordinal}, -1, '[]', 9223372036854775807, 1)",
        )
    assert store.info().staged_segments == 2
    assert store.clean_up() == 2


def claim(store: Store, batch: pa.RecordBatch, width: int | None = None) -> None:
    """Make the only segment one of these rows."""
    put(store, "payload.data", encode(batch).to_pybytes())
    put(store, "payload.width", batch.num_columns if width is None else width)
    put(store, "segment.end_index", batch.num_rows)
    put(store, "partition.next_index", batch.num_rows)


@pytest.mark.parametrize("width", [0, 1])
def test_a_segment_with_fewer_columns_than_its_queue_ever_had_is_refused(store: Store, width: int) -> None:
    """Its rows would have no bytes, so that it could claim any number of them."""
    queue = store.create_queue("q", pa.schema([("nothing", pa.null()), ("id", pa.int64())]))
    queue.append([{"id": 1}])
    consumer = store.create_consumer("c")
    consumer.register("q")
    nothing = pa.StructArray.from_arrays([pa.nulls(10**9)] * width, ["nothing"] * width)
    claim(store, pa.RecordBatch.from_struct_array(nothing if width else no_columns(10**9)))
    before = pa.total_allocated_bytes()
    for read in (
        lambda: queue.read(0, 0),
        lambda: queue.read(0, 0, max_rows=1),
        lambda: queue.read(0, 0, max_rows=1, columns=["nothing"]),
        lambda: consumer.pull("q", 0, max_rows=1),
    ):
        with pytest.raises(StoreError, match=rf"rows \[0, 1000000000\): the segment has {width} columns"):
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
    put(store, "payload.data", encode(many).to_pybytes())
    put(store, "payload.width", 1)
    before, peak = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(StoreError, match=f"has {1 << 24} rows"):
        queue.compact()
    assert max(pa.default_memory_pool().max_memory() - peak, pa.total_allocated_bytes() - before) < 64 << 20


def test_columns_that_came_later_are_filled_for_the_rows_that_are_read(store: Store) -> None:
    """A few bytes can be a hundred million rows, and the nulls of each take more."""
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


def test_triggers_and_views_of_the_file_can_only_call_sqlites_own_functions(store: Store) -> None:
    if store.database.dialect == "sqlite":
        with store.database.transaction(write=False) as tx:
            assert tx.query("pragma trusted_schema") == [(0,)]


DEEP = "[" * 100_000 + "]" * 100_000


def read_key(store: Store, url: str) -> None:
    store.queue("q")


def trim_at_plan(store: Store, url: str) -> None:
    registration = store.consumer("c").registration("q")
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    assert lock.acquire()
    store.queue("q").trim(0, 1)


def read_feed(store: Store, url: str) -> None:
    QueueFeed("feed", url).open().describe()


def read_commits(store: Store, url: str) -> None:
    feed = QueueFeed("feed", url).open()
    list(feed.commits(feed.beginning, feed.newest(feed.beginning)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [DEEP, "{", "5", "[{}]"], ids=["deep", "broken", "another kind", "no text"])
@pytest.mark.parametrize(
    ("column", "read"),
    [
        ("queue.key_columns", read_key),
        ("registration.plan", trim_at_plan),
        ("queue.contract", read_feed),
        ("feed_commit.ends", read_commits),
    ],
)
def test_a_record_with_other_json_is_refused_by_name(
    store: Store, store_url: str, column: str, read: Callable[[Store, str], None], text: str
) -> None:
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    store.create_consumer("c")
    store.consumer("c").register("q")
    keys = store.consumer("c").registration("q").keys
    store.database.run(lambda tx: tx.run("open_plan", epoch=0, plan="{}", **keys))
    feed = QueueFeed.create("feed", SCHEMA, ChangeContract(row_id="n"), store=store_url)
    feed.append_commit(1, datetime.now(UTC), [{"n": 1, "_change_type": "insert"}])
    put(store, column, text)
    with pytest.raises(StoreError, match="is not what Penstock writes") as caught:
        read(store, store_url)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [2**53 + 1, -(2**63)])
def test_numbers_that_lead_to_others_of_more_than_64_bits_are_refused(store: Store, value: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    for number in range(3):
        queue.append(rows(number))
    if store.database.dialect == "sqlite":
        put(store, "store.next_block", value)
        with pytest.raises(StoreError, match="UNREADABLE_RECORD"):
            queue.append(rows(3))
        put(store, "store.next_block", 9)
    put(store, "segment.bytes", abs(value) - 1)
    with contextlib.suppress(StoreError):
        queue.compact()
    assert queue.read(0, 0).num_rows == 3


@pytest.mark.timeout(60)
def test_a_segment_that_is_missing_is_named_where_a_time_is_looked_up(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    store.create_consumer("c").register("q")
    put(store, "segment.start_index", 50)
    put(store, "segment.end_index", 60)
    with pytest.raises(StoreError, match=r"lacks rows \[0, 1\)") as caught:
        store.consumer("c").seek("q", to=datetime(2020, 1, 1, tzinfo=UTC))
    assert caught.value.condition == "SEGMENT_MISSING"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("partitions", [10**9, 10_001, 0, -1])
def test_a_number_of_partitions_that_no_queue_can_have_is_refused(store: Store, partitions: int) -> None:
    """Maintenance would not end, and no row could be placed."""
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    put(store, "queue.partitions", partitions)
    for work in (lambda: store.queue("q"), store.maintain):
        with pytest.raises(StoreError, match=f"it is {partitions}, and a queue has 1 to 10000") as caught:
            work()
        assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize("index", [10**12, 2**63 - 1, -5])
@pytest.mark.parametrize("read", [lambda consumer: consumer.pull("q", 0), lambda consumer: consumer.lag("q")])
def test_an_offset_that_no_consumer_can_have_is_refused(
    store: Store, index: int, read: Callable[[Consumer], object]
) -> None:
    store.create_queue("q", SCHEMA).append(rows(1, 2, 3))
    consumer = store.create_consumer("c")
    consumer.register("q")
    put(store, "position.next_index", index)
    with pytest.raises(
        StoreError, match=f"consumer 'c' on queue 'q', partition 0 .*it is {index}, and"
    ) as caught:
        read(consumer)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.parametrize(
    ("column", "index"), [("first_index", 10**12), ("first_index", -1), ("next_index", -1)]
)
def test_rows_that_no_partition_can_have_are_refused(store: Store, column: str, index: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    put(store, f"partition.{column}", index)
    with pytest.raises(StoreError, match="partition 0 of queue 'q' is not what Penstock writes") as caught:
        queue.info()
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_a_partition_whose_end_was_moved_is_refused_where_its_rows_are_read(store: Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    put(store, "partition.next_index", 10**12)
    with pytest.raises(StoreError) as caught:
        queue.read(0, 3)
    assert caught.value.condition == "STORE_ERROR.PAST_END"
    queue.append(rows(4))
    with pytest.raises(StoreError, match=r"lacks rows \[3, 1000000000000\)") as caught:
        queue.read(0, 0)
    assert caught.value.condition == "SEGMENT_MISSING"


@pytest.mark.parametrize(
    "state",
    [
        "first_index = next_index + 10",
        "first_index = -1",
        "next_index = -5",
        "next_index = 9223372036854775807",
        "last_timestamp = 9223372036854775807",
        "bytes = 9223372036854775807",
        "segments = 9223372036854775807",
        "next_index = 1099511627777",
    ],
)
def test_nobody_puts_a_partition_into_a_state_that_no_append_leaves_behind(store: Store, state: str) -> None:
    """A role that may append may write these columns."""
    store.create_queue("q", pa.schema([("n", pa.int64())])).append([{"n": 1}])
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.partition set {state}")
    assert store.queue("q").append([{"n": 2}]).rows == 1
    assert store.queue("q").read(0, 0)["n"].to_pylist() == [1, 2]


def test_a_pull_of_rows_that_unpack_to_much_returns_fewer(
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


def test_a_number_at_its_limit_is_named(store: Store) -> None:
    """The schema allows it, and the next append would go beyond."""
    queue = store.create_queue("q", pa.schema([("n", pa.int64())]), partitions=2)
    queue.register(store.create_consumer("c").name)
    store.producer("q", "s")
    for change in (
        f"partition set next_index = {1 << 40}",
        f"partition set first_index = 0, next_index = 0, segments = {(1 << 62) - 1}",
        f"partition set segments = 0, bytes = {(1 << 62) - 1}",
        f"partition set bytes = 0, last_timestamp = {(1 << 62) - 1}",
    ):
        run_sql(store.database, f"update penstock.{change}")
        for partition in (0, None):
            with pytest.raises(StoreError, match=r"queue 'q' is not what Penstock writes") as caught:
                queue.append([{"n": 1}, {"n": 2}], partition)
            assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"
    run_sql(store.database, f"update penstock.producer set epoch = {(1 << 62) - 1}")
    with pytest.raises(StoreError, match="producer session 's' of queue 'q' is not what"):
        store.producer("q", "s")
    run_sql(store.database, f"update penstock.registration set epoch = {(1 << 62) - 1}")
    with pytest.raises(StoreError, match="the registration of consumer 'c' on queue 'q' is not what"):
        Owner(store.database, "c", "q")


def test_a_queue_that_nobody_can_read_is_dropped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bad", "good"):
        store.create_queue(name, pa.schema([("n", pa.int64())])).append([{"n": 1}])
    bad = store.queue("bad").record.queue_id
    connection = raw_connection(store.database, checks=False)
    update = f"update penstock.partition set next_index = {1 << 41} where queue_id = {bad}"
    connection.execute(qualify(update, store.database.dialect, store.database.url.schema))
    connection.close()
    with pytest.raises(StoreError, match="partition 0 of queue 'bad'"):
        store.maintain()
    assert any("maintenance of queue 'bad' failed" in record.getMessage() for record in caplog.records)
    store.drop_queue("bad")
    store.maintain()


@pytest.mark.parametrize(
    "state",
    [
        "registration set epoch = -1",
        "registration set generation = -1",
        "registration set vital = 77",
        "registration set draining = 9",
        "registration set plan_epoch = 5",
        "position set safe_index = -7",
        "position set next_index = 9223372036854775807",
        "producer set sequence = 9223372036854775807",
        "producer set sequence = -9",
        "producer set epoch = 0",
    ],
)
def test_nobody_writes_a_state_of_a_reader_or_producer_that_none_leaves_behind(
    store: Store, state: str
) -> None:
    queue = store.create_queue("q", pa.schema([("n", pa.int64())]))
    queue.register(store.create_consumer("c").name)
    store.producer("q", "s")
    with pytest.raises(Exception, match=r"(?i)check constraint"):
        run_sql(store.database, f"update penstock.{state}")
