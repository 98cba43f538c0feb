"""A queue's rows in a table of a lake: each of them once, whatever happens in between."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    ConsumerInUseError,
    DataLostError,
    InvalidInputError,
    InvalidNameError,
    InvalidUrlError,
    QueueNotFoundError,
    SchemaMismatchError,
    TableRefusedError,
)
from penstock.export.delta_table import DeltaExportTable
from penstock.export.iceberg_table import IcebergExportTable
from tests.export.conftest import SCHEMA, Begin, Export, append
from tests.export.lakes import DeltaLake, Lake
from tests.support.waiting import wait_until


def test_each_run_exports_what_is_new(queue: penstock.Queue, export: Export, lake: Lake) -> None:
    append(queue, 1, 2, 3)
    assert export().run() == penstock.ExportStatus(commits=1, rows=3)
    assert export().run() == penstock.ExportStatus(commits=0, rows=0)
    append(queue, 4, partition=0)
    append(queue, 5, partition=1)
    assert export().run().rows == 2
    assert lake.numbers("orders") == [1, 2, 3, 4, 5]


def test_the_consumer_follows_and_keeps_rows_from_being_trimmed(
    store: penstock.Store, queue: penstock.Queue, export: Export
) -> None:
    append(queue, 1, 2, partition=0)
    export().run()
    append(queue, 3, 4, partition=0)
    assert store.consumer("export").offsets("orders") == {0: 2, 1: 0}
    queue.trim(0, 4)
    assert queue.info().partitions[0].first_index == 2


def test_an_empty_queue_gives_an_empty_table(export: Export, lake: Lake) -> None:
    assert export().run().commits == 0
    assert lake.numbers("orders") == []


def test_a_new_table_gets_the_rows_that_were_not_trimmed(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    append(queue, 1, 2, 3, partition=0)
    queue.trim(0, 2)
    export().run()
    assert lake.numbers("orders") == [3]
    # The consumer is where the first table was.
    export(table="again", consumer="export").run()
    assert lake.numbers("again") == [3]


def test_rows_that_a_crash_left_behind_the_consumer_are_not_repeated(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    append(queue, 1, 2, partition=0)
    export().run()
    # As if it had died between the commit of the table and that of the consumer.
    store.consumer("export").seek("orders", to={0: 1})
    append(queue, 3, partition=0)
    export().run()
    assert lake.numbers("orders") == [1, 2, 3]
    assert store.consumer("export").offsets("orders")[0] == 3


def test_rows_that_are_gone_are_an_error(
    store: penstock.Store, queue: penstock.Queue, export: Export
) -> None:
    append(queue, 1, 2, 3, partition=0)
    export().run()
    append(queue, 4, 5, partition=0)
    store.consumer("export").unregister("orders")
    queue.trim(0, 4)
    with pytest.raises(DataLostError, match="up to 3, and the queue has rows from 4"):
        export().run()


def test_a_recreated_queue_is_another_one(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    append(queue, 1)
    export().run()
    store.drop_queue("orders", force=True)
    append(store.create_queue("orders", SCHEMA), 2)
    with pytest.raises(TableRefusedError) as caught:
        export().run()
    assert caught.value.condition == "TABLE_REFUSED.OTHER_QUEUE"
    # Nothing keeps its rows from being trimmed.
    assert not store.registrations()
    export(table="new").run()
    assert (lake.numbers("orders"), lake.numbers("new")) == ([1], [2])


def test_columns_and_partitions_that_come_later_are_exported(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    append(queue, 1, partition=0)
    export().run()
    queue.add_columns(pa.schema([("more", pa.float64())]))
    queue.add_partitions(2)
    queue.append([{"n": 2, "s": None, "more": 0.5}], 3)
    export().run()
    rows = lake.rows("orders").sort_by("n").to_pylist()
    assert rows == [{"n": 1, "s": "1", "more": None}, {"n": 2, "s": None, "more": 0.5}]


@pytest.mark.parametrize("lake", ["iceberg"], indirect=True)
def test_wider_types_are_exported(store: penstock.Store, store_url: str, lake: Lake) -> None:
    queue = store.create_queue("narrow", pa.schema([("n", pa.int32()), ("x", pa.float32())]))

    def run() -> list[dict[str, object]]:
        penstock.QueueExport("narrow", store_url, lake.url, table=lake.named("narrow")).run()
        return lake.rows("narrow").sort_by("n").to_pylist()

    queue.append([{"n": 1, "x": 0.5}])
    assert run() == [{"n": 1, "x": 0.5}]
    queue.widen_columns([("n", pa.int64()), ("x", pa.float64())])
    queue.append([{"n": 1 << 40, "x": 0.1}])
    assert run() == [{"n": 1, "x": 0.5}, {"n": 1 << 40, "x": 0.1}]


@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_a_table_that_cannot_get_a_wider_type_is_left_as_it_is(
    store: penstock.Store, store_url: str, lake: Lake
) -> None:
    queue = store.create_queue("narrow", pa.schema([("n", pa.int32())]))
    export = penstock.QueueExport("narrow", store_url, lake.url, table=lake.named("narrow"))
    queue.append([{"n": 1}])
    export.run()
    queue.widen_columns([("n", pa.int64())])
    queue.append([{"n": 1 << 40}])
    with pytest.raises(SchemaMismatchError, match="'n' is integer in the table and long in the rows"):
        export.run()
    assert lake.rows("narrow").to_pylist() == [{"n": 1}]


def test_metadata_columns_say_where_a_row_came_from(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    append(queue, 1, 2, partition=1)
    export(metadata_columns=True).run()
    rows = lake.rows("orders").sort_by("n").to_pylist()
    assert [(row["_queue"], row["_partition"], row["_row_index"]) for row in rows] == [
        ("orders", 1, 0),
        ("orders", 1, 1),
    ]


def test_two_queues_in_one_table(
    store: penstock.Store, store_url: str, queue: penstock.Queue, lake: Lake
) -> None:
    other = store.create_queue('ä "q"/:', SCHEMA)
    for name, numbers in ((queue, (1, 2)), (other, (3,)), (queue, (4,))):
        append(name, *numbers)
        penstock.QueueExport(
            name.name, store_url, lake.url, table=lake.named("orders"), consumer=f"export {name.name}"
        ).run()
    assert lake.numbers("orders") == [1, 2, 3, 4]


def test_a_backlog_becomes_several_commits(queue: penstock.Queue, export: Export, lake: Lake) -> None:
    for first in range(0, 3000, 1000):
        append(queue, *range(first, first + 1000))
    assert export(file_bytes=1024).run().commits > 1
    assert lake.numbers("orders") == list(range(3000))


@pytest.mark.few(2)
def test_small_files_are_merged(queue: penstock.Queue, export: Export, lake: Lake) -> None:
    for n in range(40):
        append(queue, n)
        export().run()
    assert lake.numbers("orders") == list(range(40))
    assert lake.files("orders") < 20


@pytest.mark.few(2)
def test_rows_are_exported_as_they_come_and_one_export_takes_over_from_another(
    queue: penstock.Queue, following: Begin, lake: Lake, export: Export
) -> None:
    first = following(0)
    for n in range(3):
        append(queue, n)
        wait_until(lambda n=n: first.status().rows == n + 1)  # type: ignore[misc]
    with pytest.raises(ConsumerInUseError, match="another process exports queue 'orders'"):
        export().run()
    second = following(0)
    first.stop()
    append(queue, 3)
    wait_until(lambda: first.status().rows + second.status().rows == 4)
    assert lake.numbers("orders") == [0, 1, 2, 3]


def test_of_two_exports_that_commit_the_same_rows_one_starts_over(
    queue: penstock.Queue, export: Export, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(queue, 1, 2, partition=0)
    kind = DeltaExportTable if isinstance(lake, DeltaLake) else IcebergExportTable
    append_first, attempts = kind.append, [0]

    def append_second(self: Any, *values: Any) -> None:
        attempts[0] += 1
        if attempts[0] == 1:
            assert export(consumer="other").run().rows == 2
            append(queue, 3, partition=1)
        append_first(self, *values)

    monkeypatch.setattr(kind, "append", append_second)
    # As if one had lost its lock.
    monkeypatch.setattr(penstock.QueueExport, "_lock_name", property(lambda self: str(uuid.uuid4())))
    assert export().run().rows == 0, "row 3 was not there yet when it began"
    assert export().run().rows == 1
    assert lake.numbers("orders") == [1, 2, 3]


def test_wrong_arguments_are_refused(store_url: str, lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(InvalidUrlError):
        penstock.QueueExport("orders", store_url, f"{tmp_path}/lake")
    with pytest.raises(InvalidInputError, match="file_bytes"):
        penstock.QueueExport("orders", store_url, lake.url, file_bytes=0)
    with pytest.raises(InvalidNameError):
        penstock.QueueExport("orders", store_url, "iceberg:lake")
    penstock.connect(store_url).close()
    with pytest.raises(QueueNotFoundError):
        penstock.QueueExport("orders", store_url, lake.url, table=lake.named("orders")).run()
