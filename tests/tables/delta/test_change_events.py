"""Events applied to a Delta table, without Spark: any order, several drivers, drivers that die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from pyspark.sql import types as spark

from penstock.errors import CommitRefusedError, TableRefusedError
from penstock.tables.changes.merge_plan import plan_history, plan_latest
from penstock.tables.delta import lookups, vectors
from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.stage import DeltaStage
from tests.tables.delta.driver import (
    FIRST,
    FOLDS,
    LINES,
    SECOND,
    VERSIONS,
    Driver,
    collapsed,
    folded_latest,
    lines,
    table_of,
)
from tests.tables.histories import Event, deliveries
from tests.tables.histories import folded as folded_history


@settings(max_examples=100)
@given(batches=deliveries())
def test_the_last_event_of_each_key_wins_in_any_order(batches: list[list[Event]]) -> None:
    known: dict[str, tuple[int, int]] = {}
    rows: dict[str, int] = {}
    for number, batch in enumerate(batches):
        staged = collapsed(batch, 1)
        outcome = plan_latest(["k"], lines(staged), table_of([(k, *at) for k, at in known.items()], LINES))
        taken = [event for event, wins in zip(staged, outcome.merged.to_pylist(), strict=True) if wins]
        assert sorted(map(tuple, (row.values() for row in outcome.recorded.to_pylist()))) == sorted(
            (key, sequence, present) for key, _, sequence, present in taken
        )
        for key, value, sequence, present in taken:
            known[key] = (sequence, present)
            rows.pop(key, None)
            if present:
                rows[key] = value
        assert sorted(rows.items()) == folded_latest(
            event for done in batches[: number + 1] for event in done
        )


@settings(max_examples=100)
@given(batches=deliveries())
def test_versions_have_no_gaps_or_overlaps_in_any_order(batches: list[list[Event]]) -> None:
    ended: list[tuple[str, int, int]] = []
    rows: dict[tuple[str, int], tuple[int, int | None]] = {}
    for number, batch in enumerate(batches):
        staged = collapsed(batch, 2)
        stored = table_of([(key, at, rows[key, at][1]) for key, at in rows], VERSIONS)
        outcome = plan_history(["k"], lines(staged), table_of(ended, LINES), stored)
        ended += [tuple(row.values()) for row in outcome.recorded.to_pylist()]
        assert len(set(ended)) == len(ended)
        assert outcome.ended_versions is not None
        for key, begins, ends in (row.values() for row in outcome.ended_versions.to_pylist()):
            assert rows[key, begins][1] != ends
            rows[key, begins] = (rows[key, begins][0], ends)
        taken = [event for event, wins in zip(staged, outcome.merged.to_pylist(), strict=True) if wins]
        assert outcome.valid_to is not None
        for (key, value, begins, _), ends in zip(taken, outcome.valid_to.to_pylist(), strict=True):
            assert (key, begins) not in rows
            rows[key, begins] = (value, ends)
        found = sorted(((key, value, at, ends) for (key, at), (value, ends) in rows.items()), key=repr)
        assert found == folded_history(event for done in batches[: number + 1] for event in done)
        again = plan_history(
            ["k"],
            lines(staged),
            table_of(ended, LINES),
            table_of([(key, at, rows[key, at][1]) for key, at in rows], VERSIONS),
        )
        assert again.is_empty


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_table_equals_a_fold_of_its_events(tmp_path: Path, scd_type: int) -> None:
    numbers = iter(range(1000))

    @settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(batches=deliveries())
    def check(batches: list[list[Event]]) -> None:
        driver = Driver(tmp_path / str(next(numbers)), scd_type)
        for number, batch in enumerate(batches):
            driver.apply(number, batch)
            driver.apply(number, batch)
            so_far = [event for done in batches[: number + 1] for event in done]
            assert driver.rows() == FOLDS[scd_type](so_far)

    check()


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_few_rows_of_a_large_file_get_a_vector(tmp_path: Path, scd_type: int, way: str) -> None:
    driver = Driver(tmp_path, scd_type)
    events = [(str(number), 1, 1, 1) for number in range(20)]
    driver.apply(0, events)
    changes = [("3", 2, 2, 1), ("4", 0, 2, 0), ("x", 2, 2, 1)]
    driver.apply(1, changes)
    assert driver.rows() == FOLDS[scd_type]([*events, *changes])
    late = [("3", 1, 1, 0), ("5", 3, 3, 1), ("3", 3, 3, 1)]
    driver.apply(2, late)
    assert driver.rows() == FOLDS[scd_type]([*events, *changes, *late])
    vectors_of_table, of_record = (
        pa.table(table.deletion_vectors()).num_rows for table in (driver.table(), driver.applied())
    )
    assert (vectors_of_table > 0) == (way == "vectors")
    assert (of_record > 0) == (scd_type == 1 and way != "deltalake")


@pytest.fixture(params=["deltalake", "copies", "vectors"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How rows are changed; each file is large enough for a vector."""
    monkeypatch.setattr(Driver, "by_tasks", request.param != "deltalake")
    monkeypatch.setattr(Driver, "by_vectors", request.param == "vectors")
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    monkeypatch.setattr(vectors, "_MAX_DELETED_SHARE", 0.6)
    # Tasks look for rows, and not the driver.
    monkeypatch.setattr(lookups, "_DRIVER_BYTES", -1)
    return str(request.param)


class Hooks:
    """What happens before a driver remembers the events of its next micro-batch, and after it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        remember = AppliedTable.record

        def hooked(applied: AppliedTable, *arguments: Any) -> int:
            if self.before:
                self.before.pop()()
            number = remember(applied, *arguments)
            if self.after:
                self.after.pop()()
            return number

        monkeypatch.setattr(AppliedTable, "record", hooked)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    return Hooks(monkeypatch)


class Killed(BaseException):
    pass


def die() -> None:
    raise Killed


EVENTS = [*FIRST, *SECOND]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("scd_type", [1, 2])
def test_two_queries_that_commit_at_the_same_moment_do_not_overtake_each_other(
    tmp_path: Path, hooks: Hooks, scd_type: int, moment: str
) -> None:
    """The second one commits while the first one is about to."""
    one, other = (Driver(tmp_path, scd_type, name) for name in ("one", "other"))
    one.apply(0, [("a", 0, 0, 1), ("z", 0, 0, 0)])
    getattr(hooks, moment).append(lambda: other.apply(0, SECOND))
    one.apply(1, FIRST)
    assert not getattr(hooks, moment)
    assert one.rows() == FOLDS[scd_type]([("a", 0, 0, 1), *EVENTS])


@pytest.mark.parametrize("scd_type", [1, 2])
def test_two_runs_of_a_query_commit_a_micro_batch_once(tmp_path: Path, hooks: Hooks, scd_type: int) -> None:
    one, other = Driver(tmp_path, scd_type), Driver(tmp_path, scd_type)
    hooks.after.append(lambda: other.apply(0, EVENTS))
    one.apply(0, EVENTS)
    assert one.rows() == FOLDS[scd_type](EVENTS)
    assert DeltaTable(one.location.path).version() == 2 + one.by_vectors, (
        "it is made, it names what is remembered, it gets a property, it has the micro-batch"
    )


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("scd_type", [1, 2])
def test_events_of_a_dead_driver_count_once_it_has_restarted(
    tmp_path: Path, hooks: Hooks, scd_type: int, again: bool
) -> None:
    """They are remembered, and not in the table: another query's events, older ones too, are applied as if
    they were not there.
    """
    one, other = (Driver(tmp_path, scd_type, name) for name in ("one", "other"))
    one.apply(0, [("a", 0, 0, 1), ("z", 0, 0, 0)])
    hooks.after.append(die)
    with pytest.raises(Killed):
        one.apply(1, SECOND)
    other.apply(0, FIRST)
    assert one.rows() == FOLDS[scd_type]([("a", 0, 0, 1), *FIRST])
    Driver(tmp_path, scd_type, "one")
    if again:
        one.apply(1, SECOND)
        assert one.rows() == FOLDS[scd_type]([("a", 0, 0, 1), *EVENTS])
    last = [("a", 2, 2, 1), ("b", 9, 9, 0), ("f", 1, 1, 1)]
    other.apply(1, last)
    events = [*FIRST, *(SECOND if again else []), ("a", 0, 0, 1), *last]
    assert one.rows() == FOLDS[scd_type](events)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_dead_driver_may_have_made_a_checkpoint_of_the_record(
    tmp_path: Path, hooks: Hooks, scd_type: int
) -> None:
    """So the last checkpoint is later than the version that counts."""
    driver = Driver(tmp_path, scd_type)
    driver.apply(0, FIRST)
    hooks.after.append(die)
    with pytest.raises(Killed):
        driver.apply(1, SECOND)
    driver.applied().create_checkpoint()
    driver.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type](EVENTS)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_deletes_that_change_no_row_are_remembered(tmp_path: Path, scd_type: int) -> None:
    driver = Driver(tmp_path, scd_type)
    driver.apply(0, [("a", 5, 5, 0)])
    driver.apply(1, [("a", 4, 4, 1)])
    assert driver.rows() == FOLDS[scd_type]([("a", 5, 5, 0), ("a", 4, 4, 1)])


INCOMPLETE = pa.schema(
    [
        *(("c0", pa.string()), ("c1", pa.string()), ("sequence", pa.int64()), ("present", pa.int32())),
        *(("unknown", pa.string()), ("ambiguous", pa.bool_())),
    ]
)


def test_a_value_left_out_of_a_row_that_another_writer_has_deleted_is_not_made_null(tmp_path: Path) -> None:
    """The record still has the key, so only the stored rows can tell."""
    text = spark.StructField("text", spark.StringType(), metadata={"penstock.value": "text"})
    names = spark.StructField("u", spark.ArrayType(spark.StringType()), metadata={"penstock.unchanged": True})
    schema = spark.StructType([spark.StructField("k", spark.StringType()), text, names])
    schema = schema.add("_change_type", spark.StringType()).add("_commit_version", spark.LongType())
    driver = Driver(tmp_path, 1, schema=schema)

    def write(batch_id: int, *events: tuple[object, ...]) -> None:
        driver.write(batch_id, table_of([(*event, False) for event in events], INCOMPLETE))

    write(0, *((key, "long", 1, 1, None) for key in "ab"))
    DeltaTable(driver.location.path).delete("k = 'a'")
    with pytest.raises(TableRefusedError, match="no row with the key 'k' = 'a'") as caught:
        write(1, *((key, None, 2, 1, ",1,") for key in "ab"))
    assert caught.value.condition == "TABLE_REFUSED.UNKNOWN_VALUE"
    assert driver.rows() == [("b", "long")]
    write(1, ("a", "whole", 2, 1, None), ("b", None, 2, 1, ",1,"))
    assert driver.rows() == [("a", "whole"), ("b", "long")]


def test_a_table_whose_transactions_have_expired_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other writers of Delta drop app transactions after the time that a property of the table sets."""
    driver = Driver(tmp_path, 1)
    driver.apply(0, [("a", 5, 5, 1)])
    monkeypatch.setattr(AppliedTable, "transaction", "dropped")
    with pytest.raises(TableRefusedError, match="setTransactionRetentionDuration"):
        driver.apply(1, [("a", 4, 4, 1)])
    with pytest.raises(TableRefusedError) as caught:
        Driver(tmp_path, 1)
    assert caught.value.condition == "TABLE_REFUSED.CHANGES_FORGOTTEN"
    assert driver.rows() == [("a", 5)]


def test_a_commit_is_refused_if_the_driver_does_not_see_a_staged_file(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 1)
    stage = DeltaStage(driver.location, driver.writer.layout, driver.app_id, 0)
    with pytest.raises(CommitRefusedError, match=r"STAGED_FILES_MISSING\].*that all machines share"):
        stage.require_files([DataFile(stage.new_path(), 1, 1, "{}")])


def test_commits_to_a_constantly_changing_table_are_given_up(tmp_path: Path, hooks: Hooks) -> None:
    one, other = Driver(tmp_path, 1, "one"), Driver(tmp_path, 1, "other")
    numbers = iter(range(10))

    def overtake() -> None:
        hooks.after[:] = []
        number = next(numbers)
        other.apply(number, [("b", number, number, 1)])
        hooks.after.append(overtake)

    hooks.after.append(overtake)
    with pytest.raises(CommitRefusedError, match="10 times"):
        one.apply(0, FIRST)
    assert one.rows() == [("b", 9)]


def test_remembered_events_are_kept_in_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tables.delta.applied_table._MAX_FILES", 3)
    driver = Driver(tmp_path, 2)
    for number in range(8):
        driver.apply(number, [("a", number, 2 * number, 1), ("a", 0, 2 * number + 1, 0)])
    assert len(driver.applied().file_uris()) <= 4
    assert driver.rows() == [("a", number, 2 * number, 2 * number + 1) for number in range(8)]
    assert pa.table(driver.applied().scan()).num_rows == 8
