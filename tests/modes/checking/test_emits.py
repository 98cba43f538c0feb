"""What a query emits according to a report is what its preview shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.modes.checking.emits import (
    ADD,
    AFTER_WATERMARK,
    ALL,
    AT_ONCE,
    CHANGED,
    COUNT,
    FINISHED,
    FOREVER,
    FUNCTION,
    INPUTS,
    MATCHED,
    NEW_ROWS,
    NO_STATE,
    ONE_SIDE,
    ONLY_MATCHED,
    REPLACE_ALL,
    REPLACE_BY_KEY,
    SUBTOTALS,
    UNTIL_REMOVED,
    UNTIL_WATERMARK,
    Emits,
)
from penstock.modes.previewing.micro_batches import DATA, ModePreview
from tests.modes.frames import FRAMES, Inputs, inputs, settings_of

_START = datetime(2026, 1, 1, tzinfo=UTC)


def _rows(batch: int, suffix: str) -> list[dict[str, Any]]:
    """Some rows of one minute; keys come again in the next, and each minute is an hour behind the one
    before.
    """
    at = _START + timedelta(hours=batch)
    rows = [(at, 1, 20), (at + timedelta(seconds=5), 2, 30), (at + timedelta(seconds=20), 1, 40)]
    return [
        {f"ts{suffix}": ts, f"k{suffix}": k, f"value{suffix}": value + 100 * batch + len(suffix)}
        for ts, k, value in rows
    ]


BATCHES = {
    "events": [_rows(batch, "") for batch in range(4)],
    # The last has rows without a match.
    "others": [[row | {"k2": row["k2"] + batch} for row in _rows(batch, "2")] for batch in range(4)],
}


@pytest.mark.soak
@pytest.mark.parametrize("name", FRAMES)
def test_the_report_agrees_with_the_preview(name: str, spark: SparkSession, tmp_path: Path) -> None:
    frame = FRAMES[name]

    def transform(events: DataFrame, others: DataFrame) -> DataFrame:
        batch = spark.range(3).select(F.col("id").alias("k2"), F.lit("x").alias("name"))
        return frame.build(Inputs(events, others, batch))

    with settings_of(spark, name):
        report = penstock.modes.check(frame.build(inputs(spark, tmp_path / "streams")))
        allowed = [mode.mode for mode in report.modes if mode.allowed]
        shown = penstock.modes.preview(spark, transform, BATCHES, modes=allowed) if allowed else {}
    for mode in allowed:
        emits = report[mode].emits
        assert emits is not None
        for holds in (_ROWS[emits.rows], _STATE[emits.state], _SINK[emits.sink]):
            assert holds(shown[mode], emits), (mode, emits)


def _batches(found: ModePreview) -> list[list[dict[str, Any]]]:
    return [[_hashable(row) for row in batch.emitted.to_pylist()] for batch in found.batches]


def _hashable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value.items()) if isinstance(value, dict) else value for name, value in row.items()}


def _once(found: ModePreview, emits: Emits) -> bool:
    rows = [tuple(row.items()) for batch in _batches(found) for row in batch]
    return len(rows) == len(set(rows)) and (emits.when == AFTER_WATERMARK or _from_the_first(found))


def _from_the_first(found: ModePreview) -> bool:
    return bool(_batches(found)[0])


def _finished(found: ModePreview, emits: Emits) -> bool:
    """Nothing comes before there is a watermark, then each group once."""
    early = [batch.emitted.num_rows for batch in found.batches if batch.watermark is None]
    return _once(found, emits) and not any(early) and any(_batches(found))


def _changed(found: ModePreview, emits: Emits) -> bool:
    return _from_the_first(found) and emits.when == AT_ONCE


def _all(found: ModePreview, emits: Emits) -> bool:
    """No micro-batch has fewer rows than the one before."""
    counts = [batch.emitted.num_rows for batch in found.batches if batch.kind == DATA]
    return all(before <= after for before, after in pairwise(counts)) and counts[0] > 0


def _matched(found: ModePreview, emits: Emits) -> bool:
    """Rows without a match, whose other side is empty, come when the watermark has passed them."""
    lonely = _lonely(found)
    return _once(found, emits) and not lonely[0] and any(lonely)


def _lonely(found: ModePreview) -> list[list[dict[str, Any]]]:
    """The rows without a match of each micro-batch."""
    return [[row for row in batch if None in row.values()] for batch in _batches(found)]


_Holds = Callable[[ModePreview, Emits], bool]
_ROWS: dict[str, _Holds] = {
    NEW_ROWS: _once,
    FINISHED: _finished,
    CHANGED: _changed,
    ALL: _all,
    MATCHED: _matched,
    ONLY_MATCHED: lambda found, emits: _once(found, emits) and not any(_lonely(found)),
    FUNCTION: lambda found, _: any(_batches(found)),
    INPUTS: lambda found, _: _from_the_first(found),
}


def _keeps(found: ModePreview, _: Emits) -> bool:
    """One operator at least never gives a row up."""
    return any(
        not any(state.removed for state in states)
        and [each.total for each in states] == sorted(each.total for each in states)
        for states in zip(*(batch.operators for batch in found.batches), strict=True)
    )


def _keeps_one_side(found: ModePreview, _: Emits) -> bool:
    """The join gives rows up, and has more of them after each minute than after the one before."""
    totals = [batch.state_rows for batch in found.batches if batch.kind == DATA]
    removed = sum(batch.removed_rows for batch in found.batches)
    return removed > 0 and all(before < after for before, after in pairwise(totals))


def _gives_up_all_but(found: ModePreview, rows: int) -> bool:
    """Each minute but the last is removed, except for some rows that all of them share."""
    first = found.batches[0].state_rows
    removed = sum(batch.removed_rows for batch in found.batches)
    batches = sum(batch.kind == DATA for batch in found.batches)
    return removed == (first - rows) * (batches - 1)


_STATE: dict[str, _Holds] = {
    NO_STATE: lambda found, _: not any(batch.state_rows for batch in found.batches),
    COUNT: lambda found, _: max(batch.state_rows for batch in found.batches) == 1,
    UNTIL_WATERMARK: lambda found, _: sum(batch.removed_rows for batch in found.batches) > 0,
    ONE_SIDE: _keeps_one_side,
    SUBTOTALS: lambda found, _: _gives_up_all_but(found, 1),
    FOREVER: _keeps,
    UNTIL_REMOVED: lambda found, _: True,
}


def _by_key(found: ModePreview, emits: Emits) -> bool:
    """In one micro-batch no key comes twice; what the key of a function's rows is nobody knows, and subtotals
    have none.
    """
    if emits.rows == FUNCTION or not emits.key:
        return True
    for batch in _batches(found):
        keys = [tuple(row[name] for name in emits.key) for row in batch]
        if len(keys) != len(set(keys)):
            return False
    return True


_SINK: dict[str, _Holds] = {
    ADD: lambda found, emits: emits.rows == FUNCTION or _once(found, emits),
    REPLACE_BY_KEY: _by_key,
    REPLACE_ALL: lambda found, emits: emits.rows == NEW_ROWS or _all(found, emits),
}


@pytest.mark.parametrize(
    ("transform", "key"),
    [
        (lambda t: t.timed.groupBy(F.date_trunc("hour", "ts")).count(), ("date_trunc(hour, ts)",)),
        (lambda t: t.timed.groupBy(F.window("ts", "1 minute"), "k").count(), ("window", "k")),
        (lambda t: t.windows.select("window.start", "k", "count"), ("start", "k")),
        (lambda t: t.events.groupBy(F.col("k").alias("who AS what")).count(), ("who AS what",)),
        (lambda t: t.events.groupBy("k").count().toDF("who", "n").where("n > 1"), ("who",)),
        (lambda t: t.events.groupBy("k").count().select("count"), ()),
        (lambda t: t.events.groupBy("k").count().select((F.col("k") + 1).alias("k")), ()),
    ],
)
def test_the_key_is_described_with_the_names_of_the_result(
    transform: Callable[[Inputs], DataFrame], key: tuple[str, ...], spark: SparkSession, tmp_path: Path
) -> None:
    emits = penstock.modes.check(transform(inputs(spark, tmp_path)))["update"].emits
    assert emits is not None
    assert (emits.sink, emits.key) == (REPLACE_BY_KEY, key)


@pytest.mark.parametrize(
    ("transform", "missing"),
    [
        (lambda t: t.windows.select("count"), "window, k"),
        (lambda t: t.windows.select("window", "count"), "k"),
        (lambda t: t.windows.select("window.start", "k", "count"), None),
        (lambda t: t.windows.select(F.col("window.start").cast("date"), "k", "count"), "window"),
        (lambda t: t.windows, None),
        (lambda t: t.events.groupBy().count(), None),
    ],
)
def test_grouping_columns_that_the_result_lacks_are_named(
    transform: Callable[[Inputs], DataFrame], missing: str | None, spark: SparkSession, tmp_path: Path
) -> None:
    report = penstock.modes.check(transform(inputs(spark, tmp_path)))
    lacks = f"replace rows by key, but the result lacks columns that identify them: {missing}."
    assert str(report["update"].emits).endswith(lacks) == (missing is not None)
    assert ("lacks" in str(report["update"].emits)) == (missing is not None)
    assert "lacks" not in str(report["complete"].emits)
