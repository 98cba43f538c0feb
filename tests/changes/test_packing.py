"""Packing of rows for the shuffle: rows with equal row ids meet, and nothing is lost."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.changes.stage import Packing, is_hashable
from penstock.spark import shuffle_batches
from penstock.spark.shuffle_batches import shuffle_keys, unpack

IDS = st.sampled_from([0.0, -0.0, float("nan"), 1.5, None])
ROWS = st.lists(st.tuples(IDS, st.sampled_from(["a", "b", None]), st.integers(0, 9)), max_size=30)


@given(ROWS, st.integers(1, 5))
def test_rows_with_equal_ids_go_to_the_same_partition(
    rows: list[tuple[object, ...]], partitions: int
) -> None:
    columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(_KINDS)]
    table = pa.table(columns, names=["x", "s", "n"])
    found: dict[str, set[int]] = {}
    seen: Counter[str] = Counter()
    for batch in Packing(((0,), (1,)), shuffle_keys(partitions)).pack(table):
        for row in range(batch.num_rows):
            part = batch.slice(row, 1)
            for rows_there in unpack([part]):
                for x, s, n in zip(*(column.to_pylist() for column in rows_there.columns), strict=True):
                    # Equal as Spark groups: NaN is one value, and so is zero.
                    key = f"{None if x is None else x + 0.0} {s}"
                    found.setdefault(key, set()).add(part.column(0)[0].as_py())
                    seen[f"{key} {n}"] += 1
    assert all(len(there) == 1 for there in found.values())
    assert seen == Counter(f"{None if x is None else x + 0.0} {s} {n}" for x, s, n in rows)


_KINDS = (pa.float64(), pa.string(), pa.int64())


@pytest.mark.parametrize("partitions", [1, 2, 7, 200])
def test_the_chosen_partitions_are_those_of_spark(spark: SparkSession, partitions: int) -> None:
    rows = list(enumerate(shuffle_keys(partitions)))
    hashed = spark.createDataFrame(rows, "i int, p int").select("i", F.expr(f"pmod(hash(p), {partitions})"))
    assert all(place == partition for place, partition in hashed.collect())


@pytest.mark.parametrize(
    ("limit", "least"), [("_CHUNK_ROWS", 10), ("_CHUNK_BYTES", 80)], ids=["rows", "bytes"]
)
def test_a_large_partition_is_split_into_several_parcels(
    monkeypatch: pytest.MonkeyPatch, limit: str, least: int
) -> None:
    monkeypatch.setattr(shuffle_batches, limit, least)
    table = pa.table({"id": list(range(95))})
    (batch,) = Packing(((0,),), shuffle_keys(2)).pack(table)
    assert all(rows.num_rows <= 10 for rows in unpack([batch]))
    assert sorted(row for rows in unpack([batch]) for row in rows[0].to_pylist()) == list(range(95))


def test_parcels_too_large_for_one_column_go_in_several_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shuffle_batches, "_CHUNK_ROWS", 10)
    monkeypatch.setattr(shuffle_batches, "_BATCH_BYTES", 1_000)
    table = pa.table({"id": list(range(95))})
    batches = list(Packing(((0,),), shuffle_keys(2)).pack(table))
    assert len(batches) > 1
    assert all(batch.column(1).nbytes < 2_000 for batch in batches)
    assert sorted(row for rows in unpack(batches) for row in rows[0].to_pylist()) == list(range(95))


def test_ids_that_cannot_be_hashed_are_detected() -> None:
    assert is_hashable([pa.int64(), pa.string()])
    assert not is_hashable([pa.int64(), pa.list_(pa.int64())])
