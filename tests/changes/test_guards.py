"""The checks of every row, and how columns are found; without Spark."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructField, StructType

import penstock
from penstock import changes
from penstock.changes.passes import violations
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.changes.passes.violations import check_rows
from penstock.changes.schema import layout_of
from penstock.errors import ChangelogContractViolationError, InvalidChangelogSchemaError
from penstock.spark.schemas import to_struct
from tests.changes import model
from tests.support.change_frames import SCHEMA, table

LAYOUT = Layout(5, 6, 7, row_id=((0,), (1,)), data=((0,), (1,), (2,), (3,)), row_version=(3,), sequence=(4,))
TIME = 1_700_000_000_000_000
GOOD = (1, "x", "p", 1, 0, "insert", "0001", TIME)


def rows(*given: tuple[object, ...], schema: pa.Schema = model.SCHEMA) -> ChangeRows:
    return ChangeRows(table(given, schema), LAYOUT)


def with_value(place: int, value: Any) -> tuple[object, ...]:
    return (*GOOD[:place], value, *GOOD[place + 1 :])


@pytest.mark.parametrize(
    ("place", "condition"),
    [
        (0, "NULL_ROW_ID"),
        (1, "NULL_ROW_ID"),
        (3, "NULL_ROW_VERSION"),
        (4, "NULL_SEQUENCE"),
        (5, "UNEXPECTED_CHANGE_TYPE"),
        (6, "NULL_COMMIT_VERSION"),
        (7, "NULL_COMMIT_TIMESTAMP"),
    ],
)
def test_a_missing_value_is_refused(place: int, condition: str) -> None:
    with pytest.raises(ChangelogContractViolationError) as caught:
        check_rows(rows(GOOD, with_value(place, None)), needs_content=True)
    assert caught.value.condition == f"CHANGELOG_CONTRACT_VIOLATION.{condition}"
    assert model.SCHEMA.names[place] in caught.value.message
    shown = caught.value.parameters["row"]
    assert shown.keys() == {"a", "b", "_commit_version", "_commit_timestamp"}


def test_data_may_be_null_and_so_may_a_row_version_that_is_not_needed() -> None:
    check_rows(rows(GOOD, with_value(2, None)), needs_content=True)
    check_rows(rows(GOOD, with_value(3, None)), needs_content=False)


@pytest.mark.parametrize("kind", ["upsert", "INSERT", "", " insert", "update"])
def test_an_unknown_change_type_is_refused(kind: str) -> None:
    with pytest.raises(ChangelogContractViolationError, match=re.escape(repr(kind))) as caught:
        check_rows(rows(GOOD, with_value(5, kind)), needs_content=True)
    assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.UNEXPECTED_CHANGE_TYPE"


def test_the_epoch_means_null_only_in_columns_declared_without_nulls() -> None:
    check_rows(rows(with_value(7, 0)), needs_content=True)
    field = model.SCHEMA.field("_commit_timestamp").with_nullable(False)
    strict = model.SCHEMA.set(7, field)
    with pytest.raises(ChangelogContractViolationError) as caught:
        check_rows(rows(GOOD, with_value(7, 0), schema=strict), needs_content=True)
    assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.NULL_COMMIT_TIMESTAMP"
    check_rows(rows(with_value(7, 1), with_value(7, -1), schema=strict), needs_content=True)


PLAIN = to_struct(SCHEMA)


@pytest.mark.parametrize("name", ["_change_type", "_commit_version", "_commit_timestamp", "id", "rv"])
def test_two_columns_that_differ_only_in_case(name: str) -> None:
    doubled = StructType([*PLAIN.fields, StructField(name.upper(), PLAIN[name].dataType)])
    with pytest.raises(InvalidChangelogSchemaError, match="ignoring case") as caught:
        layout_of(doubled, penstock.ChangeContract("Id", row_version="Rv"), case_sensitive=False)
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.AMBIGUOUS_COLUMN"
    exact = penstock.ChangeContract("id", row_version="rv")
    plain = layout_of(PLAIN, exact, case_sensitive=True)
    expected = replace(plain, data=(*plain.data, (6,)))
    assert layout_of(doubled, exact, case_sensitive=True) == expected


@pytest.mark.parametrize("name", ["id", "rv", "_change_type", "_commit_version", "_commit_timestamp"])
def test_case_sensitive_sessions_do_not_find_names_in_another_case(name: str) -> None:
    renamed = [
        StructField(field.name.upper() if field.name == name else field.name, field.dataType)
        for field in PLAIN
    ]
    exact = penstock.ChangeContract("id", row_version="rv")
    assert layout_of(StructType(renamed), exact, case_sensitive=False) == layout_of(
        PLAIN, exact, case_sensitive=True
    )
    with pytest.raises(InvalidChangelogSchemaError, match=f"Did you mean '{name.upper()}'") as caught:
        layout_of(StructType(renamed), exact, case_sensitive=True)
    assert caught.value.condition == "INVALID_CHANGELOG_SCHEMA.MISSING_COLUMN"


def test_every_condition_is_in_the_docs() -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs/changes.md").read_text()
    named = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', Path(violations.__file__).read_text()))
    for path in Path(changes.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r"CHANGELOG_CONTRACT_VIOLATION\.([A-Z_0-9]+)", path.read_text()))
    assert {"NULL_ROW_ID", "DUPLICATE_ROW_ID", "LATE_COMMIT"} <= named
    assert [name for name in sorted(named) if f"`{name}`" not in docs] == []
