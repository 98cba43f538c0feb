"""What a preview shows for each output mode, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession, functions

import penstock
from penstock.errors import InvalidInputError
from penstock.modes.previewing.micro_batches import DATA, NO_DATA, ModePreview
from penstock.modes.previewing.result import Preview

TEN_MINUTES = ("ts", "10 minutes")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where previews put their files; nothing may stay there."""
    place = tmp_path / "previews"
    place.mkdir()
    yield place
    assert list(place.iterdir()) == []


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, 12, minute, tzinfo=UTC)


def events(*batches: list[tuple[int, str]]) -> list[list[dict[str, Any]]]:
    return [[{"ts": at(minute), "key": key} for minute, key in batch] for batch in batches]


EVENTS = events(
    [(1, "a"), (4, "a"), (7, "b")],
    [(15, "a")],
    [(24, "b"), (3, "a")],
    [(25, "b")],
    [(2, "late"), (45, "b")],
)


def counted(frame: DataFrame) -> DataFrame:
    window = functions.window("ts", "10 minutes").alias("w")
    return frame.groupBy(window, "key").count().select("w.start", "key", "count")


@pytest.fixture(scope="module")
def counts(spark: SparkSession) -> Preview:
    return penstock.modes.preview(spark, counted, EVENTS, event_time=TEN_MINUTES)


def emitted(found: ModePreview) -> list[list[tuple[Any, ...]]]:
    """The rows of each micro-batch in an order of their own, instants as minutes."""
    tables = [[tuple(row.values()) for row in batch.emitted.to_pylist()] for batch in found.batches]
    minutes = [
        [tuple(value.minute if isinstance(value, datetime) else value for value in row) for row in rows]
        for rows in tables
    ]
    return [sorted(rows) for rows in minutes]


def test_append_emits_a_window_once_when_the_watermark_has_passed_it(counts: Preview) -> None:
    assert emitted(counts["append"]) == [
        [],
        [],
        [],
        [(0, "a", 3), (0, "b", 1)],
        [],
        [(10, "a", 1), (20, "b", 2)],
    ]


def test_update_emits_the_groups_that_changed(counts: Preview) -> None:
    assert emitted(counts["update"]) == [
        [(0, "a", 2), (0, "b", 1)],
        [(10, "a", 1)],
        [(0, "a", 3), (20, "b", 1)],
        [(20, "b", 2)],
        [(40, "b", 1)],
        [],
    ]


def test_complete_emits_all_groups_each_time_and_keeps_late_rows(counts: Preview) -> None:
    first = [(0, "a", 2), (0, "b", 1)]
    assert emitted(counts["complete"]) == [
        first,
        [*first, (10, "a", 1)],
        [(0, "a", 3), (0, "b", 1), (10, "a", 1), (20, "b", 1)],
        [(0, "a", 3), (0, "b", 1), (10, "a", 1), (20, "b", 2)],
        [(0, "a", 3), (0, "b", 1), (0, "late", 1), (10, "a", 1), (20, "b", 2), (40, "b", 1)],
    ]


@pytest.mark.parametrize("mode", ["append", "update"])
def test_each_micro_batch_has_its_watermark_and_state_rows(counts: Preview, mode: str) -> None:
    batches = counts[mode].batches
    watermarks = [batch.watermark for batch in batches]
    assert watermarks == [None, at(7).replace(hour=11, minute=57), at(5), at(14), at(15), at(35)]
    assert [batch.state_rows for batch in batches] == [2, 3, 4, 2, 3, 1]
    assert [batch.removed_rows for batch in batches] == [0, 0, 0, 2, 0, 2]
    assert {operator.operator for batch in batches for operator in batch.operators} == {"stateStoreSave"}


@pytest.mark.parametrize("mode", ["append", "update"])
def test_a_late_row_is_dropped_and_counted(counts: Preview, mode: str) -> None:
    assert [batch.dropped_rows for batch in counts[mode].batches] == [0, 0, 0, 0, 1, 0]
    assert "late" not in str(emitted(counts[mode]))


def test_complete_mode_drops_and_removes_no_rows(counts: Preview) -> None:
    batches = counts["complete"].batches
    assert [(batch.removed_rows, batch.dropped_rows) for batch in batches] == [(0, 0)] * 5
    assert [batch.state_rows for batch in batches] == [2, 3, 4, 4, 6]


def test_a_no_data_micro_batch_of_spark_is_labelled(counts: Preview) -> None:
    for mode in ("append", "update"):
        assert [(batch.batch, batch.kind, batch.input_rows) for batch in counts[mode].batches] == [
            (0, DATA, 3),
            (1, DATA, 1),
            (2, DATA, 2),
            (3, DATA, 1),
            (4, DATA, 2),
            (5, NO_DATA, 0),
        ]
    assert [batch.kind for batch in counts["complete"].batches] == [DATA] * 5


def test_without_no_data_micro_batches_the_last_windows_stay_in_state(spark: SparkSession) -> None:
    name = "spark.sql.streaming.noDataMicroBatches.enabled"
    spark.conf.set(name, "false")
    try:
        found = penstock.modes.preview(spark, counted, EVENTS, event_time=TEN_MINUTES, modes="append")
        assert spark.conf.get(name) == "false"
    finally:
        spark.conf.unset(name)
    assert [batch.kind for batch in found["append"].batches] == [DATA] * 5
    assert found["append"].batches[-1].state_rows == 3


def test_append_without_a_watermark_is_listed_with_sparks_reason(spark: SparkSession) -> None:
    found = penstock.modes.preview(spark, lambda frame: frame.groupBy("key").count(), EVENTS[:2])
    assert [mode.allowed for mode in found.modes] == [False, True, True]
    refusal = found["append"].refusal
    assert refusal is not None
    assert refusal.condition == "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"
    assert refusal.message.startswith(f"[{refusal.condition}] Invalid streaming output mode: append.")
    assert "SQLSTATE" not in refusal.message
    assert found["append"].batches == ()
    assert emitted(found["update"]) == [[("a", 2), ("b", 1)], [("a", 3)]]


def test_a_reason_without_an_error_condition_does_not_contain_the_plan(spark: SparkSession) -> None:
    found = penstock.modes.preview(spark, lambda frame: frame.orderBy("key"), EVENTS[:1])
    assert [mode.allowed for mode in found.modes] == [False] * 3
    refusal = found["append"].refusal
    assert refusal is not None
    assert "sort" in refusal.message.lower()
    assert "Sort [" not in refusal.message


def test_duplicates_are_dropped_until_the_watermark_forgets_them(spark: SparkSession) -> None:
    batches = events([(0, "a"), (1, "a")], [(2, "a"), (30, "b")], [(31, "b")], [(35, "a")])
    found = penstock.modes.preview(
        spark,
        lambda frame: frame.dropDuplicatesWithinWatermark(["key"]).select("key"),
        batches,
        event_time=TEN_MINUTES,
        modes=("append", "update"),
    )
    for mode in ("append", "update"):
        assert emitted(found[mode]) == [[("a",)], [("b",)], [], [("a",)], []]
        assert [batch.state_rows for batch in found[mode].batches] == [1, 2, 1, 2, 2]


def test_a_filter_emits_its_rows_immediately_and_keeps_no_state(spark: SparkSession) -> None:
    found = penstock.modes.preview(spark, lambda frame: frame.where("key = 'a'").select("key"), EVENTS[:3])
    for mode in ("append", "update"):
        assert emitted(found[mode]) == [[("a",), ("a",)], [("a",)], [("a",)]]
        assert all(batch.operators == () and batch.watermark is None for batch in found[mode].batches)
    assert not found["complete"].allowed


def test_an_empty_micro_batch_is_shown_too(spark: SparkSession) -> None:
    found = penstock.modes.preview(
        spark, lambda frame: frame.select("key"), events([(1, "a")], [], [(2, "b")])
    )
    assert emitted(found["append"]) == [[("a",)], [], [("b",)]]
    assert [batch.kind for batch in found["append"].batches] == [DATA] * 3


def test_a_transformation_may_set_its_own_watermark(spark: SparkSession) -> None:
    found = penstock.modes.preview(
        spark, lambda frame: counted(frame.withWatermark(*TEN_MINUTES)), EVENTS, modes="append"
    )
    assert len(emitted(found["append"])[3]) == 2


def test_two_inputs_are_joined_by_name(spark: SparkSession, folder: Path) -> None:
    def joined(orders: DataFrame, payments: DataFrame) -> DataFrame:
        near = functions.expr("o = p and paid >= ordered and paid <= ordered + interval 5 minutes")
        return orders.join(payments, near, "leftOuter").select("o", "p")

    found = penstock.modes.preview(
        spark,
        joined,
        {
            "orders": [
                [{"o": 1, "ordered": at(0)}, {"o": 2, "ordered": at(1)}],
                [{"o": 3, "ordered": at(40)}],
            ],
            "payments": [[{"p": 1, "paid": at(2)}], [{"p": 9, "paid": at(50)}], [{"p": 3, "paid": at(42)}]],
        },
        event_time={"orders": ("ordered", "1 minute"), "payments": ("paid", "1 minute")},
        folder=folder,
    )
    assert [batch.input_rows for batch in found["append"].batches if batch.kind == DATA] == [3, 2, 1]
    rows = [row for batch in emitted(found["append"]) for row in batch]
    assert sorted(rows) == [(1, 1), (2, None), (3, 3)]
    assert [mode.allowed for mode in found.modes] == [True, False, False]


def test_processing_time_timers_do_not_make_a_preview_endless(spark: SparkSession) -> None:
    from pyspark.sql.streaming.state import GroupStateTimeout

    def total(key: Any, frames: Any, state: Any) -> Any:
        rows = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
        state.update((rows,))
        state.setTimeoutDuration(3_600_000)
        import pandas

        yield pandas.DataFrame({"key": [key[0]], "rows": [rows]})

    def transform(frame: DataFrame) -> DataFrame:
        return frame.groupBy("key").applyInPandasWithState(
            total, "key string, rows int", "rows int", "update", GroupStateTimeout.ProcessingTimeTimeout
        )

    found = penstock.modes.preview(spark, transform, EVENTS[:1], modes="update")
    assert found["update"].is_cut
    assert [batch.kind for batch in found["update"].batches] == [DATA, *[NO_DATA] * 5]
    assert emitted(found["update"])[0] == [("a", 2), ("b", 1)]


def test_a_preview_leaves_nothing_behind(spark: SparkSession, folder: Path) -> None:
    def named(frame: DataFrame) -> DataFrame:
        names = frame.sparkSession.createDataFrame([("a", "Anna")], "key string, name string")
        return frame.join(names, "key")

    spark.createDataFrame([(1,)], "id int")
    before = dict(spark.conf.getAll)
    penstock.modes.preview(spark, named, EVENTS[:2], event_time=TEN_MINUTES, folder=folder)
    assert dict(spark.conf.getAll) == before
    assert spark.streams.active == []
    assert SparkSession.getActiveSession() is spark


def test_errors_in_the_transformation_are_raised_unwrapped_and_leave_nothing_behind(
    spark: SparkSession, folder: Path
) -> None:
    def wrong(frame: DataFrame) -> DataFrame:
        raise KeyError("of mine")

    with pytest.raises(KeyError, match="of mine"):
        penstock.modes.preview(spark, wrong, EVENTS[:1], folder=folder)

    def of(key: str) -> str:
        if key == "b":
            raise ValueError(f"boom at {key}")
        return key

    failing = functions.udf(of, "string", useArrow=False)
    batches = events([(1, "a")], [(2, "b")])
    with pytest.raises(PythonException, match="boom at b") as caught:
        penstock.modes.preview(spark, lambda frame: frame.select(failing("key")), batches, folder=folder)
    assert caught.value.__notes__ == ["in the preview of append mode, in micro-batch 1"]
    assert spark.streams.active == []


def test_views_and_functions_of_the_session_can_be_used(spark: SparkSession) -> None:
    spark.createDataFrame([("a", "Anna")], "key string, name string").createOrReplaceTempView("names_of_keys")
    try:
        found = penstock.modes.preview(
            spark,
            lambda frame: frame.join(frame.sparkSession.table("names_of_keys"), "key").select("name"),
            EVENTS[:1],
            modes="append",
        )
    finally:
        spark.catalog.dropTempView("names_of_keys")
    assert emitted(found["append"]) == [[("Anna",), ("Anna",)]]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda frame: None, r"FUNCTION_RESULT\].*it must return a DataFrame"),
        (lambda frame: frame.sparkSession.range(1), r"FUNCTION_RESULT\].*that is not streaming"),
        ("counted", r"\[INVALID_INPUT\] transform is a function of a DataFrame"),
    ],
)
def test_an_invalid_transformation_is_refused(
    spark: SparkSession, folder: Path, transform: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        penstock.modes.preview(spark, transform, EVENTS[:1], folder=folder)


def test_an_unknown_mode_is_refused_with_the_closest_match(spark: SparkSession, counts: Preview) -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'update'"):
        penstock.modes.preview(spark, counted, EVENTS[:1], modes=("append", "updates"))
    with pytest.raises(InvalidInputError, match="Did you mean 'append'"):
        counts["apend"]


def test_inputs_that_are_not_parameters_of_the_transformation_are_refused(spark: SparkSession) -> None:
    with pytest.raises(
        InvalidInputError, match=r"FUNCTION_PARAMETERS\].*does not take the inputs left, right by name"
    ):
        penstock.modes.preview(spark, lambda frame: frame, {"left": EVENTS[:1], "right": EVENTS[:1]})


def test_too_many_micro_batches_are_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match="at most 90 small micro-batches, not 91"):
        penstock.modes.preview(spark, counted, events(*([(1, "a")] for _ in range(91))))


def test_a_session_that_does_not_support_previews_is_refused() -> None:
    remote: Any = type("Remote", (), {"readStream": None})()
    with pytest.raises(InvalidInputError, match="this one uses Spark Connect") as caught:
        penstock.modes.preview(remote, counted, EVENTS)
    assert caught.value.condition == "PREVIEW_NEEDS_CLASSIC"
    context = SimpleNamespace(master="spark://host:7077")
    own = {"readStream": None, "_jsparkSession": None, "sparkContext": context}
    on_cluster: Any = type("OnCluster", (), own)()
    with pytest.raises(
        InvalidInputError, match=r"SHARED_FOLDER_NEEDED\].*'spark://host:7077', whose executors may not see"
    ):
        penstock.modes.preview(on_cluster, counted, EVENTS)


def test_a_join_may_start_with_a_frame_of_the_callers_session(spark: SparkSession) -> None:
    names = spark.createDataFrame([("a", "Anna")], "key string, name string")
    found = penstock.modes.preview(
        spark, lambda frame: names.join(frame, "key").groupBy("name").count(), EVENTS[:2], modes="update"
    )
    assert emitted(found["update"]) == [[("Anna", 2)], [("Anna", 3)]]
