"""The eleven defects of Spark 4.3.0's own change feeds, none of which may occur here."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from tests.support.change_frames import SCHEMA, Files, Row, Sink, collected, contract, frame

MINUTE = 60_000_000
START = 1_700_000_000_000_000 // MINUTE * MINUTE


def row(key: int, data: str, rv: int, kind: str, version: int, time: int | None = None) -> Row:
    return key, data, rv, kind, version, START + version * MINUTE if time is None else time


def violation(action: Any) -> str:
    with pytest.raises(Exception, match="CHANGELOG_CONTRACT_VIOLATION") as caught:
        action()
    return str(caught.value)


WATERMARK = {"whole_commits": False}


def a_null_where_there_can_be_none(spark: SparkSession) -> DataFrame:
    schema = (
        "id bigint, data string, rv bigint, _change_type string, _commit_version bigint, "
        "_commit_timestamp timestamp not null"
    )
    when = datetime.fromtimestamp(START // 1_000_000, UTC)
    rows = [(1, "a", 1, "insert", 1, when), (2, "b", 1, "insert", 1, None)]
    return spark.createDataFrame(rows, schema, verifySchema=False)


def test_defect_1_a_null_timestamp_in_a_column_declared_without_nulls(spark: SparkSession) -> None:
    df = a_null_where_there_can_be_none(spark)
    assert not df.schema["_commit_timestamp"].nullable
    done = penstock.changes.post_process(df, contract("CU"))
    assert "NULL_COMMIT_TIMESTAMP" in violation(done.collect)
    # The optimizer may not leave the check out either, where nobody asks for the column.
    assert "NULL_COMMIT_TIMESTAMP" in violation(done.select("id").collect)


@pytest.mark.parametrize("whole", [True, False], ids=["micro_batch", "watermark"])
@pytest.mark.parametrize("nullable", [True, False], ids=["nullable", "declared without nulls"])
def test_defect_1_a_null_timestamp_on_a_stream(
    spark: SparkSession, tmp_path: Path, nullable: bool, whole: bool
) -> None:
    files = Files(spark, tmp_path)
    files.add([row(1, "a", 1, "insert", 1), (*row(2, "b", 1, "insert", 1)[:5], None)])
    stream = files.read()
    if not nullable:
        stream = stream.select("id").join(a_null_where_there_can_be_none(spark), "id")
    assert stream.schema["_commit_timestamp"].nullable == nullable
    sink = Sink(tmp_path)
    done = penstock.changes.post_process(stream, contract("CU", whole_commits=whole))
    message = violation(lambda: sink.run(done.select("id", "_commit_timestamp")))
    assert "NULL_COMMIT_TIMESTAMP" in message
    assert sink.rows() == Counter()


def test_defect_2_a_late_commit_is_never_dropped_silently(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(files.read(), contract("CU", **WATERMARK))
    files.add([row(1, "a", 1, "insert", 1)], [row(2, "b", 2, "insert", 2)])
    sink.run(done)
    files.add([row(3, "c", 3, "insert", 3, START + 2 * MINUTE)])
    message = violation(lambda: sink.run(done))
    assert "LATE_COMMIT" in message
    assert "commit 3 at 2023-11-14T22:15:00+00:00" in message


def test_a_late_commit_is_not_dropped_silently_after_a_restart_with_a_longer_delay(
    spark: SparkSession, tmp_path: Path
) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)

    def done(delay: str) -> DataFrame:
        given = contract("CU", **WATERMARK)
        return penstock.changes.post_process(files.read(), given, watermark_delay=delay)

    files.add([row(1, "a", 1, "insert", 1)], [row(2, "b", 2, "insert", 9)])
    sink.run(done("1 second"))
    files.add([row(3, "c", 3, "insert", 3, START + 2 * MINUTE)])
    for delay in ("1 second", "1 hour"):
        assert "LATE_COMMIT" in violation(lambda delay=delay: sink.run(done(delay)))


def test_defect_2_a_late_commit_within_sparks_grace_period(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(files.read(), contract("CU", **WATERMARK))
    files.add([row(1, "a", 1, "insert", 2)], [row(2, "b", 2, "insert", 1)])
    assert "LATE_COMMIT" in violation(lambda: sink.run(done))


def test_a_delay_allows_a_commit_to_arrive_in_parts(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(
        files.read(), contract("CU", **WATERMARK), compute_updates=True, watermark_delay="90 seconds"
    )
    files.add(
        [row(1, "a", 1, "insert", 1), row(2, "k", 0, "delete", 1)],
        [row(1, "a", 1, "delete", 2), row(2, "k", 0, "insert", 1)],
        [row(1, "b", 2, "insert", 2)],
        [row(9, "z", 9, "insert", 9)],
    )
    assert sink.run(done) == Counter(
        [
            row(1, "a", 1, "insert", 1),
            row(1, "a", 1, "update_preimage", 2),
            row(1, "b", 2, "update_postimage", 2),
        ]
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("files_a_batch", [1, 3])
@pytest.mark.parametrize("window", ["commit", "4 minutes"])
def test_defect_3_net_changes_do_not_depend_on_micro_batches(
    spark: SparkSession, tmp_path: Path, window: str, files_a_batch: int
) -> None:
    files = Files(spark, tmp_path)
    rows = [
        row(1, "a", 0, "insert", 0),
        row(1, "a", 0, "delete", 1),
        row(2, "a", 2, "insert", 2),
        row(2, "a", 2, "delete", 4),
        row(3, "a", 4, "insert", 4),
        row(3, "a", 4, "update_preimage", 5),
        row(3, "b", 5, "update_postimage", 5),
        row(9, "z", 9, "insert", 30),
    ]
    base = START // (4 * MINUTE) * 4 * MINUTE
    rows = [(*each[:5], base + each[4] * MINUTE) for each in rows]
    versions = sorted({each[4] for each in rows})
    files.add(*[[each for each in rows if each[4] == version] for version in versions])
    done = penstock.changes.post_process(
        files.read(files_a_batch),
        contract("I", whole_commits=True),
        deduplication_mode="netChanges",
        net_window=window,
    )
    found = Sink(tmp_path).run(done)
    if window == "commit":
        expected = [
            (
                *each[:3],
                {"update_preimage": "delete", "update_postimage": "insert"}.get(each[3], each[3]),
                *each[4:],
            )
            for each in rows
        ]
    else:
        expected = [rows[2], rows[3], (*rows[6][:3], "insert", *rows[6][4:])]
    assert found - Counter(expected[-1:]) == Counter(expected) - Counter(expected[-1:]) or found == Counter(
        expected
    )


def test_defect_4_updates_and_net_changes_together_on_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    files.add([row(1, "a", 1, "insert", 1)], [row(1, "a", 1, "delete", 2), row(1, "b", 2, "insert", 2)])
    done = penstock.changes.post_process(
        files.read(),
        contract("IU", whole_commits=True),
        deduplication_mode="netChanges",
        compute_updates=True,
        net_window="commit",
    )
    assert Sink(tmp_path).run(done) == Counter(
        [
            row(1, "a", 1, "insert", 1),
            row(1, "a", 1, "update_preimage", 2),
            row(1, "b", 2, "update_postimage", 2),
        ]
    )


@pytest.mark.parametrize("whole", [True, False])
def test_defect_5_event_time_works_downstream(spark: SparkSession, tmp_path: Path, whole: bool) -> None:
    files = Files(spark, tmp_path)
    files.add(*[[row(version, "a", version, "insert", version)] for version in (1, 2, 3, 9)])
    kept = penstock.changes.post_process(
        files.read(), contract("CU", whole_commits=whole), keep_watermark=True
    )
    counted = (
        kept.groupBy(F.window("_commit_timestamp", "1 minute"))
        .count()
        .select(F.unix_micros("window.start"), "count")
    )
    assert Sink(tmp_path).run(counted) >= Counter((START + version * MINUTE, 1) for version in (1, 2, 3))


def test_defect_5_a_user_defined_watermark_on_another_column(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    files.add(*[[row(version, "a", version, "insert", version)] for version in (1, 2, 3, 9)])
    done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=True))
    assert all("spark.watermarkDelayMs" not in each.metadata for each in done.schema)
    own = done.selectExpr("_commit_timestamp + interval 1 day as t", "id").withWatermark("t", "0 seconds")
    counted = own.groupBy(F.window("t", "1 minute")).count().select(F.unix_micros("window.start"), "count")
    day = 86_400_000_000
    assert Sink(tmp_path).run(counted) >= Counter(
        (START + day + version * MINUTE, 1) for version in (1, 2, 3)
    )


@pytest.mark.parametrize("keep", [False, True])
def test_a_watermark_behind_the_watermark_strategy_is_refused_and_does_not_stall(
    spark: SparkSession, tmp_path: Path, keep: bool
) -> None:
    files = Files(spark, tmp_path)
    files.add(*[[row(version, "a", version, "insert", version)] for version in (1, 2)])
    done = penstock.changes.post_process(files.read(), contract("CU", **WATERMARK), keep_watermark=keep)
    own = done.selectExpr("_commit_timestamp + interval 1 day as t").withWatermark("t", "0 seconds")
    with pytest.raises(Exception, match=r"SECOND_WATERMARK\] withWatermark on 't'.*keep_watermark=True"):
        Sink(tmp_path).run(own.groupBy(F.window("t", "1 minute")).count().select("count"))


def test_watermarks_of_two_feeds_in_one_query_are_allowed(spark: SparkSession, tmp_path: Path) -> None:
    both = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files = Files(spark, tmp_path / name)
        files.add([row(1, name, 1, "insert", 1)], [row(2, name, 2, "insert", 2)])
        both.append(penstock.changes.post_process(files.read(), contract("CU", **WATERMARK)))
    found = Sink(tmp_path).run(both[0].union(both[1]))
    assert found == Counter(row(n, name, n, "insert", n) for n in (1, 2) for name in ("one", "two"))


def test_defect_6_an_insert_and_a_delete_in_one_commit_are_not_an_update(spark: SparkSession) -> None:
    schema = SCHEMA.insert(3, pa.field("step", pa.int64()))
    rows = [(1, "a", 1, 1, "insert", 1, START), (1, "a", 1, 2, "delete", 1, START)]
    df = frame(spark, rows, schema)
    done = penstock.changes.post_process(df, contract("IU", sequence="step"), compute_updates=True)
    assert collected(done) == Counter()
    assert "sequence" in violation(
        penstock.changes.post_process(df, contract("IU"), compute_updates=True).collect
    )


def test_a_batch_inside_foreach_batch_is_not_part_of_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(1, "a", 1, "insert", 1, START)]
    files = Files(spark, tmp_path)
    files.add(rows, rows)
    batch = penstock.changes.post_process(frame(spark, rows), contract("CU", whole_commits=True))
    counts: list[int] = []
    query = (
        files.read()
        .writeStream.foreachBatch(lambda df, number: counts.append(batch.count()))
        .option("checkpointLocation", str(tmp_path / "ck"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert counts == [1, 1]


@pytest.mark.parametrize(("flags", "mode"), [("C", "dropCarryovers"), ("I", "netChanges")])
def test_defect_7_an_unknown_change_type_is_reported(spark: SparkSession, flags: str, mode: str) -> None:
    df = frame(spark, [row(1, "a", 1, "insert", 1), row(2, "a", 1, "upsert", 1)])
    message = violation(penstock.changes.post_process(df, contract(flags), deduplication_mode=mode).collect)
    assert "UNEXPECTED_CHANGE_TYPE" in message
    assert "'upsert'" in message


@pytest.mark.parametrize("whole", [True, False], ids=["micro_batch", "watermark"])
def test_defect_7_an_unknown_change_type_on_a_stream(
    spark: SparkSession, tmp_path: Path, whole: bool
) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    files.add([row(1, "a", 1, "insert", 1), row(2, "a", 1, None, 1)])  # type: ignore[arg-type]  # that is the test
    done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=whole))
    message = violation(lambda: sink.run(done))
    assert "UNEXPECTED_CHANGE_TYPE" in message
    assert "None" in message
    assert sink.rows() == Counter()


def test_defect_8_several_identical_pairs_in_one_commit(spark: SparkSession) -> None:
    pair = [row(1, "a", 1, "delete", 2), row(1, "a", 1, "insert", 2)]
    assert (
        collected(penstock.changes.post_process(frame(spark, pair * 2), contract("CU"), compute_updates=True))
        == Counter()
    )


def test_defect_9_the_last_commit_is_emitted(spark: SparkSession, tmp_path: Path) -> None:
    """Without a state store no commit waits; with one, a micro-batch without data emits it."""
    for whole in (True, False):
        folder = tmp_path / str(whole)
        folder.mkdir()
        files = Files(spark, folder)
        files.add([row(1, "a", 1, "insert", 1)])
        done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=whole))
        assert Sink(folder).run(done) == Counter([row(1, "a", 1, "insert", 1)])


def test_defect_10_timestamps_finer_than_a_millisecond(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(spark, tmp_path)
    rows = [row(number, "a", number, "insert", number, START + number * 1_001 + 999) for number in (1, 2, 3)]
    files.add(*[[each] for each in rows])
    done = penstock.changes.post_process(files.read(), contract("CU", **WATERMARK))
    assert Sink(tmp_path).run(done) == Counter(rows)


@pytest.mark.parametrize("keys", [(1, 1), (1, 2)], ids=["one row", "two rows"])
def test_defect_11_one_version_with_two_timestamps(
    spark: SparkSession, tmp_path: Path, keys: tuple[int, int]
) -> None:
    rows = [row(keys[0], "a", 1, "delete", 2, START), row(keys[1], "a", 1, "insert", 2, START + 1)]
    assert "SEVERAL_TIMESTAMPS" in violation(
        penstock.changes.post_process(frame(spark, rows), contract("CU")).collect
    )
    for whole in (True, False):
        folder = tmp_path / str(whole)
        folder.mkdir()
        files = Files(spark, folder)
        files.add(rows)
        done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=whole))
        assert "SEVERAL_TIMESTAMPS" in violation(lambda done=done, folder=folder: Sink(folder).run(done))
