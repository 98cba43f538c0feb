"""Before it starts, a pipeline refuses queries that would give wrong results in their output mode.

`check=False` starts it all the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import InvalidInputError, OutputModeRefusedError
from tests.support.spark_queues import fill, ids_in, make_queue, one_store, stream

NOW = penstock.Trigger.available_now()


def deduplicated(spark: SparkSession, store: penstock.Store, url: str) -> penstock.Pipeline:
    make_queue(store, "in")
    make_queue(store, "out")
    fill(store.queue("in"), [1, 2, 2, 3, 3, 3])

    def once(frame: DataFrame) -> DataFrame:
        return frame.dropDuplicates(["id"])

    return (
        penstock.stream(spark, stream(spark, url, "in"))
        .transform(once)
        .write(penstock.QueueSink("out", url=url))
    )


@one_store
def test_an_unsafe_query_is_refused_with_the_report_before_it_starts(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    pipeline = deduplicated(spark, store, store_url)
    with pytest.raises(OutputModeRefusedError, match="kept in the state forever") as caught:
        pipeline.start(checkpoint=tmp_path / "c", trigger=NOW)
    assert "dropDuplicatesWithinWatermark" in str(caught.value)
    assert caught.value.parameters["problems"] == ["PENSTOCK_STATE_FOR_EVER"]
    assert not (tmp_path / "c").exists()


@one_store
def test_warnings_are_logged_when_the_query_starts(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_queue(store, "in")
    fill(store.queue("in"), [1, 2, 2])
    pipeline = (
        penstock.stream(spark, stream(spark, store_url, "in"))
        .transform(lambda frame: frame.groupBy("id").count())
        .write(penstock.TableSink("counts", url=store_url, keys=["id"]), output_mode="update")
    )
    pipeline.start(checkpoint=tmp_path / "c", trigger=NOW).awaitTermination()
    (record,) = [each for each in caplog.records if vars(each).get("action") == "output_mode_warning"]
    assert vars(record)["problem"] == "PENSTOCK_STATE_FOR_EACH_KEY"
    assert "the state has a row for each id ever seen" in record.getMessage()


@one_store
def test_the_check_can_be_overridden(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    pipeline = deduplicated(spark, store, store_url)
    pipeline.start(checkpoint=tmp_path / "c", trigger=NOW, check=False).awaitTermination()
    assert sorted(ids_in(store.queue("out"))) == [1, 2, 3]


@one_store
def test_the_option_for_the_check_must_be_true_or_false(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    pipeline = deduplicated(spark, store, store_url)
    with pytest.raises(InvalidInputError, match="True or False"):
        pipeline.start(checkpoint=tmp_path / "c", check="no")  # type: ignore[arg-type]  # on purpose
