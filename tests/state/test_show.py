"""The content of a checkpoint, compared with what the query that wrote it reported."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import CheckpointNotFoundError, StateRefusedError
from penstock.state import CheckpointState, StateOperator, StatePart, show
from penstock.state.showing import operator_blocks
from penstock.testing import replay_last_batch
from tests.state.conftest import Make
from tests.support.limited_feeds import NOW, Feed
from tests.support.made_checkpoints import Made
from tests.support.spark_queues import fill, make_queue, one_store, run, stream, table
from tests.support.waiting import wait_until

Copied = Callable[[str], Path]
STATEFUL = (
    "windows",
    "windows in RocksDB",
    "windows with state ids",
    "windows of windows",
    "sessions",
    "distinct",
    "join",
    "join in one store",
    "limit",
    "variables",
)
NOT_TOLD = {
    "windows in RocksDB": {"updated", "removed"},
    "join": {"updated"},
    "join in one store": {"updated", "removed"},
}
"""What no file of these has, and is None."""


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("name", STATEFUL)
def test_operators_have_the_row_counts_of_the_last_progress_and_nothing_is_written(
    spark: SparkSession, made: Make, name: str
) -> None:
    query = made(name)
    before = files_in(query.path)
    found = show(spark, str(query.path))
    assert files_in(query.path) == before
    unknown = NOT_TOLD.get(name, set())
    assert len(found.operators) == len(query.operators) > 0
    # Spark's progress begins with the operator that comes last in the plan, and ids too.
    for operator, said in zip(found.operators, query.operators, strict=True):
        assert operator.name == said["operatorName"]
        assert operator.rows == said["numRowsTotal"]
        for field, key in (("updated", "numRowsUpdated"), ("removed", "numRowsRemoved")):
            assert getattr(operator, field) == (None if field in unknown else said[key])
            assert any(field in text for text in operator.unknown) == (field in unknown)
        instances = sum(store.partitions for store in operator.stores)
        assert instances == said["numStateStoreInstances"]
        assert operator.newest_batch == query.last


def test_a_checkpoint_is_described_by_its_query_and_its_last_batch(spark: SparkSession, made: Make) -> None:
    query = made("windows")
    found = show(spark, str(query.path))
    last = query.progress[-1]
    assert (found.query_id, found.engine) == (last["id"], "micro-batch")
    assert (found.last_planned, found.last_committed, found.planned) == (query.last, query.last, None)
    assert found.committed is not None
    said = datetime.fromisoformat(last["eventTime"]["watermark"].replace("Z", "+00:00"))
    assert found.committed.watermark == said
    assert found.watermark == datetime(2026, 1, 1, 12, 3, 12, tzinfo=UTC)
    assert [source.to_dict() for source in found.committed.sources] == [
        {"source": 0, "name": None, "kind": "other", "offset": {"logOffset": 2}}
    ]
    assert found.unknown == ()


def test_an_operator_is_described_with_the_columns_and_files_of_its_stores(
    spark: SparkSession, made: Make
) -> None:
    query = made("windows")
    (operator,) = show(spark, str(query.path)).operators
    (store,) = operator.stores
    (part,) = operator.parts
    assert (part.keys, part.values) == (
        "window struct<start:timestamp,end:timestamp>, key string",
        "count bigint",
    )
    assert (store.kind, store.partitions, store.newest_snapshot) == ("hdfs", 2, None)
    deltas = list((query.path / "state/0").glob("*/*.delta"))
    assert store.bytes == operator.bytes == sum(path.stat().st_size for path in deltas)
    newest = max(path.stat().st_mtime for path in deltas if path.stem == str(store.newest_delta + 1))  # type: ignore[operator]  # there are some
    assert operator.written_at is not None
    assert abs(operator.written_at.timestamp() - newest) < 0.002


def test_state_without_a_key_is_told_from_columns_that_are_unknown() -> None:
    part = StatePart("default", keys="", values="count bigint")
    total, _ = operator_blocks(StateOperator(0, "stateStoreSave", (), (part,)))
    unread, _ = operator_blocks(StateOperator(0, "stateStoreSave", (), (replace(part, keys=None),)))
    assert total.lines[0][1:3] == ("none", "count bigint")
    assert unread.lines[0][1:3] == ("?", "count bigint")


def test_a_join_has_four_stores_and_the_rows_of_both_sides(spark: SparkSession, made: Make) -> None:
    (operator,) = show(spark, str(made("join").path)).operators
    assert [store.name for store in operator.stores] == [
        f"{side}-{what}" for side in ("left", "right") for what in ("keyToNumValues", "keyWithIndexToValue")
    ]
    left, right = operator.parts
    assert (left.name, right.name, left.keys) == ("left", "right", "field0 string")
    assert left.rows
    assert right.rows
    assert operator.rows == left.rows + right.rows


def test_a_rocksdb_store_is_described_with_its_snapshots_and_shared_files(
    spark: SparkSession, made: Make
) -> None:
    query = made("windows in RocksDB")
    (operator,) = show(spark, str(query.path)).operators
    (store,) = operator.stores
    assert (store.kind, store.newest_snapshot, store.newest_delta) == (
        "rocksdb",
        query.last,
        None,
    )
    shared = list((query.path / "state/0").glob("*/SSTs/*.sst"))
    zips = list((query.path / "state/0").glob("*/*.zip"))
    assert shared
    assert store.bytes == sum(path.stat().st_size for path in [*shared, *zips])


def test_the_variables_of_transform_with_state_are_shown_as_parts(spark: SparkSession, made: Make) -> None:
    (operator,) = show(spark, str(made("variables").path)).operators
    assert {part.name: (part.kind, part.rows, part.keys) for part in operator.parts} == {
        "count": ("ValueState", 4, "key string"),
        "times": ("ListState", 4, "key string"),
        "minutes": ("MapState", 7, "key string, minute int"),
        "timers": (None, 4, "key string"),
    }


def test_a_query_without_state_has_no_operators(spark: SparkSession, made: Make) -> None:
    found = show(spark, str(made("stateless").path))
    assert (found.operators, found.last_committed, found.unknown) == ((), 2, ())
    assert ["state", "none"] in [line.split() for line in str(found).splitlines()]


@one_store
def test_the_progress_of_a_limit_is_shown(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    Feed(spark, store_url, tmp_path, partitions=1).add(4).run(6, trigger=NOW)
    found = show(spark, tmp_path / "ck")
    assert found.limit is not None
    assert (str(found.limit), found.to_dict()["limit"]) == ("4 of 6", {"passed": 4, "limit": 6})
    assert str(penstock.state.limit_progress(tmp_path / "ck")) == "4 of 6"
    assert ["limit", "4", "of", "6"] in [line.split() for line in str(found).splitlines()]


def test_files_are_listed_without_a_session(made: Make) -> None:
    query = made("windows")
    found = show(None, query.path)
    (operator,) = found.operators
    assert (operator.rows, operator.partitions, operator.newest_batch) == (None, 2, query.last)
    assert found.last_committed == query.last
    assert "reading them needs a Spark session" in found.unknown[0]


@one_store
def test_the_offsets_of_queues_are_shown_by_partition(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store, partitions=2)
    make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing")
    for ids in (range(3), range(3, 8)):
        fill(queue, ids)
        queue.append(table([100]), partition=1)
        run(frame, store_url, "out", tmp_path / "ck", guarantee="exactly_once")
    found = show(spark, str(tmp_path / "ck"))
    assert found.committed is not None
    (source,) = found.committed.to_dict()["sources"]
    assert (source["kind"], source["queue"], source["consumer"]) == ("queue", "orders", "billing")
    assert source["store"] == store.info().uuid
    assert source["partitions"] == [
        {"partition": 0, "from": 3, "to": 8},
        {"partition": 1, "from": 1, "to": 2},
    ]
    assert (found.committed.rows, found.committed.to_dict()["rows"]) == (6, 6)
    assert "queue orders, consumer billing" in str(found)
    assert found.operators == ()


OF_QUEUE = {"store": "s", "queue": "q", "generation": 1, "from": [3, 1], "to": [8, 2]}
NEXT = {**OF_QUEUE, "from": [8, 2], "to": [10, 2, 7]}
RUN = {"penstock runs": 2}


@pytest.mark.parametrize(
    ("before", "last", "rows"),
    [
        ([OF_QUEUE], [NEXT], 9),
        ([OF_QUEUE], [OF_QUEUE], 0),
        ([OF_QUEUE, NEXT], [OF_QUEUE, {**NEXT, "from": [10, 2, 7], "to": [10, 2, 11]}], 4),
        ([OF_QUEUE, RUN], [NEXT, RUN], 9),
        ([OF_QUEUE, None], [NEXT, None], 9),
        ([OF_QUEUE, {"logOffset": 1}], [NEXT, {"logOffset": 2}], None),
        ([{"logOffset": 1}], [{"logOffset": 2}], None),
        ([None], [None], None),
        (None, [NEXT], None),
    ],
)
def test_the_rows_of_a_batch_are_the_new_rows_of_its_queues(
    tmp_path: Path, before: list[object] | None, last: list[object], rows: int | None
) -> None:
    """A source that has nothing new stands with the offset of the batch before, which Spark may have
    cleaned up.
    """
    for number, offsets in ((6, before), (7, last)):
        if offsets is not None:
            lines = ["-" if offset is None else json.dumps(offset) for offset in offsets]
            file = tmp_path / f"offsets/{number}"
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(["v1", "{}", *lines]))
    found = show(None, str(tmp_path)).planned
    assert found is not None
    assert (found.id, found.rows) == (7, rows)


def test_a_source_without_new_rows_has_an_empty_range_at_its_position(tmp_path: Path) -> None:
    feed = {"feed": "delta:orders", "from": 3, "to": 5, "commit": "5@1", "state": {"rows": 1}}
    for number, offsets in ((6, [OF_QUEUE, feed, RUN]), (7, [OF_QUEUE, feed, RUN])):
        file = tmp_path / f"offsets/{number}"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(["v1", "{}", *map(json.dumps, offsets)]))
    found = show(None, str(tmp_path))
    assert found.planned is not None
    assert [source.kind for source in found.planned.sources] == ["queue", "feed", "starts"]
    assert found.planned.sources[0].to_dict()["partitions"] == [
        {"partition": 0, "from": 8, "to": 8},
        {"partition": 1, "from": 2, "to": 2},
    ]
    lines = [line.split() for line in str(found).splitlines()]
    assert ["1", "feed", "delta:orders", "5", "5"] in lines
    assert "no data: added by the pipeline, counts the query's starts" in str(found)


@one_store
def test_a_continuous_query_has_epochs_and_no_state(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    queue = make_queue(store)
    make_queue(store, "out")
    queue.register(store.create_consumer("c").name)
    pipeline = penstock.stream(spark, penstock.QueueSource("orders", "c", store_url)).write(
        penstock.QueueSink("out", store_url)
    )
    query: Any = pipeline.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.continuous("50 ms"))
    try:
        for ids in (range(3), range(3, 8)):
            fill(queue, ids)
            query.processAllAvailable()
    finally:
        query.stop()
    found = show(spark, str(tmp_path / "ck"))
    assert (found.query_id, found.engine) == (query.id, "continuous")
    last = query.lastProgress["batchId"]
    assert (found.last_planned, found.last_committed) == (last, last)
    assert found.committed is not None
    assert found.committed.sources[0].queue.end == (8,)  # type: ignore[union-attr]  # it is a queue's
    replay_last_batch(tmp_path / "ck")
    found = show(spark, str(tmp_path / "ck"))
    assert (found.last_planned, found.last_committed) == (last, last - 1 if last else None)
    assert f"epoch {last}, not committed" in str(found)
    with pytest.raises(StateRefusedError, match="continuous query") as refused:
        penstock.state.read(spark, str(tmp_path / "ck"))
    assert refused.value.condition == "STATE_REFUSED.NO_STATE"


@pytest.mark.parametrize("name", ["windows", "windows in RocksDB"])
def test_a_killed_batch_is_shown_as_planned_and_not_committed(
    spark: SparkSession, made: Make, copied: Copied, name: str
) -> None:
    path, query = copied(name), made(name)
    last = replay_last_batch(path)
    found = show(spark, str(path))
    assert (found.last_planned, found.last_committed) == (last, last - 1)
    assert found.planned is not None
    assert not found.planned.committed
    (operator,) = found.operators
    assert operator.newest_batch == last
    assert operator.rows == query.progress[last - 1]["stateOperators"][0]["numRowsTotal"]
    assert f"{last}, not committed" in str(found)


def test_files_left_by_a_crash_do_no_harm(spark: SparkSession, made: Make, copied: Copied) -> None:
    path, last = copied("windows"), made("windows").last
    (path / "offsets/.9.1c0ffee0-0000-4000-8000-000000000000.tmp").write_text("v1")
    (path / "state/0/0/.9.delta.1c0ffee0-0000-4000-8000-000000000000.TID9.tmp").write_bytes(b"\0")
    (path / f"offsets/{last + 1}").write_text("v1\n{")
    found = show(spark, str(path))
    assert (found.last_planned, found.last_committed) == (last + 1, last)
    assert any(f"'offsets/{last + 1}' cannot be used" in text for text in found.unknown)
    assert found.operators[0].rows == made("windows").operators[0]["numRowsTotal"]
    assert found.operators[0].bytes == show(spark, str(made("windows").path)).operators[0].bytes


def test_a_checkpoint_of_a_query_that_died_in_its_first_batch(
    spark: SparkSession, made: Make, copied: Copied
) -> None:
    path, last = copied("windows"), made("windows").last
    for logged in (path / "commits").iterdir():
        logged.unlink()
    for number in range(1, last + 1):
        (path / f"offsets/{number}").unlink()
    found = show(spark, str(path))
    assert (found.last_planned, found.last_committed) == (0, None)
    assert found.operators[0].rows is None
    assert "Spark reads the state of a committed batch, and there is none" in found.unknown[0]
    (path / "metadata").unlink()
    assert show(spark, str(path)).query_id is None


def test_a_missing_metadata_file_of_an_operator_is_reported(spark: SparkSession, copied: Copied) -> None:
    path = copied("windows")
    for file in (path / "state/0/_metadata").iterdir():
        file.unlink()
    (operator,) = show(spark, str(path)).operators
    assert operator.name is None
    assert any("from 4.0 on" in text for text in operator.unknown)


def write_checkpoint(folder: Path, **files: str) -> Path:
    """Write the files of a checkpoint, of which some are replaced."""
    good = {"metadata": '{"id": "x"}', "offsets/0": 'v1\n{"conf": {"a": "1"}}\n7', "commits/0": "v1\n{}"}
    for name, text in {**good, "state/0/0/1.delta": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "metadata",
    [
        {"operatorInfo": 3},
        {"operatorInfo": {"operatorName": 3}},
        {"operatorPropertiesJson": "{"},
        {"operatorPropertiesJson": "[1]"},
        {"operatorPropertiesJson": 7},
        {"stateStoreInfo": [3]},
        {
            "operatorInfo": {"operatorName": "transformWithStateExec"},
            "operatorPropertiesJson": '{"stateVariables": [{}]}',
        },
    ],
)
def test_metadata_of_an_operator_in_another_form_is_reported(tmp_path: Path, metadata: Any) -> None:
    text = f"v1\n{json.dumps(metadata)}"
    found = show(None, write_checkpoint(tmp_path, **{"state/0/_metadata/metadata": text}))
    (operator,) = found.operators
    assert (operator.name, operator.partitions, found.last_committed) == (None, 1, 0)
    assert "the file 'state/0/_metadata/metadata' cannot be used" in operator.unknown[0]


@pytest.mark.parametrize(
    "offsets",
    ['v1\n{"conf": 3}\n7', 'v1\n{"conf": null}\n7', "v1\n{}\n" + json.dumps({**OF_QUEUE, "from": 3})],
)
def test_offsets_in_another_form_are_reported(tmp_path: Path, offsets: str) -> None:
    found = show(None, write_checkpoint(tmp_path, **{"offsets/0": offsets}))
    assert (found.last_committed, found.to_dict()["committed"]["sources"]) == (0, [])
    assert "the file 'offsets/0' cannot be used" in found.unknown[0]


@pytest.mark.parametrize("record", ["", "{", "[1]", '{"version": 1, "rows": "many"}'])
def test_a_damaged_record_of_a_limit_is_reported(tmp_path: Path, record: str) -> None:
    found = show(None, write_checkpoint(tmp_path, **{"penstock/limit.json": record}))
    assert (found.last_committed, found.limit) == (0, None)
    assert "progress of the limit: [COMMIT_REFUSED.CHECKPOINT_DAMAGED]" in found.unknown[-1]


def test_a_watermark_past_the_year_9999_is_reported(tmp_path: Path) -> None:
    far = 99_999_999_999_999_999
    offsets, commit = (
        f'v1\n{{"batchWatermarkMs": {far}, "conf": {{}}}}\n7',
        f'v1\n{{"nextBatchWatermarkMs": {far}}}',
    )
    found = show(None, write_checkpoint(tmp_path, **{"offsets/0": offsets, "commits/0": commit}))
    assert (found.last_committed, found.watermark) == (0, None)
    assert [text.partition(": ")[0] for text in found.unknown[:2]] == [
        "the watermark of batch 0",
        "the watermark after batch 0",
    ]
    assert "99,999,999,999,999,999 ms since 1970, which is past the year 9999" in str(found)


@pytest.mark.parametrize("what", ["nothing", "file", "empty folder", "folder"])
def test_a_path_without_a_checkpoint_is_refused(spark: SparkSession, tmp_path: Path, what: str) -> None:
    path = tmp_path / "there"
    if what == "file":
        path.write_text("text")
    elif what == "folder":
        (path / "other").mkdir(parents=True)
    elif what == "empty folder":
        path.mkdir()
    with pytest.raises(CheckpointNotFoundError, match="checkpointLocation") as refused:
        show(spark, str(path))
    assert refused.value.condition == "CHECKPOINT_NOT_FOUND"
    assert path.exists() == (what != "nothing")


@pytest.mark.parametrize(
    "location",
    [
        "abfss://c@acc.dfs.core.windows.net/p?sv=1&sig=s3cret/+x%2Fy",
        "s3a://key:s3cret/x@bucket/ck",
        "nowhere://host/ck?token=s3cret&a=1",
    ],
)
def test_the_error_of_a_location_shows_no_signature_or_password(location: str) -> None:
    with pytest.raises(StateRefusedError) as refused:
        show(None, location)
    shown = "".join(traceback.format_exception(refused.value))
    assert "s3cret" not in shown


def test_an_unknown_file_system_is_reported() -> None:
    with pytest.raises(StateRefusedError, match="nowhere") as refused:
        show(None, "nowhere://user:secret@host/ck")
    assert refused.value.condition == "STATE_REFUSED.UNREACHABLE"
    assert "secret" not in str(refused.value)


def test_a_checkpoint_may_be_given_by_its_url(spark: SparkSession, made: Make) -> None:
    query = made("windows")
    found = show(spark, query.path.as_uri())
    assert (found.last_committed, found.operators[0].rows) == (
        query.last,
        query.operators[0]["numRowsTotal"],
    )


def test_a_checkpoint_may_be_on_a_remote_file_system(made: Make) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    query, memory = made("windows"), MemoryFileSystem()
    memory.put(str(query.path), "/remote/ck", recursive=True)
    try:
        found = show(None, "memory://remote/ck")
        local = show(None, query.path)
        assert found.last_committed == query.last
        assert found.operators[0].bytes == local.operators[0].bytes
        assert found.watermark == local.watermark
    finally:
        memory.rm("/remote", recursive=True)


def test_special_characters_in_a_path_hide_only_the_row_counts(
    spark: SparkSession, made: Make, tmp_path: Path
) -> None:
    query, path = made("windows"), tmp_path / "a b{c*[ü%20"
    path.symlink_to(query.path)
    found = show(spark, str(path))
    (operator,) = found.operators
    assert (found.last_committed, operator.partitions, operator.rows) == (query.last, 2, None)
    assert any("STATE_REFUSED.PATH" in text for text in operator.unknown)
    with pytest.raises(StateRefusedError, match="symbolic link"):
        penstock.state.read(spark, str(path))


def test_a_running_query_is_shown(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.readStream.format("rate").option("rowsPerSecond", 5).load()
    query = (
        rows.selectExpr("value % 3 as key")
        .groupBy("key")
        .count()
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(tmp_path / "ck"))
        .start()
    )
    try:
        wait_until(lambda: query.lastProgress is not None and query.lastProgress["batchId"] >= 1)
        found = show(spark, str(tmp_path / "ck"))
        assert (found.query_id, found.operators[0].name) == (str(query.id), "stateStoreSave")
        assert found.operators[0].rows is not None
    finally:
        query.stop()


@pytest.fixture
def shown(spark: SparkSession, made: Make) -> tuple[Made, CheckpointState]:
    query = made("windows")
    return query, show(spark, str(query.path))


def test_the_whole_description_can_be_written_as_json(shown: tuple[Made, CheckpointState]) -> None:
    query, found = shown
    described = json.loads(json.dumps(found.to_dict()))
    assert described["watermark"] == "2026-01-01T12:03:12Z"
    assert described["last_committed"] == query.last
    assert described["operators"][0]["parts"][0]["rows"] == query.operators[0]["numRowsTotal"]
    assert described["planned"] is None


def test_the_text_shows_all_parts_in_columns(shown: tuple[Made, CheckpointState]) -> None:
    query, found = shown
    lines = [line.split() for line in str(found).splitlines() if line]
    assert ["watermark", "2026-01-01", "12:03:12", "UTC"] in lines
    assert ["last", "planned", str(query.last)] in lines
    assert ["part", "keys", "values", "rows", "updated", "removed"] in lines
    assert ["store", "kind", "partitions", "bytes", "snapshot", "delta"] in lines
    assert repr(found).startswith("CheckpointState(")
    assert "<pre>checkpoint" in found._repr_html_()
