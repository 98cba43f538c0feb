"""The model's feeds through Spark's streams, however their commits fall into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from tests.changes import model
from tests.support.change_frames import Files, Sink, contract

FLUSH = (99, "z", None, 99, 0, "insert", "9999", 1_900_000_000_000_000)
"""A commit far ahead in time, which lets all others out."""
SLOW = settings(
    max_examples=2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)


DELAY = "6 seconds"
"""As long as two commits are apart at the most, and a little more."""


def in_parts(data: st.DataObject, feed: model.Feed) -> list[list[object]]:
    """Each commit in two parts, the second of which comes after the next commit's first one."""
    parts: list[list[object]] = []
    for commit in feed.commits:
        cut = data.draw(st.integers(0, len(commit)))
        parts[len(parts) - 1 if parts else 0 :] = [commit[:cut], *parts[-1:], commit[cut:]]
    return parts


def out_of(
    spark: SparkSession,
    folder: Path,
    batches: list[list[object]],
    *,
    files: int,
    flags: str,
    whole: bool,
    **options: object,
) -> list[Any]:
    source = Files(spark, folder, model.SCHEMA)
    source.add(*batches)
    done = penstock.changes.post_process(
        source.read(files), contract(flags, row_id=["a", "b"], whole_commits=whole), **options
    )
    return [row for row in Sink(folder).run(done).elements() if row != FLUSH]


@pytest.mark.parametrize(
    "flags", [pytest.param("CU", marks=pytest.mark.soak), "CIU", pytest.param("C", marks=pytest.mark.soak)]
)
@SLOW
@given(data=st.data())
def test_commits_in_parts_through_the_watermark(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, flags: str, data: st.DataObject
) -> None:
    feed = data.draw(model.feeds(flags))
    found = out_of(
        spark,
        tmp_path_factory.mktemp("stream"),
        [*in_parts(data, feed), [FLUSH]],
        files=data.draw(st.integers(1, 2)),
        flags=flags,
        whole=False,
        compute_updates=True,
        watermark_delay=DELAY,
    )
    assert model.replay(found, {}) == feed.states[-1]


@SLOW
@given(data=st.data())
def test_whole_commits_through_micro_batches(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    flags = data.draw(st.sampled_from(["C", "CU", "CIU"]))
    feed = data.draw(model.feeds(flags))
    net = {"deduplication_mode": "netChanges", "net_window": "commit"}
    found = out_of(
        spark,
        tmp_path_factory.mktemp("stream"),
        feed.commits,
        files=data.draw(st.integers(1, 3)),
        flags=flags,
        whole=True,
        compute_updates=True,
        **(net if data.draw(st.booleans()) else {}),
    )
    assert model.replay(found, {}) == feed.states[-1]


@pytest.mark.parametrize("window", [pytest.param("commit", marks=pytest.mark.soak), "4 seconds"])
@SLOW
@given(data=st.data())
def test_net_changes_of_commits_in_parts(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, window: str, data: st.DataObject
) -> None:
    feed = data.draw(model.feeds("CIU"))
    found = out_of(
        spark,
        tmp_path_factory.mktemp("stream"),
        [*in_parts(data, feed), [FLUSH]],
        files=data.draw(st.integers(1, 3)),
        flags="CIU",
        whole=False,
        deduplication_mode="netChanges",
        net_window=window,
        watermark_delay=DELAY,
    )
    state: dict[Any, Any] = {}
    for row in sorted(found, key=lambda row: (row[6], row[5] == "insert")):
        if row[5] == "delete":
            assert state.pop(row[:2]) == row[2:4]
        else:
            state[row[:2]] = row[2:4]
    assert state == feed.states[-1]
