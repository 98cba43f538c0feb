"""Running queries: their checkpoints, their plans and the events that listeners receive."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.json_text import Json
from penstock.spark.internals.listeners import ListenerBus, add_listener
from penstock.spark.internals.plans import watermarks_above
from penstock.spark.internals.sessions import running_checkpoint, running_plan
from tests.support.waiting import wait_until


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def started(self, query_id: str, run_id: str, name: str | None) -> None:
        self.events.append(("started", query_id, run_id, name))

    def progressed(self, progress: Json) -> None:
        self.events.append(("progressed", progress["id"], progress["runId"], progress["batchId"]))

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None:
        self.events.append(("terminated", run_id, exception, condition))

    def of(self, run_id: str) -> list[str]:
        return [event[0] for event in self.events if run_id in event]


def test_a_listener_receives_the_events_of_a_query_from_start_to_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    heard = Heard()
    add_listener(spark, heard)
    frame = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    query = (
        frame.writeStream.format("noop")
        .queryName("heard")
        .option("checkpointLocation", str(tmp_path / "c"))
        .start()
    )
    try:
        assert running_checkpoint(spark, query.id).endswith(f"{tmp_path}/c")
        wait_until(lambda: "progressed" in heard.of(query.runId), 60)
        assert watermarks_above(running_plan(spark, query.id), "no such column") == []
    finally:
        query.stop()
    wait_until(lambda: "terminated" in heard.of(query.runId), 60)
    assert ("started", query.id, query.runId, "heard") in heard.events
    assert ("terminated", query.runId, None, None) in heard.events


def test_listeners_receive_events_of_a_query_not_run_by_spark(spark: SparkSession) -> None:
    heard = Heard()
    add_listener(spark, heard)
    query_id, run_id = str(uuid.uuid4()), str(uuid.uuid4())
    listeners = ListenerBus(spark, query_id, run_id)
    listeners.started("ours", "2026-11-22T17:15:00.000Z")
    source = {
        "description": "q",
        "startOffset": None,
        "endOffset": None,
        "latestOffset": None,
        "numInputRows": 3,
    }
    listeners.progressed(
        json.dumps(
            {
                "id": query_id, "runId": run_id, "name": "ours", "timestamp": "2026-11-22T17:15:01.000Z",
                "batchId": 4, "batchDuration": 5, "durationMs": {}, "eventTime": {}, "stateOperators": [],
                "sources": [source | {"inputRowsPerSecond": 1.0, "processedRowsPerSecond": 1.0}],
                "sink": {"description": "s", "numOutputRows": 3},
            }
        )
    )  # fmt: skip
    listeners.terminated("it failed", "SOME_CONDITION")
    wait_until(lambda: heard.of(run_id) == ["started", "progressed", "terminated"], 60)
    assert heard.events[-1] == ("terminated", run_id, "it failed", "SOME_CONDITION")
