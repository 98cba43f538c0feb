"""The state of a query as a DataFrame, and requests that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import InvalidInputError, StateRefusedError
from penstock.state import read, show
from penstock.state.reading import first_rows_of_state
from penstock.testing import replay_last_batch
from tests.state.conftest import Make
from tests.support.made_checkpoints import LATE

Copied = Callable[[str], Path]


def refused(action: Callable[[], object]) -> StateRefusedError:
    with pytest.raises(StateRefusedError) as caught:
        action()
    return caught.value


def test_an_operator_must_be_a_number_and_a_checkpoint_a_path(spark: SparkSession, made: Make) -> None:
    with pytest.raises(InvalidInputError, match=r"as penstock\.state\.show lists them"):
        read(spark, str(made("windows").path), "0")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="a path, or a URL"):
        read(spark, None)  # type: ignore[arg-type]


def test_keys_and_values_of_an_operator_are_read_as_rows(spark: SparkSession, made: Make) -> None:
    found = read(spark, str(made("windows").path)).select("key.key", "value.count").collect()
    assert sorted(map(tuple, found)) == [("a", 2), ("d", 1)]


def test_the_state_is_that_of_the_last_committed_batch_or_the_given_one(
    spark: SparkSession, made: Make, copied: Copied
) -> None:
    query = made("distinct")
    totals = [each["stateOperators"][0]["numRowsTotal"] for each in query.progress]
    assert totals[0] < totals[-1]
    for batch, rows in enumerate(totals):
        assert read(spark, str(query.path), batch=batch).count() == rows
    path = copied("distinct")
    last = replay_last_batch(path)
    assert read(spark, str(path)).count() == totals[last - 1]


def test_the_second_operator_is_read_by_its_id(spark: SparkSession, made: Make) -> None:
    path = str(made("windows of windows").path)
    assert read(spark, path, 1).select("key.*").columns == ["window", "key"]
    assert read(spark, path).select("key.*").columns == ["window"]


@pytest.mark.parametrize("name", ["join", "join in one store"])
def test_a_join_is_read_by_side(spark: SparkSession, made: Make, name: str) -> None:
    query = made(name)
    sides = [read(spark, str(query.path), part=side).count() for side in ("left", "right")]
    assert sum(sides) == query.operators[0]["numRowsTotal"]


def test_a_variable_is_read_by_name_with_one_row_per_element(spark: SparkSession, made: Make) -> None:
    path = str(made("variables").path)
    counts = read(spark, path, part="count").select("key.key", "value.n").collect()
    assert sorted(map(tuple, counts)) == [("a", 5), ("b", 1), ("c", 1), ("d", 1)]
    assert read(spark, path, part="times").count() == 8


def test_timers_can_be_read_as_a_part(spark: SparkSession, made: Make) -> None:
    found = read(spark, made("variables").path, part="timers").select("key.key", "expiration_timestamp_ms")
    assert sorted(map(tuple, found.collect())) == [(key, LATE) for key in "abcd"]


def test_file_names_are_derived_from_the_checkpoint_and_not_from_the_session(
    spark: SparkSession, made: Make
) -> None:
    """Spark derives them from its settings, and fails if those differ."""
    key = "spark.sql.streaming.stateStore.checkpointFormatVersion"
    rows = made("windows").operators[0]["numRowsTotal"]
    assert read(spark, str(made("windows with state ids").path)).count() == rows
    spark.conf.set(key, "2")
    try:
        assert read(spark, str(made("windows").path)).count() == rows
    finally:
        spark.conf.unset(key)


@pytest.mark.parametrize(
    ("name", "asked", "condition", "said"),
    [
        ("stateless", {}, "NO_STATE", "keeps none"),
        ("windows", {"operator": 7}, "NO_OPERATOR", "0 (stateStoreSave)"),
        ("windows", {"part": "defualt"}, "NO_PART", "Did you mean 'default'?"),
        ("windows", {"batch": 9}, "NO_BATCH", "batches 0 to"),
        ("join", {}, "NO_PART", "pass one of left, right as part"),
        ("join in one store", {"part": "default"}, "NO_PART", "pass one of left, right as part"),
        ("variables", {}, "NO_PART", "has 4 parts: pass one of"),
        ("variables", {"part": "cuont"}, "NO_PART", "Did you mean 'count'?"),
    ],
)
def test_unreadable_state_is_refused_by_name(
    spark: SparkSession, made: Make, name: str, asked: dict[str, Any], condition: str, said: str
) -> None:
    error = refused(lambda: read(spark, str(made(name).path), **asked))
    assert error.condition == f"STATE_REFUSED.{condition}"
    assert said in str(error)


def test_a_checkpoint_without_a_commit_has_no_state_to_read(spark: SparkSession, copied: Copied) -> None:
    path = copied("windows")
    for logged in (path / "commits").iterdir():
        logged.unlink()
    error = refused(lambda: read(spark, str(path)))
    assert error.condition == "STATE_REFUSED.NOTHING_COMMITTED"
    assert "has begun and is not committed" in str(error)


def test_schemas_that_spark_would_look_for_elsewhere_are_reported(
    spark: SparkSession, copied: Copied
) -> None:
    path = copied("variables")
    (metadata,) = (path / "state/0/_metadata/v2").glob("[0-9]*")
    text = metadata.read_text()
    metadata.write_text(text.replace("/variables/", "/gone/"))
    metadata.with_name(f".{metadata.name}.crc").unlink(missing_ok=True)
    error = refused(lambda: read(spark, path, part="count"))
    assert error.condition == "STATE_REFUSED.MOVED"
    assert "/gone/" in str(error)


def test_damaged_files_of_the_state_are_refused_with_the_cause_and_without_stack_traces(
    spark: SparkSession, copied: Copied
) -> None:
    path = copied("windows")
    for file in (path / "state/0").glob("*/*.delta"):
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
        file.write_bytes(file.read_bytes()[:20])
    said = refused(lambda: first_rows_of_state(spark, path, 0, part=None, batch=None, rows=5))
    assert said.condition == "STATE_REFUSED.UNREADABLE"
    (operator,) = show(spark, path).operators
    for text in (said.message, *operator.unknown):
        assert "java.io.EOFException" in text
        assert " at " not in text.partition(str(path))[2]


def test_damaged_metadata_of_an_operator_is_named_as_the_reason(spark: SparkSession, copied: Copied) -> None:
    path = copied("windows")
    metadata = path / "state/0/_metadata/metadata"
    metadata.with_name(".metadata.crc").unlink(missing_ok=True)
    metadata.write_bytes(metadata.read_bytes()[:9])
    said = refused(lambda: read(spark, path))
    assert "Unexpected end-of-input" in said.message
