"""Uniform samples: of batches, of tasks that are merged, of streams."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError
from penstock.peek.sample import Reservoir, draw_from
from tests.support.spark_queues import fill, make_queue, one_store, stream


def numbers(start: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"number": np.arange(start, start + rows)})


def drawn(batches: list[pa.RecordBatch], rows: int, random: np.random.Generator) -> pa.Table | None:
    found = list(draw_from(iter(batches), rows, random))
    return pa.Table.from_batches(found) if found else None


@given(sizes=st.lists(st.integers(0, 40), max_size=8), rows=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_sample_has_the_rows_with_the_smallest_keys_in_their_order(
    sizes: list[int], rows: int, seed: int
) -> None:
    starts = np.cumsum([0, *sizes])
    batches = [numbers(int(start), size) for start, size in zip(starts, sizes, strict=False)]
    found = drawn(batches, rows, np.random.default_rng(seed))
    keys = np.random.default_rng(seed).random(sum(sizes))
    if not sum(sizes):
        assert found is None
        return
    assert found is not None
    assert found["number"].to_pylist() == np.argsort(keys)[:rows].tolist()
    assert found["seen"].to_pylist() == [sum(sizes), *[0] * (found.num_rows - 1)]


@given(cut=st.integers(0, 50), rows=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_merged_samples_of_parts_equal_the_sample_of_the_whole(cut: int, rows: int, seed: int) -> None:
    keys = np.random.default_rng(seed).random(50)
    table = pa.table({"number": np.arange(50)})
    whole, merged = Reservoir(rows), Reservoir(rows)
    whole.add(table, keys)
    for part in (slice(0, cut), slice(cut, 50)):
        reservoir = Reservoir(rows)
        reservoir.add(table.slice(part.start, part.stop - part.start), keys[part])
        if (kept := reservoir.kept()) is not None:
            merged.add(*kept)
    found, wanted = merged.kept(), whole.kept()
    assert found is not None
    assert wanted is not None
    assert found[0].equals(wanted[0])


def test_each_row_and_each_pair_is_sampled_equally_often() -> None:
    random, draws, rows, of = np.random.default_rng(5), 4_000, 3, 12
    singles: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(draws):
        merged = Reservoir(rows)
        for start, size in ((0, 2), (2, 7), (9, 3)):
            part = drawn([numbers(start, size)], rows, random)
            assert part is not None
            merged.add(part.select(["number"]), part["key"].to_numpy())
        kept = merged.kept()
        assert kept is not None
        found = sorted(kept[0]["number"].to_pylist())
        assert len(set(found)) == rows
        singles.update(found)
        pairs.update((a, b) for a in found for b in found if a < b)
    # Chi-square with 11 and 65 degrees of freedom: above the limits once in a hundred thousand times.
    assert chi_square(singles, draws * rows / of, of) < 44
    assert chi_square(pairs, draws * 3 / 66, 66) < 123


def chi_square(counts: Counter[Any], expected: float, cells: int) -> float:
    assert len(counts) == cells
    return sum((count - expected) ** 2 / expected for count in counts.values())


@one_store
def test_a_sample_of_the_current_rows_of_a_queue(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    orders = make_queue(store, partitions=2)
    fill(orders, range(3_000))
    fill(orders, range(3_000, 10_000), partition=1)
    store.create_consumer("billing").register("orders", start={0: 1_000})
    before = store.consumer("billing").registration("orders")
    frame = stream(spark, store_url, consumer="billing", maxRowsPerTrigger="4000", rowsPerTask="1000")
    rows = penstock.take_sample(frame, 200, seed=1)
    found = [row.id for row in rows]
    assert (len(set(found)), rows.seen, rows.complete) == (200, 9_000, True)
    assert set(found) <= set(range(1_000, 10_000))
    # A hypergeometric count: 7,000 of 9,000 rows are of the second partition.
    assert 125 < sum(number >= 3_000 for number in found) < 182
    assert rows.note == "200 rows, a sample of 9,000"
    assert store.consumer("billing").registration("orders") == before
    assert penstock.take_sample(frame, 200, seed=1) == rows
    assert penstock.take_sample(frame, 200) != rows


@one_store
def test_a_sample_of_fewer_rows_has_them_all(
    spark: SparkSession, store: penstock.Store, store_url: str
) -> None:
    orders = make_queue(store)
    assert len(penstock.take_sample(stream(spark, store_url), 5)) == 0
    fill(orders, range(3))
    rows = penstock.take_sample(stream(spark, store_url).dropDuplicates(["id"]), 5)
    assert (sorted(row.id for row in rows), rows.seen) == ([0, 1, 2], 3)


def test_a_sample_of_rows_arriving_within_a_time(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 1_000).load()
    rows = penstock.take_sample(rate, 10, seconds=6)
    assert len({row.value for row in rows}) == 10
    assert rows.seen is not None
    assert rows.seen > 10


@pytest.mark.parametrize("wrong", [{"n": -1}, {"seconds": 0}, {"seed": -1}, {"seed": 0.5}])
def test_arguments_of_the_wrong_type_are_refused(spark: SparkSession, wrong: dict[str, Any]) -> None:
    rate = spark.readStream.format("rate").load()
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        penstock.take_sample(**{"df": rate, "n": 1} | wrong)


@one_store
def test_rows_without_columns_are_sampled(spark: SparkSession, store: penstock.Store, store_url: str) -> None:
    fill(make_queue(store), range(10))
    rows = penstock.take_sample(stream(spark, store_url).select(), 3)
    assert (list(rows), rows.seen) == ([(), (), ()], 10)
