"""A queue's rows in a Delta table: each of them once, whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import penstock
from penstock.errors import (
    CheckpointMismatchError,
    ConsumerInUseError,
    DataLostError,
    InvalidInputError,
    InvalidUrlError,
    QueueNotFoundError,
    SchemaMismatchError,
    TableRefusedError,
)
from penstock.export.delta_table import DeltaExportTable
from penstock.tables.delta.transactions import commit_properties
from tests.support.waiting import wait_until

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("orders", SCHEMA, partitions=2)


@pytest.fixture
def export(store_url: str, queue: penstock.Queue, tmp_path: Path) -> Callable[..., penstock.QueueExport]:
    def made(**options: object) -> penstock.QueueExport:
        return penstock.QueueExport("orders", store_url, f"delta://{tmp_path}/lake", **options)  # type: ignore[arg-type]

    return made


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., list[int]]:
    def read(name: str = "orders") -> list[int]:
        return sorted(DeltaTable(f"{tmp_path}/lake/{name}").to_pyarrow_table()["n"].to_pylist())

    return read


def _append(queue: penstock.Queue, *numbers: int, partition: int | None = None) -> None:
    queue.append([{"n": n, "s": str(n)} for n in numbers], partition)


def test_each_run_exports_what_is_new(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]]
) -> None:
    _append(queue, 1, 2, 3)
    assert export().run() == penstock.ExportStatus(commits=1, rows=3)
    assert export().run() == penstock.ExportStatus(commits=0, rows=0)
    _append(queue, 4, partition=0)
    _append(queue, 5, partition=1)
    assert export().run().rows == 2
    assert exported() == [1, 2, 3, 4, 5]


def test_the_consumer_follows_and_keeps_rows_from_being_trimmed(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport]
) -> None:
    _append(queue, 1, 2, partition=0)
    export().run()
    _append(queue, 3, 4, partition=0)
    assert store.consumer("export-orders").offsets("orders") == {0: 2, 1: 0}
    queue.trim(0, 4)
    assert queue.info().partitions[0].first_index == 2


def test_an_empty_queue_gives_an_empty_table(
    export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]]
) -> None:
    assert export().run().commits == 0
    assert exported() == []


def test_a_new_table_gets_the_rows_that_were_not_trimmed(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport],
    exported: Callable[..., list[int]],
) -> None:  # fmt: skip
    _append(queue, 1, 2, 3, partition=0)
    queue.trim(0, 2)
    export().run()
    assert exported() == [3]
    # The consumer is where the first table was.
    export(table="again", consumer="export-orders").run()
    assert exported("again") == [3]


def test_rows_that_a_crash_left_behind_the_consumer_are_not_repeated(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport],
    exported: Callable[..., list[int]],
) -> None:  # fmt: skip
    _append(queue, 1, 2, partition=0)
    export().run()
    # As if it had died between the commit of the table and that of the consumer.
    store.consumer("export-orders").seek("orders", to={0: 1})
    _append(queue, 3, partition=0)
    export().run()
    assert exported() == [1, 2, 3]
    assert store.consumer("export-orders").offsets("orders")[0] == 3


def test_an_older_version_of_the_table_gets_its_rows_again(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]],
    tmp_path: Path, store: penstock.Store,
) -> None:  # fmt: skip
    _append(queue, 1, partition=0)
    export().run()
    before = DeltaTable(f"{tmp_path}/lake/orders").version()
    _append(queue, 2, partition=0)
    export().run()
    # A backup of the folder from before the second commit.
    (tmp_path / f"lake/orders/_delta_log/{before + 1:020}.json").unlink()
    export().run()
    assert exported() == [1, 2]
    assert store.consumer("export-orders").offsets("orders")[0] == 2


def test_rows_that_are_gone_are_an_error(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport]
) -> None:
    _append(queue, 1, 2, 3, partition=0)
    export().run()
    _append(queue, 4, 5, partition=0)
    store.consumer("export-orders").unregister("orders")
    queue.trim(0, 4)
    with pytest.raises(DataLostError, match="up to 3, and the queue has them from 4"):
        export().run()


def test_a_queue_with_fewer_rows_than_the_table_is_refused(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport], tmp_path: Path
) -> None:
    _append(queue, 1, partition=0)
    export().run()
    name = f"penstock-queue:{store.uuid}:orders:{queue.record.generation}:0"
    write_deltalake(
        f"{tmp_path}/lake/orders",
        pa.table({"n": [2], "s": ["x"]}),
        mode="append",
        commit_properties=commit_properties({name: 2}),
    )
    with pytest.raises(CheckpointMismatchError, match="up to 2, and the queue ends at 1"):
        export().run()


def test_a_recreated_queue_is_another_one(
    store: penstock.Store, queue: penstock.Queue, export: Callable[..., penstock.QueueExport],
    exported: Callable[..., list[int]],
) -> None:  # fmt: skip
    _append(queue, 1)
    export().run()
    store.drop_queue("orders", force=True)
    _append(store.create_queue("orders", SCHEMA), 2)
    with pytest.raises(TableRefusedError) as caught:
        export().run()
    assert caught.value.condition == "TABLE_REFUSED.OTHER_QUEUE"
    export(table="new").run()
    assert (exported(), exported("new")) == ([1], [2])


def test_columns_and_partitions_that_come_later_are_exported(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], tmp_path: Path
) -> None:
    _append(queue, 1, partition=0)
    export().run()
    queue.add_columns(pa.schema([("more", pa.float64())]))
    queue.add_partitions(2)
    queue.append([{"n": 2, "s": None, "more": 0.5}], 3)
    export().run()
    rows = DeltaTable(f"{tmp_path}/lake/orders").to_pyarrow_table().sort_by("n").to_pylist()
    assert rows == [{"n": 1, "s": "1", "more": None}, {"n": 2, "s": None, "more": 0.5}]


def test_metadata_columns_say_where_a_row_came_from(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], tmp_path: Path
) -> None:
    _append(queue, 1, 2, partition=1)
    export(metadata_columns=True).run()
    rows = DeltaTable(f"{tmp_path}/lake/orders").to_pyarrow_table().sort_by("n").to_pylist()
    assert [(row["_queue"], row["_partition"], row["_row_index"]) for row in rows] == [
        ("orders", 1, 0),
        ("orders", 1, 1),
    ]


def test_a_table_with_other_columns_is_refused_and_one_with_more_is_not(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], tmp_path: Path
) -> None:
    _append(queue, 1)
    write_deltalake(f"{tmp_path}/lake/more", pa.table({"x": [1], "s": ["a"], "n": pa.array([0], pa.int64())}))
    export(table="more").run()
    table = DeltaTable(f"{tmp_path}/lake/more").to_pyarrow_table().sort_by("n")
    assert table.to_pylist() == [{"x": 1, "s": "a", "n": 0}, {"x": None, "s": "1", "n": 1}]
    write_deltalake(f"{tmp_path}/lake/other", pa.table({"n": ["text"], "s": ["a"]}))
    with pytest.raises(SchemaMismatchError):
        export(table="other").run()


def test_a_table_that_forgets_is_refused(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], tmp_path: Path
) -> None:
    write_deltalake(
        f"{tmp_path}/lake/orders",
        pa.table({"n": pa.array([0], pa.int64()), "s": ["a"]}),
        configuration={"delta.setTransactionRetentionDuration": "interval 1 days"},
    )
    with pytest.raises(TableRefusedError, match="forgets which rows"):
        export().run()


def test_two_queues_in_one_table(
    store: penstock.Store, store_url: str, queue: penstock.Queue, tmp_path: Path,
    exported: Callable[..., list[int]],
) -> None:  # fmt: skip
    other = store.create_queue('ä "q"/:', SCHEMA)
    for name, numbers in ((queue, (1, 2)), (other, (3,)), (queue, (4,))):
        _append(name, *numbers)
        penstock.QueueExport(
            name.name, store_url, f"delta://{tmp_path}/lake", table="orders", consumer=f"export {name.name}"
        ).run()
    assert exported() == [1, 2, 3, 4]


def test_a_backlog_becomes_several_commits(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]]
) -> None:
    for first in range(0, 3000, 1000):
        _append(queue, *range(first, first + 1000))
    assert export(file_bytes=1024).run().commits > 1
    assert exported() == list(range(3000))


def test_small_files_are_merged(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]],
    tmp_path: Path,
) -> None:  # fmt: skip
    for n in range(40):
        _append(queue, n)
        export().run()
    assert exported() == list(range(40))
    assert len(DeltaTable(f"{tmp_path}/lake/orders").file_uris()) < 20


@pytest.fixture
def following(
    export: Callable[..., penstock.QueueExport],
) -> Iterator[Callable[[float], penstock.QueueExport]]:
    begun: list[tuple[penstock.QueueExport, threading.Thread]] = []

    def begin(every: float) -> penstock.QueueExport:
        exporting = export()
        thread = threading.Thread(target=exporting.follow, kwargs={"every": timedelta(seconds=every)})
        thread.start()
        begun.append((exporting, thread))
        return exporting

    yield begin
    for exporting, _ in begun:
        exporting.stop()
    for _, thread in begun:
        thread.join(30)


def test_rows_are_exported_as_they_come_and_one_export_takes_over_from_another(
    queue: penstock.Queue, following: Callable[[float], penstock.QueueExport],
    exported: Callable[..., list[int]], export: Callable[..., penstock.QueueExport],
) -> None:  # fmt: skip
    first = following(0)
    for n in range(3):
        _append(queue, n)
        wait_until(lambda n=n: first.status().rows == n + 1)  # type: ignore[misc]
    with pytest.raises(ConsumerInUseError, match="another process exports queue 'orders'"):
        export().run()
    second = following(0)
    first.stop()
    _append(queue, 3)
    wait_until(lambda: first.status().rows + second.status().rows == 4)
    assert exported() == [0, 1, 2, 3]


def test_of_two_exports_that_commit_the_same_rows_one_starts_over(
    queue: penstock.Queue, export: Callable[..., penstock.QueueExport], exported: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _append(queue, 1, 2, partition=0)
    append, attempts = DeltaExportTable.append, [0]

    def append_second(self: DeltaExportTable, *values: object) -> None:
        attempts[0] += 1
        if attempts[0] == 1:
            assert export(consumer="other").run().rows == 2
            _append(queue, 3, partition=1)
        append(self, *values)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaExportTable, "append", append_second)
    assert export().run().rows == 0, "row 3 was not there yet when it began"
    assert export().run().rows == 1
    assert exported() == [1, 2, 3]


def test_rows_wait_for_each_other(
    queue: penstock.Queue, following: Callable[[float], penstock.QueueExport],
    exported: Callable[..., list[int]],
) -> None:  # fmt: skip
    exporting = following(2)
    for n in range(4):
        _append(queue, n)
    wait_until(lambda: exporting.status().rows == 4)
    assert exporting.status().commits <= 2


def test_wrong_arguments_are_refused(store_url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUrlError):
        penstock.QueueExport("orders", store_url, f"{tmp_path}/lake")
    with pytest.raises(InvalidInputError, match="file_bytes"):
        penstock.QueueExport("orders", store_url, f"delta://{tmp_path}/lake", file_bytes=0)
    penstock.connect(store_url).close()
    with pytest.raises(QueueNotFoundError):
        penstock.QueueExport("orders", store_url, f"delta://{tmp_path}/lake").run()
