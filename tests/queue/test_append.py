"""Appends: the partitions of rows, atomicity, and refused rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInputError, PartitionNotFoundError, QueueNotFoundError, SchemaMismatchError
from tests.support.queues import SCHEMA, everything, numbers, rows

TABLE = pa.table({"n": [1, 2, 3], "s": ["a", None, "c"]}, schema=SCHEMA)


@pytest.mark.parametrize(
    "given",
    [
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_pylist(),
        lambda: iter(TABLE.to_pylist()),
        TABLE.select(["s", "n"]),
        pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
        TABLE.cast(pa.schema([("n", pa.int32()), ("s", pa.large_string())])),
        TABLE.slice(0, 3),
    ],
    ids=["table", "batch", "dicts", "iterator", "other order", "chunks", "other types", "slice"],
)
def test_rows_in_any_supported_form_are_appended(store: penstock.Store, given: Any) -> None:
    queue = store.create_queue("q", SCHEMA)
    result = queue.append(given() if callable(given) else given)
    assert (result.ranges, result.rows, result.skipped) == ({0: (0, 3)}, 3, False)
    assert queue.read(0, 0).equals(TABLE)


@pytest.mark.parametrize("given", [[], TABLE.slice(0, 0), TABLE.to_batches()[0].slice(0, 0)])
def test_appending_no_rows_does_nothing(store: penstock.Store, given: Any) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    for target in (None, 1):
        result = queue.append(given, target)
        assert (result.ranges, result.rows) == ({}, 0)
    assert queue.info().rows == 0


def test_row_indexes_continue_across_appends(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    assert queue.append(rows(0, 1), 0).ranges == {0: (0, 2)}
    assert queue.append(rows(2), 1).ranges == {1: (0, 1)}
    assert queue.append(rows(3, 4, 5), 0).ranges == {0: (2, 5)}
    assert everything(queue) == {0: [0, 1, 3, 4, 5], 1: [2]}


def test_appends_without_a_key_rotate_through_the_partitions(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=4)
    touched = [queue.append(rows(*range(10))).ranges for _ in range(8)]
    assert all(len(ranges) == 1 for ranges in touched)
    assert {next(iter(ranges)) for ranges in touched} == {0, 1, 2, 3}
    assert all(part.rows == 20 for part in queue.info().partitions)


def test_rows_with_equal_keys_share_a_partition_and_keep_their_order(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=4, key=["s"])
    for start in range(0, 300, 100):
        queue.append([{"n": n, "s": f"key {n % 13}" if n % 13 else None} for n in range(start, start + 100)])
    homes: dict[Any, set[int]] = {}
    for part in range(4):
        table = queue.read(part, 0)
        for key in set(table["s"].to_pylist()):
            homes.setdefault(key, set()).add(part)
            values = [row["n"] for row in table.to_pylist() if row["s"] == key]
            assert values == sorted(values)
    assert len(homes) == 13
    assert all(len(parts) == 1 for parts in homes.values())
    assert len(set.union(*homes.values())) == 4


def test_a_key_has_the_same_partition_in_every_database_and_input_form(store: penstock.Store) -> None:
    queue = store.create_queue("q", pa.schema([("k", pa.int32())]), partitions=5, key=["k"])
    one_by_one = {k: next(iter(queue.append([{"k": k}]).ranges)) for k in range(40)}
    together = queue.append(pa.table({"k": pa.array(range(40), pa.int32())}))
    found = {
        row["k"]: part
        for part, (start, end) in together.ranges.items()
        for row in queue.read(part, start, end).to_pylist()
    }
    assert found == one_by_one
    assert [one_by_one[k] for k in range(10)] == [2, 0, 4, 3, 2, 0, 3, 2, 0, 4], "and in every version"


def test_an_unknown_partition_is_refused(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    for partition in (2, -1, 10**9):
        with pytest.raises(PartitionNotFoundError, match="has partitions 0 to 1"):
            queue.append(TABLE, partition)
    for partition in ("0", 0.0, True):
        with pytest.raises(InvalidInputError):
            queue.append(TABLE, partition)  # type: ignore[arg-type]
    assert queue.info().rows == 0


def test_a_keyed_row_is_refused_for_another_partition(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    home = next(iter(queue.append(rows(7)).ranges))
    assert queue.append(rows(7, 7), home).rows == 2
    with pytest.raises(
        InvalidInputError, match=r"KEY_IN_OTHER_PARTITION\] the key of row 0 belongs to partition"
    ):
        queue.append(rows(7), 1 - home)
    astray = next(n for n in range(100) if next(iter(queue.append(rows(n)).ranges)) != home)
    before = queue.info().rows
    with pytest.raises(
        InvalidInputError, match=r"KEY_IN_OTHER_PARTITION\] the key of row 2 belongs to partition"
    ):
        queue.append(rows(7, 7, astray), home)
    assert queue.info().rows == before


@pytest.mark.parametrize(
    ("given", "column", "problem"),
    [
        ([{"n": "x"}], "n", "VALUE"),
        ([{"n": 1}, {"n": 2**63}], "n", "VALUE"),
        ([{"m": 1}], "m", "UNKNOWN_COLUMN"),
        ([{"n": 1, "N": 2}], "n", "DUPLICATE_COLUMN"),
        (pa.table({"n": ["x"], "s": ["y"]}), "n", "COLUMN_TYPE"),
        (pa.table({"n": [1.5], "s": ["y"]}), "n", "COLUMN_TYPE"),
        (pa.table({"n": pa.array([2**63], pa.uint64())}), "n", "VALUE"),
        (pa.table({"n": [1], "s": ["a"], "t": [1]}), "t", "UNKNOWN_COLUMN"),
        ([{"n": None}], "n", "NULL_VALUE"),
        (pa.table({"n": pa.array([1, None]), "s": ["a", "b"]}), "n", "NULL_VALUE"),
        (pa.table({"s": ["a"]}), "n", "MISSING_COLUMN"),
    ],
)
def test_rows_that_do_not_match_the_schema_are_refused_and_nothing_is_appended(
    store: penstock.Store, given: Any, column: str, problem: str
) -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])
    queue = store.create_queue("q", schema, partitions=2)
    with pytest.raises(SchemaMismatchError) as caught:
        queue.append(given)
    assert caught.value.parameters["column"] == column
    assert caught.value.condition == f"SCHEMA_MISMATCH.{problem}"
    assert queue.info().rows == 0


def test_a_dropped_queue_refuses_appends(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    keyed = store.create_queue("k", SCHEMA, partitions=2, key=["n"])
    for each in (queue, keyed):
        store.drop_queue(each.name)
        store.create_queue(each.name, SCHEMA, partitions=2)
        for work in (
            lambda each=each: each.append(rows(1)),
            lambda each=each: each.append(rows(*range(30))),
            lambda each=each: each.read(0, 0),
            lambda each=each: each.append(pa.concat_tables([TABLE] * 50)),
        ):
            with pytest.raises(QueueNotFoundError, match="was dropped"):
                work()
        assert store.queue(each.name).info().rows == 0


def test_a_large_append_is_split_into_segments_but_stays_one_append(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2)
    table = pa.table({"n": range(200_000), "s": pa.nulls(200_000, pa.string())}, schema=SCHEMA)
    assert queue.append(table, 1).ranges == {1: (0, 200_000)}
    assert queue.info().partitions[1].segments == 4
    assert queue.read(1, 0).equals(table)
    assert numbers(queue.read(1, 65_000, 66_000)) == list(range(65_000, 66_000))


def test_append_times_never_go_back(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    first = queue.info().partitions[0].last_append
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    queue.append(rows(2))
    second = queue.info().partitions[0].last_append
    assert first is not None
    assert second is not None
    assert second >= first


def test_the_size_of_a_queue_is_the_size_of_its_segments(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=3, key=["n"])
    for _ in range(5):
        queue.append(rows(*range(50)))
    queue.compact()
    queue.trim(0, 3)
    for part in queue.info().partitions:
        segments = store.database.run(
            lambda tx, part=part: tx.all(  # type: ignore[misc]
                "read_segments",
                queue_id=queue.record.queue_id,
                partition=part.partition,
                start_index=-1,
                max_segments=10**6,
            ),
            write=False,
        )
        assert (part.bytes, part.segments) == (sum(s.bytes for s in segments), len(segments))
    assert store.info().bytes == queue.info().bytes
