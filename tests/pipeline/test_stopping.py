"""Queries that are stopped, or end, while their store is unavailable."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock

import pytest

import penstock
from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import Owner
from penstock.errors import InvalidInputError
from penstock.pipeline.micro_batches import MicroBatchQuery, expected_epochs
from penstock.pipeline.query import EndedQuery
from penstock.spark.connectors import OwnedConsumer
from tests.support.spark_queues import make_queue, one_store


def running(progress: Mock | None = None) -> Mock:
    """Stand-in for Spark's query."""
    spark = Mock(isActive=True, lastProgress=progress, status={"isTriggerActive": False})
    spark.stop.side_effect = lambda: setattr(spark, "isActive", False)
    return spark


def progress_of(store: str, consumer: str, epoch: int) -> Mock:
    """Stand-in for Spark's progress of a micro-batch."""
    offset = QueueOffset(store, "in", consumer, 0, epoch, (0,), (1,))
    return Mock(sources=[Mock(latestOffset=json.dumps(offset.to_dict()))])


def query_of(spark: Mock, folder: Path, *sources: OwnedConsumer) -> MicroBatchQuery:
    return MicroBatchQuery(spark, str(folder / "ck"), sources)


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records if record.levelno == logging.WARNING]


def test_a_query_whose_store_is_unavailable_can_be_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spark = running(progress_of("some store", "c", 1))
    away = OwnedConsumer(f"sqlite:///{tmp_path}/none.db", "in", "c")
    assert query_of(spark, tmp_path, away).stop() is False
    assert not spark.isActive
    assert actions(caplog) == ["drain_failed", "level_failed"]
    assert "STORE_NOT_FOUND" in caplog.text


@pytest.mark.parametrize("timeout", ["3", -1, float("nan"), float("inf"), True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_and_the_query_goes_on(
    tmp_path: Path, timeout: Any
) -> None:
    spark = running()
    for query in (query_of(spark, tmp_path), EndedQuery("an-id", None, "its limit is reached")):
        for call in (query.stop, query.awaitTermination):
            with pytest.raises(InvalidInputError, match="timeout is a number of seconds, 0 or more"):
                call(timeout)
    assert spark.isActive


@one_store
def test_a_query_whose_consumer_was_deleted_can_be_stopped(
    store: penstock.Store, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_queue(store, "in")
    spark = running(progress_of(store.uuid, "gone", 1))
    assert query_of(spark, tmp_path, OwnedConsumer(store_url, "in", "gone")).stop() is False
    assert not spark.isActive
    assert "CONSUMER_NOT_FOUND" in caplog.text


def test_a_query_that_ended_successfully_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = OwnedConsumer(f"sqlite:///{tmp_path}/none.db", "in", "c")
    query_of(running(), tmp_path, away).awaitTermination()
    assert actions(caplog) == ["level_failed"]


def test_a_query_is_stopped_when_waiting_for_it_is_interrupted(tmp_path: Path) -> None:
    spark = running()
    type(spark).status = PropertyMock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        query_of(spark, tmp_path).stop()
    assert not spark.isActive


@one_store
def test_a_query_that_has_been_idle_since_its_start_does_not_drain_the_one_that_took_over(
    store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    """It has recorded no owner before its first progress, and another query may own the consumer by then."""
    make_queue(store, "in").register(store.create_consumer("c").name)
    successor = Owner(store.database, "c", "in")
    spark = running()
    assert query_of(spark, tmp_path, OwnedConsumer(store_url, "in", "c")).stop() is True
    assert not spark.isActive
    assert not store.consumer("c").registration("in").draining
    successor.release()


@one_store
@pytest.mark.parametrize("now", ["its own", "a later one", "one of the same epoch in a restored store"])
def test_a_query_stopped_in_its_first_micro_batch_drains_only_its_own_owner(
    store: penstock.Store, store_url: str, tmp_path: Path, now: str
) -> None:
    make_queue(store, "in").register(store.create_consumer("c").name)
    source = OwnedConsumer(store_url, "in", "c")
    expected = expected_epochs([source])
    owner = Owner(store.database, "c", "in")
    if now == "a later one":
        owner = Owner(store.database, "c", "in")
    identity = owner.identity if now != "one of the same epoch in a restored store" else "before the restore"
    offset = QueueOffset(store.uuid, "in", "c", 0, owner.epoch, (0,), (1,), owner=identity)
    (tmp_path / "ck/offsets").mkdir(parents=True)
    (tmp_path / "ck/offsets/0").write_text("\n".join(["v1", "{}", json.dumps(offset.to_dict())]))
    spark = running()
    assert MicroBatchQuery(spark, str(tmp_path / "ck"), [source], expected_epochs=expected).stop() is True
    assert store.consumer("c").registration("in").draining is (now == "its own")
    owner.release()
