"""A query that is stopped while its store cannot be asked, or that ends then."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock, PropertyMock

import pytest

import penstock as ps
from penstock.pipeline.levelling import QuerySource
from penstock.pipeline.micro_batches import MicroBatchQuery
from tests.spark.support import make_queue, one_store


def running() -> Mock:
    """What Spark would run."""
    spark = Mock(isActive=True, lastProgress=None, status={"isTriggerActive": False})
    spark.stop.side_effect = lambda: setattr(spark, "isActive", False)
    return spark


def query_of(spark: Mock, folder: Path, *sources: QuerySource) -> MicroBatchQuery:
    return MicroBatchQuery(spark, str(folder / "ck"), sources)


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records if record.levelno == logging.WARNING]


def test_a_query_whose_store_is_away_is_stopped_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spark = running()
    away = QuerySource(f"sqlite:///{tmp_path}/none.db", "in", "c")
    assert query_of(spark, tmp_path, away).stop() is False
    assert not spark.isActive
    assert actions(caplog) == ["drain_failed", "level_failed"]
    assert "STORE_NOT_FOUND" in caplog.text


@one_store
def test_a_query_whose_consumer_is_gone_is_stopped_all_the_same(
    store: ps.Store, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_queue(store, "in")
    spark = running()
    assert query_of(spark, tmp_path, QuerySource(store_url, "in", "gone")).stop() is False
    assert not spark.isActive
    assert "CONSUMER_NOT_FOUND" in caplog.text


def test_a_query_that_ended_well_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = QuerySource(f"sqlite:///{tmp_path}/none.db", "in", "c")
    query_of(running(), tmp_path, away).awaitTermination()
    assert actions(caplog) == ["level_failed"]


def test_a_query_is_stopped_where_waiting_for_it_is_broken_off(tmp_path: Path) -> None:
    spark = running()
    type(spark).lastProgress = PropertyMock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        query_of(spark, tmp_path).stop()
    assert not spark.isActive
