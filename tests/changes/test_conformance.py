"""Random feeds that fulfil their contract give the same rows as Spark 4.3.0, in batch and on streams."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.changes.options import ChangeOptions, parse_net_window
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.changes.passes.violations import check_rows
from penstock.json_text import Json
from tests.support.change_frames import Files, Row, Sink, collected, contract, frame, table, tuples

CASES: list[Json] = json.loads((Path(__file__).parent / "cdc_spark43.json").read_text())["cases"]
LAYOUT = Layout(3, 4, 5, row_id=((0,),), data=((0,), (1,), (2,)), row_version=(2,))
# Cases with every flag and every option, also those that go together with nothing to do.
pytestmark = pytest.mark.filterwarnings("ignore:.* does nothing under this contract")
LONG = 100 * 86_400_000_000
END = 4_000_000_000_000_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_passes_agree_with_spark(case: dict[str, object]) -> None:
    """Without Spark: all rows together, and with any part of them processed first."""
    options = ChangeOptions(
        case["options"]["deduplicationMode"],
        case["options"]["computeUpdates"] == "true",
        parse_net_window(None),
    )
    passes = Passes.of(contract(case["flags"]), options)
    rows = [row for batch in case["batches"] for row in batch]
    for parts in (1, 2, 3):
        first = []
        for part in range(parts):
            some = ChangeRows(table(rows[part::parts]), LAYOUT)
            check_rows(some, needs_content=True)
            first += tuples(passes.run_on_part(some).table)
        whole = passes.run(ChangeRows(table(first), LAYOUT))
        assert Counter(tuples(whole.table)) == Counter(map(tuple, case["batch"]))


def groups(*, net: bool) -> list[Any]:
    """The cases with the same flags and options, together."""
    found: dict[tuple[object, ...], list[Json]] = {}
    for case in CASES:
        mode, updates = case["options"]["deduplicationMode"], case["options"]["computeUpdates"] == "true"
        if net or mode != "netChanges":
            found.setdefault(("".join(case["flags"]), mode, updates), []).append(case)
    return [
        pytest.param(
            *key,
            cases,
            id=f"{key[0] or 'none'}-{key[1]}-{'updates' if key[2] else 'plain'}",
            marks=[pytest.mark.soak] if net else [],
        )
        for key, cases in found.items()
    ]


def one_after_the_other(cases: list[Json], what: str, first: int = 0) -> list[Any]:
    """The rows of several cases with ids, versions and times of their own, as one feed has them."""

    def own(row: Row, place: int) -> Row:
        row_id, data, rv, change, version, time = row
        return (
            row_id * 1000 + place,
            data,
            rv + place * 1000,
            change,
            version + place * 1000,
            time + place * LONG,
        )

    parts = [(place, case[what]) for place, case in enumerate(cases, first)]
    if what == "batches":
        return [[own(row, place) for row in batch] for place, batches in parts for batch in batches]
    return [own(row, place) for place, rows in parts for row in rows]


@pytest.mark.parametrize(("flags", "mode", "updates", "cases"), groups(net=True))
def test_batch(spark: SparkSession, flags: str, mode: str, updates: bool, cases: list[Json]) -> None:
    rows = [row for batch in one_after_the_other(cases, "batches") for row in batch]
    done = penstock.changes.post_process(
        frame(spark, rows), contract(flags), deduplication_mode=mode, compute_updates=updates
    )
    assert collected(done) == Counter(one_after_the_other(cases, "batch"))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "commits"), [("micro_batch", 1), ("micro_batch", 4), ("watermark", 1), ("watermark", 4)]
)
@pytest.mark.parametrize(("flags", "mode", "updates", "cases"), groups(net=False))
def test_stream(
    spark: SparkSession,
    tmp_path: Path,
    flags: str,
    mode: str,
    updates: bool,
    cases: list[Json],
    strategy: str,
    commits: int,
) -> None:
    files = Files(spark, tmp_path)
    files.add(*one_after_the_other(cases, "batches"))
    done = penstock.changes.post_process(
        files.read(commits),
        contract(flags, whole_commits=strategy == "micro_batch"),
        deduplication_mode=mode,
        compute_updates=updates,
    )
    assert Sink(tmp_path).run(done) == Counter(one_after_the_other(cases, "batch"))


def numbered(*, net: bool) -> list[tuple[int, penstock.ChangeContract, Json, list[Json]]]:
    """All groups in which a pass has something to do, each with the number of its first case."""
    found, first = [], 1
    for flags, mode, updates, cases in (group.values for group in groups(net=net)):
        if Passes.of(contract(flags), ChangeOptions(mode, updates, parse_net_window(None))):
            options = {"deduplication_mode": mode, "compute_updates": updates}
            found.append((first, contract(flags), options, cases))
            first += len(cases)
    return found


@pytest.fixture
def one_partition(spark: SparkSession) -> Iterator[None]:
    """One task after each shuffle: with so many of them it is the tasks that take the time."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, "1")
    yield
    spark.conf.set(name, str(before))


def test_batch_of_all_feeds_together(spark: SparkSession, one_partition: None) -> None:
    done, expected = [], Counter[Row]()
    for first, given, options, cases in numbered(net=True):
        rows = [row for batch in one_after_the_other(cases, "batches", first) for row in batch]
        done.append(penstock.changes.post_process(frame(spark, rows).coalesce(1), given, **options))
        expected += Counter(one_after_the_other(cases, "batch", first))
    assert len(done) > 20
    assert collected(reduce(DataFrame.union, done)) == expected


@pytest.mark.parametrize("strategy", [pytest.param("micro_batch", marks=pytest.mark.soak), "watermark"])
def test_stream_of_all_feeds_together(
    spark: SparkSession, tmp_path: Path, one_partition: None, strategy: str
) -> None:
    done, expected = [], Counter[Row]()
    for first, given, options, cases in numbered(net=False):
        (tmp_path / str(first)).mkdir()
        files = Files(spark, tmp_path / str(first))
        # The watermark of a query is the least of all its feeds', so all end at one time.
        last = (-first, "z", -first, "insert", 1_000_000, END)
        files.add(*one_after_the_other(cases, "batches", first), [last])
        said = replace(given, whole_commits=strategy == "micro_batch")
        done.append(penstock.changes.post_process(files.read(12).coalesce(1), said, **options))
        expected += Counter([*one_after_the_other(cases, "batch", first), last])
    assert len(done) > 10
    assert Sink(tmp_path).run(reduce(DataFrame.union, done)) == expected
