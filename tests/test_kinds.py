"""Arguments of the wrong kind are refused by Penstock before anything happens.

The message has the value and what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import penstock
from penstock.arguments import require
from penstock.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CHANGE = [{"id": 1, "name": "ada", "_change_type": "insert"}]
CONTRACT: Any = penstock.ChangeContract("id")


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/penstock.db"
    with penstock.connect(url) as store:
        store.create_queue("q", SCHEMA).append([{"id": 1, "name": "ada"}])
        store.create_consumer("c").register("q")
    penstock.QueueFeed.create("f", SCHEMA, CONTRACT, store=url)
    return url


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda store: store.create_queue("x", SCHEMA, retention=5),
            r"retention is a penstock\.Retention.*not 5",
        ),
        (
            lambda store: store.create_queue("x", SCHEMA, retention=""),
            r"retention is a penstock\.Retention.*not ''",
        ),
        (lambda store: store.create_queue("x", SCHEMA, key=5), "key is a column's name.*not 5"),
        (lambda store: store.queue("q").set_retention(None), r"retention is a penstock\.Retention.*not None"),
        (lambda store: store.queue("q").read(0, 0, columns=[None]), "columns is a column's name"),
        (lambda store: store.queue("q").register(None), "the name of a consumer is text, not NoneType"),
        (lambda store: store.consumer("c").register(5), "the name of a queue is text, not int"),
        (lambda store: store.consumer("c").register("q", vital="yes"), "vital is True or False, not 'yes'"),
        (lambda store: store.consumer("c").seek(None, to="latest"), "the name of a queue is text"),
        (lambda store: store.consumer("c").offsets(5), "the name of a queue is text"),
        (lambda store: store.clean_up(5), "older_than is a timedelta, not 5"),
        (lambda store: penstock.connect(store.url, timeout="5"), "timeout is a number of seconds, not '5'"),
    ],
)
def test_wrong_arguments_of_stores_queues_and_consumers_are_refused(
    url: str, call: Callable[[penstock.Store], Any], message: str
) -> None:
    with penstock.connect(url) as store:
        with pytest.raises(InvalidInputError, match=message):
            call(store)
        assert store.queues() == ["f", "q"]


def test_a_single_column_may_be_given_as_a_string(url: str) -> None:
    with penstock.connect(url) as store:
        assert store.queue("q").read(0, 0, columns="name").to_pylist() == [{"name": "ada"}]


@pytest.mark.parametrize("version", ["2", 2**63, -1, True, None, 1.0])
def test_a_commit_with_an_invalid_version_is_refused(url: str, version: Any) -> None:
    feed = penstock.QueueFeed("f", url)
    with pytest.raises(InvalidInputError, match="a commit's version is a whole number from 0"):
        feed.append_commit(version, NOON, CHANGE)
    assert feed.newest(-1) == -1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: penstock.ChangeContract(5), "row_id is a column's name, or several.*not 5"),
        (
            lambda: penstock.ChangeContract("id", carryover_rows="no"),
            "carryover_rows is True or False, not 'no'",
        ),
        (
            lambda: penstock.ChangeContract("id", row_version=5),
            "row_version is a column's name, or None, not 5",
        ),
        (lambda: penstock.QueueFeed(None, "sqlite:///x.db"), "the name of a queue is text"),
        (lambda: penstock.QueueFeed("f", ["x"]), "store is the URL of a store.*not \\['x'\\]"),
        (
            lambda: penstock.QueueFeed.create("f", SCHEMA, "id", store="sqlite:///x.db"),
            "contract is a penstock",
        ),
        (lambda: penstock.DeltaFeed(None), "path is a path, or a URL, not None"),
        (lambda: penstock.DeltaFeed(""), "path is a path, or a URL, not ''"),
        (lambda: penstock.DeltaFeed("/x", row_id=5), "row_id is a column's name"),
        (lambda: penstock.DeltaFeed("/x", storage_options=5), "storage_options is a mapping"),
        (lambda: penstock.SnapshotFeed(None, "id"), "path is a path, or a URL, not None"),
        (lambda: penstock.SnapshotFeed("/x", 5), "row_id is a column's name"),
        (lambda: penstock.IcebergFeed(5), "the name of a table is text"),
        (lambda: penstock.IcebergFeed("a.b", None), "the name of a catalog is text"),
        (lambda: penstock.IcebergFeed("a.b", properties=5), "properties is a mapping"),
        (lambda: penstock.PostgresFeed("postgresql://a@b/c", publication=5), "publication is text, not 5"),
        (lambda: penstock.PostgresFeed("postgresql://a@b/c", "p", tables=5), "tables is"),
        (lambda: penstock.DebeziumFeed("id bigint", 5), "row_id is a column's name"),
        (lambda: penstock.DebeziumFeed("id bigint", "id", timestamps=5), "timestamps is one of micros"),
        (
            lambda: penstock.DebeziumFeed("id bigint", "id", dead_letters="dead"),
            r"dead_letters is a penstock\.QueueSink",
        ),
        (lambda: penstock.QueueSource(None), "the name of a queue is text"),
        (lambda: penstock.QueueSource("q", consumer=5), "the name of a consumer is text"),
        (lambda: penstock.QueueSink("q", options="x"), "options is a mapping.*not 'x'"),
        (lambda: penstock.QueueSink("q", url=5), "url is the URL of a store.*not 5"),
    ],
)
def test_wrong_arguments_of_contracts_feeds_and_ends_are_refused(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()


@pytest.mark.parametrize("row_id", [None, [], "", [""]])
def test_a_contract_without_a_row_id_is_refused(row_id: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        penstock.ChangeContract(row_id)
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": None}, r"CHECKPOINT_MISSING\] a query of micro-batches needs a checkpoint"),
        ({"checkpoint": ""}, "checkpoint is a path, or a URL, not ''"),
        ({"checkpoint": "c", "trigger": "1 second"}, r"penstock\.Trigger\.processing_time.*not '1 second'"),
        ({"checkpoint": "c", "name": 5}, "name is text, not 5"),
    ],
)
def test_a_pipeline_with_wrong_arguments_is_not_started(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = penstock.stream(spark, penstock.QueueSource("q", url=url)).write(
        penstock.QueueSink("q", url=url)
    )
    with pytest.raises(InvalidInputError, match=message):
        pipeline.start(**options)
    assert not (tmp_path / "offsets").exists()


@pytest.mark.parametrize("given", [None, "local[2]"])
def test_an_argument_that_is_not_a_session_is_refused(url: str, given: Any) -> None:
    feed = penstock.QueueFeed("f", url)
    for call in (
        lambda: penstock.register(given),
        lambda: penstock.stream(given, penstock.QueueSource("q", url=url)),
        lambda: penstock.changes.read(given, feed),
        lambda: penstock.changes.read_stream(given, feed),
    ):
        with pytest.raises(
            InvalidInputError, match=r"spark is a Spark session, such as penstock\.session\(\) returns, not"
        ):
            call()


def test_wrong_arguments_of_change_functions_are_refused(spark: SparkSession, url: str) -> None:
    feed: Any = penstock.QueueFeed("f", url)
    frame = penstock.changes.read(spark, feed, columns="name")
    assert frame.columns == ["id", "name", "_change_type", "_commit_version", "_commit_timestamp"]
    rows: Any = [1]
    contract: Any = "id"
    nothing: Any = None
    guarantee: Any = 1
    for message, call in (
        ("feed is a change feed", lambda: penstock.changes.read(spark, nothing)),
        ("feed is a change feed", lambda: penstock.changes.read_stream(spark, nothing)),
        ("options is a mapping", lambda: penstock.changes.read(spark, feed, options=nothing or "x")),
        ("df is a DataFrame with change rows, not", lambda: penstock.changes.post_process(rows, CONTRACT)),
        (
            r"contract is a penstock\.ChangeContract.*not 'id'",
            lambda: penstock.changes.post_process(frame, contract),
        ),
        ("before is a DataFrame", lambda: penstock.changes.diff(nothing, frame, row_id="id")),
        (
            "guarantee is one of",
            lambda: penstock.stream(spark, feed).write(penstock.QueueSink("q", url=url), guarantee=guarantee),
        ),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()


def test_a_value_that_may_contain_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidInputError, match="not this str") as caught:
        require("trigger", "postgresql://ada:hunter2@db/shop", int, "a number")
    assert "hunter2" not in repr(caught.value.parameters) + str(caught.value)
