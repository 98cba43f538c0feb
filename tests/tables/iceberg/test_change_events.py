"""Events applied to an Iceberg table, without Spark: in any order, with keys of any type, beside other
writers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import Catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from pyspark.sql import types as spark

from penstock.errors import SchemaMismatchError, TableRefusedError
from penstock.tables.iceberg import applied_events_writer, event_files, lookups, position_deletes
from penstock.tables.iceberg.applied_events import BRANCH
from tests.tables.delta.driver import FIRST, FOLDS, SECOND
from tests.tables.histories import Event, deliveries
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.deletes import delete_rows
from tests.tables.iceberg.faults import conflict, lost_reply, lost_request
from tests.tables.iceberg.test_rewriting import VALUES

EVENTS = [*FIRST, *SECOND]
TYPES = pytest.mark.parametrize("scd_type", [1, 2])


@TYPES
def test_a_table_equals_a_fold_of_its_events(tmp_path: Path, scd_type: int) -> None:
    numbers = iter(range(1000))

    @settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(batches=deliveries())
    def check(batches: list[list[Event]]) -> None:
        driver = ChangesDriver(tmp_path, scd_type, name=f"t{next(numbers)}")
        for number, batch in enumerate(batches):
            driver.apply(number, batch)
            driver.apply(number, batch)
            so_far = [event for done in batches[: number + 1] for event in done]
            assert driver.rows() == FOLDS[scd_type](so_far)
        assert driver.orphans == []

    check()


@TYPES
def test_what_is_old_makes_no_snapshot_and_other_readers_see_rows_alone(
    tmp_path: Path, scd_type: int
) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, [*EVENTS, ("z", 1, 1, 1)])
    names = ["k", "v", *(["_valid_from", "_valid_to"] if scd_type == 2 else [])]
    assert driver.table.schema().column_names == names
    before = len(driver.table.metadata.snapshots)
    for number in (1, 2):
        driver.apply(number, FIRST)
    assert len(driver.table.metadata.snapshots) == before
    assert driver.rows() == FOLDS[scd_type]([*EVENTS, ("z", 1, 1, 1)])
    assert driver.orphans == []


@TYPES
def test_deletes_that_change_no_row_are_remembered(tmp_path: Path, scd_type: int) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, [("a", 5, 5, 0)])
    assert driver.recorded() == [("a", 5, 0)]
    ChangesDriver(tmp_path, scd_type).apply(1, [("a", 4, 4, 1)])
    assert driver.rows() == FOLDS[scd_type]([("a", 5, 5, 0), ("a", 4, 4, 1)])


@TYPES
@pytest.mark.parametrize("name", VALUES)
def test_rows_are_found_by_keys_and_in_the_order_of_each_type(
    tmp_path: Path, name: str, scd_type: int
) -> None:
    kind, values = VALUES[name]
    schema = spark.StructType().add('a.b "c"', kind).add("v", spark.LongType())
    schema = schema.add("_change_type", spark.StringType()).add("_commit_version", kind)
    driver = ChangesDriver(tmp_path, scd_type, schema=schema, keys=['A.b "C"'])
    order = sorted(values)
    driver.write(0, [(value, 0, order[0], 1) for value in values])
    for number, value in enumerate(values, 1):
        # Each is alone in its micro-batch, so that files are chosen by its bounds.
        driver.write(number, [(value, number, order[1], 1)])
        assert len(driver.rows()) == len(values) + (number if scd_type == 2 else 0)
    last = len(values) + 1
    driver.write(last, [(value, last, order[-1], 1) for value in values])
    current = [row[1] for row in driver.rows() if scd_type == 1 or row[3] is None]
    assert sorted(current) == ([last] * len(values) if len(order) > 2 else list(range(1, len(values) + 1)))
    driver.write(last + 1, [(values[0], 7, order[0], 1), (values[-1], 7, order[-1], 0)])
    assert len([row for row in driver.rows() if scd_type == 1 or row[3] is None]) >= len(values) - 1
    driver.write(last + 2, [(value, 9, order[0], 1) for value in values])
    assert 9 not in [row[1] for row in driver.rows()]


@TYPES
@pytest.mark.parametrize("column", ["k", "v"])
def test_a_partitioned_table_of_the_user_keeps_its_other_columns(
    tmp_path: Path, scd_type: int, column: str
) -> None:
    names = ["note", "v", "K", *(["_valid_from", "_valid_to"] if scd_type == 2 else [])]
    kinds: dict[str, Any] = {"note": StringType(), "K": StringType()}
    fields = [NestedField(n, name, kinds.get(name, LongType())) for n, name in enumerate(names, 1)]
    source = next(field.field_id for field in fields if field.name.lower() == column)
    spec = PartitionSpec(PartitionField(source, 1000, IdentityTransform(), "part"))
    catalog: Catalog = ChangesDriver(tmp_path, name="other").catalog  # type: ignore[assignment]
    catalog.create_table(
        ("shop", "t"), Schema(*fields), partition_spec=spec, properties={"format-version": "2"}
    )
    valid = {"_valid_from": [1, 2], "_valid_to": pa.nulls(2, pa.int64())} if scd_type == 2 else {}
    rows = {"note": ["mine", "stays"], "v": pa.array([7, 8], pa.int64()), "K": ["a", "z"], **valid}
    catalog.load_table(("shop", "t")).append(pa.table(rows))
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, [("a", 2, 2, 1), ("b", 1, 1, 1)])
    driver.apply(1, [("b", 2, 2, 0), ("a", 3, 3, 1), ("c", 3, 3, 1)])
    driver.apply(2, [("a", 1, 1, 1), ("b", 1, 1, 1)])
    found = driver.rows()
    if scd_type == 1:
        assert found == [("stays", 8, "z"), (None, 3, "a"), (None, 3, "c")]
    else:
        assert found == sorted(
            [
                ("mine", 7, "a", 1, 2),
                ("stays", 8, "z", 2, None),
                *((None, 2, "a", 2, 3), (None, 3, "a", 3, None), (None, 3, "c", 3, None)),
                (None, 1, "b", 1, 2),
            ],
            key=repr,
        )
    assert driver.orphans == []


def test_rows_that_other_engines_delete_stay_deleted_and_their_events_applied(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path, 2)
    driver.apply(0, [(key, 1, 1, 1) for key in "abcd"])
    delete_rows(driver.table, lambda row: row["k"] in "ab")
    driver.apply(1, [("a", 2, 2, 1), ("c", 2, 2, 0)])
    assert driver.rows() == [("a", 2, 2, None), ("c", 1, 1, 2), ("d", 1, 1, None)]
    latest = ChangesDriver(tmp_path, 1, name="latest")
    latest.apply(0, [(key, 1, 1, 1) for key in "abcd"])
    delete_rows(latest.table, lambda row: row["k"] in "ab")
    latest.apply(1, [("a", 1, 1, 1), ("c", 2, 2, 1)])
    assert latest.rows() == [("c", 2), ("d", 1)]


@TYPES
def test_large_micro_batches_are_looked_up_merged_and_written_by_several_tasks(
    tmp_path: Path, scd_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_DRIVER_ROWS", 0)
    monkeypatch.setattr(lookups, "_PART_ROWS", 100)
    monkeypatch.setattr(applied_events_writer, "_SMALL_ROWS", 2)
    monkeypatch.setattr(event_files, "_TASK_BYTES", 1)
    driver, events = ChangesDriver(tmp_path, scd_type), []
    for number in range(14):
        batch = [
            (f"k{key}", 100 * key + number, number, (key + number) % 3 and 1) for key in range(number, 20)
        ]
        events += batch
        driver.apply(number, [*batch, *events[:5]])
    assert driver.rows() == FOLDS[scd_type](events)
    assert driver.orphans == []


@TYPES
def test_the_record_has_few_files_and_each_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    monkeypatch.setattr(applied_events_writer, "_MAX_FILES", 3)
    driver = ChangesDriver(tmp_path, scd_type)
    for number in range(8):
        driver.apply(number, [("a", number, 2 * number, 1), ("a", 0, 2 * number + 1, 0)])
    files = driver.writer.applied_events.files(driver.table)
    assert len(files) <= 3
    if scd_type == 2:
        assert driver.recorded() == sorted((("a", 2 * number + 1, 0) for number in range(8)), key=repr)
    else:
        assert ("a", 15, 0) in driver.recorded()
        assert len(driver.recorded()) <= 3
    assert driver.rows() == FOLDS[scd_type](
        event for number in range(8) for event in [("a", number, 2 * number, 1), ("a", 0, 2 * number + 1, 0)]
    )


def test_other_keys_another_order_and_another_type_of_history_are_refused(tmp_path: Path) -> None:
    def schema(k: spark.DataType, at: spark.DataType) -> spark.StructType:
        rows = spark.StructType().add("k", k).add("v", spark.LongType())
        return rows.add("_change_type", spark.StringType()).add("_commit_version", at)

    text, number = spark.StringType(), spark.LongType()
    driver = ChangesDriver(tmp_path, 1)
    driver.apply(0, FIRST)
    with pytest.raises(SchemaMismatchError, match="ordered by long with the keys k string") as caught:
        ChangesDriver(tmp_path, 1, keys=["v"])
    assert caught.value.condition == "SCHEMA_MISMATCH.KEYS_CHANGED"
    with pytest.raises(SchemaMismatchError, match="and these are ordered by string"):
        ChangesDriver(tmp_path, 1, schema=schema(text, text))
    with driver.table.update_schema() as update:
        update.add_column("_valid_from", LongType())
        update.add_column("_valid_to", LongType())
    with pytest.raises(SchemaMismatchError, match="scd_type=1: keep it") as caught:
        ChangesDriver(tmp_path, 2, schema=schema(text, number))
    assert caught.value.condition == "SCHEMA_MISMATCH.TABLE_DIFFERS"
    with pytest.raises(SchemaMismatchError, match="keeps history"):
        ChangesDriver(tmp_path, 1)


def test_a_value_left_out_of_a_row_that_another_writer_has_deleted_is_not_made_null(tmp_path: Path) -> None:
    """The record still has the key, so only the stored rows can tell."""
    text = spark.StructField("text", spark.StringType(), metadata={"penstock.value": "text"})
    names = spark.StructField("u", spark.ArrayType(spark.StringType()), metadata={"penstock.unchanged": True})
    schema = spark.StructType([spark.StructField("k", spark.StringType()), text, names])
    schema = schema.add("_change_type", spark.StringType()).add("_commit_version", spark.LongType())
    driver = ChangesDriver(tmp_path, schema=schema)
    driver.write(0, [(key, "long", 1, 1, None) for key in "ab"])
    driver.table.delete(EqualTo("k", "a"))
    with pytest.raises(TableRefusedError, match="no row with the key 'k' = 'a'") as caught:
        driver.write(1, [(key, None, 2, 1, ",1,") for key in "ab"])
    assert caught.value.condition == "TABLE_REFUSED.UNKNOWN_VALUE"
    assert driver.rows() == [("b", "long")]
    driver.write(1, [("a", "whole", 2, 1, None), ("b", None, 2, 1, ",1,")], "other")
    assert driver.rows() == [("a", "whole"), ("b", "long")]


def test_a_merge_of_the_record_has_a_limited_number_of_rows() -> None:
    def file(rows: int) -> Any:
        return SimpleNamespace(file=SimpleNamespace(record_count=rows))

    largest = applied_events_writer._MAX_ROWS
    files = [file(rows) for rows in (*[largest // 2] * 6, largest // 4, largest // 4, largest // 8)]
    chosen = applied_events_writer._files_to_merge(files, largest // 8)
    assert sum(each.file.record_count for each in chosen) + largest // 8 <= largest
    assert len(chosen) == 3, "the smaller ones, which are still merged"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["write", "write", "write", "repeat", "other query", "append", "compact", "other run"]
        ),
        st.lists(
            st.tuples(st.sampled_from("abcde"), st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=6
        ),
        st.sampled_from([None, None, lost_reply, lost_request, conflict]),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize(("scd_type", "by_position"), [(1, False), (2, False), (2, True)])
@settings(max_examples=8, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_the_table_equals_a_fold_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory,
    scd_type: int,
    by_position: bool,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, list[Any], Any]],
) -> None:
    if by_position:
        monkeypatch.setattr(position_deletes, "_MIN_FILE_BYTES", 0)
        monkeypatch.setattr(position_deletes, "_MAX_DELETED_SHARE", 1.0)
    folder = tmp_path_factory.mktemp("model")
    driver, events, batches, others = ChangesDriver(folder, scd_type), [], [[]], 0
    for kind, places, fault in steps:
        batch = [(k, 10 * ord(k) + s, s, p) for k, s, p in places]
        if kind == "append":
            # Another writer's row, of a key that no event has.
            extra = {"_valid_from": [0], "_valid_to": pa.nulls(1, pa.int64())} if scd_type == 2 else {}
            event = (f"x{len(events)}", 1, 0, 1)
            driver.table.append(pa.table({"k": [event[0]], "v": [1], **extra}))
            events.append(event)
        elif kind == "compact":
            driver.table.overwrite(driver.table.scan().to_arrow())
        elif kind == "repeat" and len(batches) > 1:
            driver.apply(len(batches) - 2, batches[-1])
        elif kind == "other query":
            ChangesDriver(folder, scd_type, "other").apply(others, batch)
            others, events = others + 1, [*events, *batch]
        else:
            writer = ChangesDriver(folder, scd_type) if kind == "other run" else driver
            writer.catalog.faults = [] if fault is None else [fault]
            try:
                writer.apply(len(batches) - 1, batch)
            except Exception:
                assert fault is lost_request
                ChangesDriver(folder, scd_type).apply(len(batches) - 1, batch)
            writer.catalog.faults = []
            batches.append(batch)
            events += batch
        assert driver.rows() == FOLDS[scd_type](events)
    assert BRANCH in driver.table.metadata.refs
