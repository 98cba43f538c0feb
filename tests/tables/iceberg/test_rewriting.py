"""Output mode update of an Iceberg table: only files with keys of the micro-batch are rewritten, and
rows that other engines have deleted do not come back.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.manifest import DataFileContent
from pyspark.sql import types as spark

from penstock.errors import TableRefusedError
from penstock.tables.iceberg import position_deletes
from penstock.tables.iceberg.position_deletes import MERGE_MODE_PROPERTY, MERGE_ON_READ
from tests.tables.iceberg.deletes import delete_listed, delete_rows
from tests.tables.iceberg.driver import Driver, Row
from tests.tables.iceberg.faults import conflict, lost_reply, lost_request


def paths(driver: Driver) -> set[str]:
    return {task.file.file_path for task in driver.table.scan().plan_files()}


def test_files_without_a_key_of_the_micro_batch_stay(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "a"), (2, "b")])
    driver.write(1, [(100, "c"), (300, "d")])
    before = paths(driver)
    # Its range of keys includes 2, and no key is 2 in the second file.
    driver.write(2, [(2, "e"), (200, "f")])
    assert driver.rows() == [(1, "a"), (100, "c"), (2, "e"), (200, "f"), (300, "d")]
    assert len(before & paths(driver)) == 1
    assert len(paths(driver)) == 3
    snapshot = driver.table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["deleted-data-files"] == "1"
    assert driver.orphans == []


def test_a_file_whose_rows_are_all_replaced_is_removed(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "a"), (2, "b")], [(3, "c")])
    driver.write(1, [(1, "d"), (2, "e")])
    assert driver.rows() == [(1, "d"), (2, "e"), (3, "c")]
    assert len(paths(driver)) == 2


def test_rows_that_another_engine_has_deleted_do_not_come_back(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(number, "old") for number in range(10)])
    delete_rows(driver.table, lambda row: row["k"] in (2, 5, 9))
    driver.write(1, [(5, "new"), (6, "new")])
    assert driver.rows() == [
        *((number, "old") for number in (0, 1, 3, 4)),
        (5, "new"),
        (6, "new"),
        (7, "old"),
        (8, "old"),
    ]
    delete_rows(driver.table, lambda row: row["k"] in (0, 6))
    driver.write(2, [(0, "again")])
    assert [row[0] for row in driver.rows()] == [0, 1, 3, 4, 5, 7, 8]


def test_a_position_that_the_file_lacks_is_left_out(tmp_path: Path) -> None:
    """As other readers do."""
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(number, "old") for number in range(100)])
    (file,) = paths(driver)
    delete_listed(driver.table, {file: [3, 100, 999]})
    driver.table.transaction().set_properties({MERGE_MODE_PROPERTY: MERGE_ON_READ}).commit_transaction()
    driver.write(1, [(99, "new")])
    assert dict(driver.rows()) == dict.fromkeys({*range(99)} - {3}, "old") | {99: "new"}
    assert file in paths(driver)


@pytest.mark.parametrize("key", [1, 50, 250])
def test_equality_deletes_are_refused(tmp_path: Path, key: int) -> None:
    """Whether or not they may have the key."""
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "a"), (50, "z")])
    delete_rows(driver.table, lambda row: row["k"] == 50, content=DataFileContent.EQUALITY_DELETES)
    with pytest.raises(TableRefusedError, match="equality deletes") as caught:
        driver.write(1, [(key, "b")])
    assert caught.value.condition == "TABLE_REFUSED.EQUALITY_DELETES"
    assert [name for name in driver.orphans if name.endswith(".parquet")] == []
    appending = Driver(tmp_path, app_id="other")
    appending.write(0, [(7, "c")])


def test_a_conflict_rewrites_only_what_has_changed_since(tmp_path: Path) -> None:
    driver, other = (Driver(tmp_path, "update", "k", app_id=app) for app in ("one", "two"))
    driver.write(0, [(1, "a"), (2, "b")], [(3, "c"), (4, "d")])

    def other_commits(commit: Callable[[], Any]) -> Any:
        other.write(0, [(3, "other"), (9, "other")])
        return commit()

    driver.catalog.faults = [other_commits]
    driver.write(1, [(1, "mine"), (3, "mine")])
    assert driver.rows() == [(1, "mine"), (2, "b"), (3, "mine"), (4, "d"), (9, "other")]
    assert driver.orphans == []


def test_rows_with_one_key_and_rows_without_one_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, "update", "k")
    with pytest.raises(TableRefusedError, match="several rows with the key 'k' = 1") as caught:
        driver.write(0, [(1, "a")], [(1, "b")])
    assert caught.value.condition == "TABLE_REFUSED.DUPLICATE_KEYS"
    with pytest.raises(TableRefusedError, match="no value in 'k'") as caught:
        driver.write(0, [(None, "a")])
    assert caught.value.condition == "TABLE_REFUSED.NULL_KEY"
    assert [name for name in driver.stored if name.endswith(".parquet")] == []
    assert driver.rows() == []


EARLY, LATE = datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 1, 2, 3, 4, tzinfo=UTC)
VALUES: dict[str, tuple[spark.DataType, list[Any]]] = {
    "boolean": (spark.BooleanType(), [True, False]),
    "smallint": (spark.ShortType(), [-(2**15), 0, 7]),
    "int": (spark.IntegerType(), [-(2**31), 0, 2**31 - 1]),
    "string": (spark.StringType(), ["", "a", "Ω" * 40, "\U0001f600", "\uffff" * 20, "~" * 9000]),
    "binary": (spark.BinaryType(), [b"", b"\x00", b"\xff" * 40, b"a" * 17]),
    "date": (spark.DateType(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    "timestamp": (
        spark.TimestampType(),
        [EARLY, LATE],
    ),
    "timestamp_ntz": (spark.TimestampNTZType(), [each.replace(tzinfo=None) for each in (EARLY, LATE)]),
    "decimal": (spark.DecimalType(38, 2), [Decimal("-1.25"), Decimal(0), Decimal("9" * 36)]),
    "small decimal": (spark.DecimalType(9, 3), [Decimal("-1.250"), Decimal(0), Decimal("999.999")]),
    "time": (spark.TimeType(6), [time(0), time(23, 59, 59, 999999)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_rows_are_found_by_keys_of_each_type(tmp_path: Path, name: str) -> None:
    kind, values = VALUES[name]
    schema = spark.StructType().add('a.b "c"', kind).add("v", spark.LongType())
    driver = Driver(tmp_path, "update", 'a.b "c"', schema=schema)
    for batch_id, value in enumerate(values):
        driver.write(batch_id, [(value, 0)])
    driver.write(len(values), [(value, 1) for value in values])
    assert sorted(driver.rows(), key=repr) == sorted(((value, 1) for value in values), key=repr)
    driver.write(len(values) + 1, [(values[0], 2)])
    assert sorted(row[1] for row in driver.rows()) == [*[1] * (len(values) - 1), 2]


def test_bounds_of_long_values_are_left_out(tmp_path: Path) -> None:
    """Parquet has none for a row group with a value beyond a size, and those of others are not the file's."""
    schema = spark.StructType().add("k", spark.StringType()).add("v", spark.LongType())
    driver = Driver(tmp_path, "update", "k", schema=schema)
    long = "z" * 200_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.tables.iceberg.data_files._ROW_GROUP_ROWS", 1)
        driver.write(0, [("a", 0), ("b", 0)])
        driver.write(1, [(long, 0), ("c", 0)])
        driver.write(2, [(long, 1), ("d", 1)])
    assert sorted(driver.rows()) == [("a", 0), ("b", 0), ("c", 0), ("d", 1), (long, 1)]


def test_rows_that_are_deleted_while_a_micro_batch_is_committed_do_not_come_back(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "a"), (2, "b"), (3, "c")])

    def deleted(commit: Callable[[], Any]) -> Any:
        delete_rows(Driver(tmp_path, "update", "k").table, lambda row: row["k"] == 2)
        return commit()

    driver.catalog.faults = [deleted]
    driver.write(1, [(1, "new")])
    assert driver.rows() == [(1, "new"), (3, "c")]
    assert driver.orphans == []


KEYS = st.integers(0, 8)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "repeat", "append", "delete", "compact", "other run"]),
        st.dictionaries(KEYS, st.text("ab", max_size=2), min_size=1, max_size=6),
        st.integers(1, 3),
        st.sampled_from([None, None, lost_reply, lost_request, conflict]),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("by_position", [False, True])
@settings(max_examples=12, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_the_table_equals_a_dictionary_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory,
    by_position: bool,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[str, dict[int, str], int, Any]],
) -> None:
    if by_position:
        monkeypatch.setattr(position_deletes, "_MIN_FILE_BYTES", 0)
        monkeypatch.setattr(position_deletes, "_MAX_DELETED_SHARE", 1.0)
    folder = tmp_path_factory.mktemp("model")
    driver, held, batch_id, last = Driver(folder, "update", "k"), {}, 0, {}
    for kind, rows, tasks, fault in steps:
        parts: list[list[Row]] = [list(rows.items())[task::tasks] for task in range(tasks)]
        if kind == "append":
            fresh = {key + 100: value for key, value in rows.items() if key + 100 not in held}
            held |= fresh
            if fresh:
                driver.table.append(pa.table({"k": list(fresh), "v": list(fresh.values())}))
        elif kind == "delete":
            delete_rows(driver.table, lambda row, gone=tuple(rows): row["k"] in gone)
            held = {key: value for key, value in held.items() if key not in rows}
        elif kind == "compact":
            everything = driver.table.scan().to_arrow()
            driver.table.overwrite(everything)
        elif kind == "repeat" and batch_id:
            driver.write(batch_id - 1, last["parts"])
        else:
            writer = Driver(folder, "update", "k") if kind == "other run" else driver
            writer.catalog.faults = [] if fault is None else [fault]
            try:
                writer.write(batch_id, *parts)
            except Exception:
                assert fault is lost_request
                Driver(folder, "update", "k").write(batch_id, *parts)
            writer.catalog.faults = []
            held |= rows
            batch_id, last = batch_id + 1, {"parts": list(rows.items())}
        assert dict(driver.rows()) == held
        assert len(driver.rows()) == len(held)


def test_many_files_of_a_micro_batch_are_compared_by_ranges(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, *[[(number * 10, "old")] for number in range(40)])
    driver.write(1, *[[(number * 10, "new")] for number in range(40) if number % 2])
    assert driver.rows() == sorted(
        ((number * 10, "new" if number % 2 else "old") for number in range(40)), key=repr
    )


def test_keys_that_the_table_has_no_bounds_for_are_found(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.table.transaction().set_properties({"write.metadata.metrics.default": "none"}).commit_transaction()
    driver.write(0, [(1, "a"), (2, "b")])
    driver.write(1, [(2, "c")])
    assert driver.rows() == [(1, "a"), (2, "c")]
