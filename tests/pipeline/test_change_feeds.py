"""Change feeds in a pipeline, from a queue to a queue."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from tests.support.change_frames import SCHEMA, Row, contract, table, tuples
from tests.support.spark_queues import one_store

START = 1_700_000_000_000_000


def commit(version: int, changed: int) -> list[Row]:
    """Three rows are rewritten, of which one has changed."""
    rows: list[Row] = []
    for key in range(3):
        was, now = version - 1 if key == changed else 0, version if key == changed else 0
        time = START + version * 1_000_000
        rows.append((key, str(was), was, "delete", version, time))
        rows.append((key, str(now), now, "insert", version, time))
    return rows


@one_store
@pytest.mark.parametrize(
    "whole",
    [pytest.param(True, id="micro_batch"), pytest.param(False, id="watermark", marks=pytest.mark.soak)],
)
def test_every_commit_is_written_with_exactly_its_changes(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path, whole: bool
) -> None:
    feed = store.create_queue("feed", SCHEMA, partitions=2, key=["data"])
    store.create_queue("changes", SCHEMA)
    store.create_consumer("c").register("feed")

    def process(df: DataFrame) -> DataFrame:
        return penstock.changes.post_process(df, contract("CU", whole_commits=whole), compute_updates=True)

    options = {"alignToAppends": True, "maxRowsPerTrigger": 1}
    pipeline = (
        penstock.stream(spark, penstock.QueueSource("feed", consumer="c", url=store_url, options=options))
        .transform(process)
        .write(penstock.QueueSink("changes", url=store_url))
    )
    no_data = "spark.sql.streaming.noDataMicroBatches.enabled"
    spark.conf.set(no_data, "false")
    try:
        for versions in ((1, 2), (3, 4)):
            for version in versions:
                feed.append(table(commit(version, changed=0)))
            pipeline.start(
                checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()
            ).awaitTermination()
            expected = Counter(
                row
                for version in range(1, versions[-1] + 1)
                for row in (
                    (
                        0,
                        str(version - 1),
                        version - 1,
                        "update_preimage",
                        version,
                        START + version * 1_000_000,
                    ),
                    (0, str(version), version, "update_postimage", version, START + version * 1_000_000),
                )
            )
            assert Counter(tuples(store.queue("changes").read(0, 0))) == expected
        assert spark.conf.get(no_data) == "false"
    finally:
        spark.conf.unset(no_data)
