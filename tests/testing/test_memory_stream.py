"""Streams that a test feeds: what each micro-batch emits, crashes, and repeated micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.errors import InvalidInputError, SchemaMismatchError
from penstock.testing import Crash, MemoryStream, crash_at, replay_last_batch, run


@pytest.fixture
def numbers(penstock_stream: Callable[[str], MemoryStream]) -> MemoryStream:
    return penstock_stream("id long, k string")


def _rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "k": "ab"[i % 2]} for i in ids]


def _counts(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").count()


def test_each_micro_batch_emits_the_rows_added_to_it(numbers: MemoryStream) -> None:
    with numbers.start(lambda df: df.where("id > 1")) as query:
        query.process_all_available()
        assert query.emitted() == []
        for ids in ([1, 2], [1], [3, 4]):
            numbers.add_data(_rows(*ids))
            query.process_all_available()
    assert query.emitted() == [_rows(2), [], _rows(3, 4)]


@pytest.mark.parametrize(
    ("mode", "second"),
    [("update", [{"k": "a", "count": 2}]), ("complete", [{"k": "a", "count": 2}, {"k": "b", "count": 1}])],
)
def test_the_output_of_a_mode_is_visible_batch_by_batch(
    numbers: MemoryStream, mode: str, second: list[dict[str, Any]]
) -> None:
    numbers.add_data(_rows(1, 2))
    with numbers.start(_counts, output_mode=mode) as query:
        query.process_all_available()
        numbers.add_data(_rows(4))
        query.process_all_available()
    first, last = (sorted(rows, key=str) for rows in query.emitted())
    assert first == sorted([{"k": "a", "count": 1}, {"k": "b", "count": 1}], key=str)
    assert last == sorted(second, key=str)


def test_micro_batches_without_data_emit_what_the_watermark_closes(spark: SparkSession) -> None:
    def windows(frame: DataFrame) -> DataFrame:
        timed = frame.withWatermark("ts", "1 minute")
        return timed.groupBy(F.window("ts", "1 minute")).count().select("window.start", "count")

    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    with MemoryStream(spark, "ts timestamp") as events, events.start(windows) as query:
        events.add_data([{"ts": noon}])
        query.process_all_available()
        events.add_data([{"ts": noon.replace(hour=13)}])
        query.process_all_available()
        assert query.emitted() == [[], [], [{"start": noon, "count": 1}]]


def test_two_streams_can_be_joined(spark: SparkSession, numbers: MemoryStream) -> None:
    with MemoryStream(spark, pa.schema([("k", pa.string()), ("name", pa.string())])) as names:
        joined = numbers.to_df().join(names.to_df(), "k")
        with run(joined) as query:
            numbers.add_data(_rows(2))
            names.add_data([{"k": "a", "name": "Ada"}])
            query.process_all_available()
            assert [row for batch in query.emitted() for row in batch] == [{"k": "a", "id": 2, "name": "Ada"}]


def test_rows_that_do_not_match_the_schema_are_refused_and_none_is_added(numbers: MemoryStream) -> None:
    with pytest.raises(SchemaMismatchError, match="id"):
        numbers.add_data([{"id": 1, "k": "a"}, {"id": "x", "k": "a"}])
    with numbers.start() as query:
        assert query.process_all_available().emitted() == []


def test_a_schema_of_the_wrong_type_is_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match=r"schema is a DDL string .* not 3"):
        MemoryStream(spark, 3)  # type: ignore[arg-type]


def test_a_stream_that_cannot_be_created_leaves_no_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InvalidInputError, match="the schema has no columns"):
        MemoryStream(spark, pa.schema([]))
    assert list(tmp_path.iterdir()) == []


def test_spark_refuses_an_unsupported_mode_as_usual(numbers: MemoryStream) -> None:
    with pytest.raises(AnalysisException):
        numbers.start(_counts, output_mode="append")


def test_the_error_of_a_failing_function_is_raised(numbers: MemoryStream) -> None:
    def fails(batch: DataFrame, number: int) -> None:
        raise ZeroDivisionError(number)

    with numbers.start(sink=fails) as query:
        numbers.add_data(_rows(1))
        with pytest.raises(ZeroDivisionError):
            query.process_all_available()


@pytest.mark.parametrize(("point", "before"), [("before_sink", []), ("after_sink", [1])])
def test_an_append_only_sink_shows_rows_repeated_by_a_crash(
    numbers: MemoryStream, tmp_path: Path, point: str, before: list[int]
) -> None:
    kept: list[int] = []

    def add(batch: DataFrame, number: int) -> None:
        kept.extend(row.id for row in batch.collect())

    numbers.add_data(_rows(1))
    frame = numbers.to_df()
    with run(frame, checkpoint=tmp_path, sink=add) as query, crash_at(point), pytest.raises(Crash):
        query.process_all_available()
    assert kept == before
    with run(frame, checkpoint=tmp_path, sink=add) as query:
        query.process_all_available()
    assert kept == [*before, 1]
    assert query.emitted() == [_rows(1)]


def test_the_last_micro_batch_can_be_repeated(numbers: MemoryStream, tmp_path: Path) -> None:
    frame = _counts(numbers.to_df())
    for ids in ([1, 2], [3]):
        numbers.add_data(_rows(*ids))
        with run(frame, output_mode="update", checkpoint=tmp_path) as query:
            query.process_all_available()
    assert query.emitted() == [[{"k": "b", "count": 2}]]
    assert replay_last_batch(tmp_path) == 1
    with run(frame, output_mode="update", checkpoint=tmp_path) as query:
        query.process_all_available()
    assert query.emitted() == [[{"k": "b", "count": 2}]], "with the state that was there before it"
    numbers.add_data(_rows(5))
    with run(frame, output_mode="update", checkpoint=tmp_path) as query:
        query.process_all_available()
    assert query.emitted() == [[{"k": "b", "count": 3}]]


def test_a_replay_that_is_not_possible_is_refused(numbers: MemoryStream, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"CHECKPOINT_UNFINISHED\].*has no committed micro-batch"):
        replay_last_batch(tmp_path)
    frame = numbers.to_df()
    numbers.add_data(_rows(1))
    with run(frame, checkpoint=tmp_path) as query:
        query.process_all_available()
    replay_last_batch(tmp_path)
    with pytest.raises(InvalidInputError, match=r"CHECKPOINT_UNFINISHED\].*has no committed micro-batch"):
        replay_last_batch(tmp_path)


def test_the_checkpoint_of_a_replay_may_be_a_url(tmp_path: Path) -> None:
    for name in ("offsets/0", "commits/0", "commits/.0.crc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert replay_last_batch(tmp_path.as_uri()) == 0
    assert list((tmp_path / "commits").iterdir()) == []


def test_a_pipeline_accepts_the_stream_too(
    spark: SparkSession, numbers: MemoryStream, tmp_path: Path
) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/out.db") as store:
        out = store.create_queue("out", pa.schema([("id", pa.int64()), ("k", pa.string())]))
        numbers.add_data(_rows(1, 2))
        pipeline = penstock.stream(spark, numbers.to_df()).write(penstock.QueueSink("out", url=store.url))
        query = pipeline.start(checkpoint=tmp_path / "checkpoint", trigger=penstock.Trigger.available_now())
        query.awaitTermination()
        assert out.read(0, 0)["id"].to_pylist() == [1, 2]


def test_a_crash_waits_for_its_micro_batch(numbers: MemoryStream, tmp_path: Path) -> None:
    with crash_at("after_sink", batch=1), run(numbers.to_df(), checkpoint=tmp_path) as query:
        numbers.add_data(_rows(1))
        query.process_all_available()
        numbers.add_data(_rows(2))
        with pytest.raises(Crash, match="micro-batch 1"):
            query.process_all_available()
    assert query.emitted() == [_rows(1), _rows(2)]


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="before_sink, after_sink"), crash_at("commit"):
        pass
