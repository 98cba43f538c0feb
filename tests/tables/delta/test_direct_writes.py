"""Which tables take data files that tasks wrote, and which are written by deltalake, which honours their
features or refuses them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from penstock.errors import TableRefusedError
from penstock.lake.storage import DeltaLocation
from penstock.tables.delta.compaction import compact
from penstock.tables.delta.direct_writes import obstacle
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.writer import delta_writer
from tests.support.object_store import object_store
from tests.support.object_store import settings as object_settings
from tests.tables.delta.row_queries import RowQuery

ROWS = pa.schema([("id", pa.int64()), ("v", pa.string())])
READER_FEATURES = ("columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint")
MODES = ("append", "update", "complete")
ID: dict[str, Any] = {"name": "id", "type": "long", "nullable": True, "metadata": {}}
V = {**ID, "name": "v", "type": "string"}


def make(
    folder: Path,
    *fields: dict[str, Any],
    features: tuple[str, ...] = (),
    properties: dict[str, str] | None = None,
    partition: tuple[str, ...] = (),
) -> DeltaTable:
    """Write the first commit of a table, as other programs may do it."""
    reader = [name for name in features if name in READER_FEATURES]
    versions = {"minReaderVersion": 3 if reader else 1, "minWriterVersion": 7}
    protocol: dict[str, Any] = {**versions, "writerFeatures": list(features)}
    if reader:
        protocol["readerFeatures"] = reader
    metadata = {
        "id": "5fba94ed-9794-4965-ba6e-6ee3c0d22af9",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": list(fields or (ID, V))}),
        "partitionColumns": list(partition),
        "configuration": properties or {},
        "createdTime": 1,
    }
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    actions = [{"protocol": protocol}, {"metaData": metadata}]
    (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    return DeltaTable(str(folder))


def reasons(table: DeltaTable, keys: tuple[str, ...] = ("id",), rows: pa.Schema = ROWS) -> list[str | None]:
    return [obstacle(table, mode, DeltaLayout(rows, keys)) for mode in MODES]


def with_metadata(**metadata: Any) -> dict[str, Any]:
    return {**V, "metadata": metadata}


NESTED = {**V, "type": {"type": "array", "elementType": "string", "containsNull": False}}

EVERY_MODE: dict[str, dict[str, Any]] = {
    "is partitioned": {"partition": ("v",)},
    "has the writer features clustering, domainMetadata": {"features": ("clustering", "domainMetadata")},
    "has the writer features domainMetadata, rowTracking": {"features": ("rowTracking", "domainMetadata")},
    "has the writer features allowColumnDefaults": {"features": ("allowColumnDefaults",)},
    "has the writer features somethingNew": {"features": ("somethingNew", "timestampNtz")},
    "has the property delta.constraints.positive": {
        "features": ("checkConstraints",),
        "properties": {"delta.constraints.positive": "id > 0"},
    },
    "has the property delta.columnMapping.mode": {
        "features": ("columnMapping",),
        "properties": {"delta.columnMapping.mode": "name"},
        "fields": tuple(
            {**field, "metadata": {"delta.columnMapping.id": n, "delta.columnMapping.physicalName": f"c{n}"}}
            for n, field in enumerate((ID, V))
        ),
    },
    "has a column 'v' with delta.invariants": {"fields": (ID, with_metadata(**{"delta.invariants": "{}"}))},
    "has a column 'v' with delta.generationExpression": {
        "features": ("generatedColumns",),
        "fields": (ID, with_metadata(**{"delta.generationExpression": "'x'"})),
    },
    "has a column 'v' with delta.identity.start": {
        "features": ("identityColumns",),
        "fields": (ID, with_metadata(**{"delta.identity.start": 1})),
    },
    "has a column 'id' that does not allow nulls": {"fields": ({**ID, "nullable": False}, V)},
}


@pytest.mark.parametrize("reason", EVERY_MODE)
def test_a_feature_that_is_about_rows_is_left_to_deltalake(tmp_path: Path, reason: str) -> None:
    more = EVERY_MODE[reason]
    table = make(tmp_path, *more.get("fields", ()), **{k: v for k, v in more.items() if k != "fields"})
    assert [found is not None and found.startswith(reason) for found in reasons(table)] == [True] * 3


REPLACING: dict[str, dict[str, Any]] = {
    "has the property delta.appendOnly": {"properties": {"delta.appendOnly": "true"}},
    "has the property delta.enableChangeDataFeed": {"properties": {"delta.enableChangeDataFeed": "true"}},
}


@pytest.mark.parametrize("reason", REPLACING)
def test_a_feature_that_is_about_replaced_rows_matters_where_rows_are_replaced(
    tmp_path: Path, reason: str
) -> None:
    assert reasons(make(tmp_path, **REPLACING[reason])) == [None, reason, reason]


def test_features_that_ask_nothing_of_a_commit_are_no_obstacle(tmp_path: Path) -> None:
    features = ("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns")
    more = ("identityColumns", "columnMapping", "timestampNtz", "v2Checkpoint", "deletionVectors")
    properties = {
        "delta.appendOnly": "false",
        "delta.enableChangeDataFeed": "False",
        "delta.columnMapping.mode": "none",
        "delta.checkpointInterval": "5",
    }
    table = make(
        tmp_path, ID, with_metadata(comment="text"), features=(*features, *more), properties=properties
    )
    assert reasons(table) == [None] * 3


def test_other_columns_than_those_of_the_rows_are_left_to_deltalake(tmp_path: Path) -> None:
    other = {**V, "name": "other"}
    assert reasons(make(tmp_path / "more", ID, V, other)) == [
        None,
        "has columns that the rows do not have",
        None,
    ]
    fewer = "has no column 'v' of the rows' type"
    assert reasons(make(tmp_path / "fewer", ID)) == [fewer, fewer, None]
    lists = pa.schema([ROWS.field("id"), ("v", pa.list_(pa.string()))])
    strict = "has a column 'v' with values that do not allow nulls"
    assert reasons(make(tmp_path / "strict", ID, NESTED), rows=lists) == [strict, strict, None]


def test_complete_mode_leaves_a_new_feature_to_deltalake(tmp_path: Path) -> None:
    local = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.timestamp("us")))])
    assert reasons(make(tmp_path), rows=local)[2] == "gets the feature timestampNtz"
    query = RowQuery(tmp_path, local, "complete")
    query.write(0, pa.table({"id": [1], "v": [[None]]}, local))
    assert "timestampNtz" in (query.table().protocol().writer_features or ())
    query.write(1, pa.table({"id": [2], "v": [[None]]}, local))
    assert query.rows() == [(2, [None])]
    assert len(query.own_files()) == 1


def test_floating_point_keys_are_left_to_deltalake(tmp_path: Path) -> None:
    rows = pa.schema([("id", pa.float64()), ("v", pa.string())])
    table = make(tmp_path, {**ID, "type": "double"}, V)
    assert reasons(table, rows=rows) == [None, "has a key of floating-point numbers", None]


def row(number: int, text: str = "x") -> pa.Table:
    return pa.table({"id": [number], "v": [text]}, ROWS)


def test_a_check_constraint_is_still_enforced(tmp_path: Path) -> None:
    """Also if it is new when the files have been written."""
    query = RowQuery(tmp_path, ROWS, "append")
    query.write(0, row(1))
    stage, files = query.stage(1, row(-1))
    query.table().alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(TableRefusedError, match=r"TABLE_REFUSED\.DELTA"):
        query.commit(stage, files)
    with pytest.raises(TableRefusedError, match=r"TABLE_REFUSED\.DELTA"):
        query.write(1, row(-1))
    query.write(1, row(2))
    assert query.rows() == [(1, "x"), (2, "x")]
    assert len(query.own_files()) == 1


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_an_append_only_table_still_refuses_to_lose_rows(tmp_path: Path, mode: str) -> None:
    Path(tmp_path, "t").mkdir()
    schema = Schema.from_arrow(ROWS)
    DeltaTable.create(str(tmp_path / "t"), schema, configuration={"delta.appendOnly": "true"})
    RowQuery(tmp_path / "t", ROWS, "append").write(0, row(1), row(2))
    query = RowQuery(tmp_path / "t", ROWS, mode, ["id"], "other")
    with pytest.raises(TableRefusedError, match="append-only") as caught:
        query.write(0, row(1, "y"))
    assert caught.value.condition == "TABLE_REFUSED.DELTA"
    assert query.rows() == [(1, "x"), (2, "x")]


def test_a_partitioned_table_is_written_in_every_mode(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path), Schema.from_arrow(ROWS), partition_by=["v"])
    RowQuery(tmp_path, ROWS, "append").write(0, row(1, "a/b"), row(2, "ü %"))
    query = RowQuery(tmp_path, ROWS, "update", ["id"], "updating")
    query.write(0, row(2, "c"))
    assert query.rows() == [(1, "a/b"), (2, "c")]
    query = RowQuery(tmp_path, ROWS, "complete", app_id="completing")
    query.write(0, row(3, "d"))
    assert query.rows() == [(3, "d")]
    assert query.own_files() == []


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_a_table_partitioned_by_binary_values_is_refused(tmp_path: Path, mode: str) -> None:
    """deltalake reads the text that the log has for them, and would write that when it rewrites rows."""
    schema = ROWS.set(1, pa.field("v", pa.binary()))
    DeltaTable.create(str(tmp_path), Schema.from_arrow(schema), partition_by=["v"])
    wanted = DeltaLayout(schema, ("id",))
    other = delta_writer(DeltaLocation(str(tmp_path / "other")), wanted, mode, "at_least_once", "", None)
    location = DeltaLocation(str(tmp_path))
    with pytest.raises(TableRefusedError) as at_start:
        delta_writer(location, wanted, mode, "at_least_once", "", None)
    with pytest.raises(TableRefusedError) as recreated:
        replace(other, location=location)(MagicMock(), 0)
    with pytest.raises(TableRefusedError) as compacted:
        compact(location, 1 << 20)
    assert {each.value.condition for each in (at_start, recreated, compacted)} == {
        "TABLE_REFUSED.PARTITIONING"
    }


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_a_table_with_a_text_that_deltalake_takes_for_null_is_refused(tmp_path: Path, mode: str) -> None:
    DeltaTable.create(str(tmp_path), Schema.from_arrow(ROWS), partition_by=["v"])
    location = DeltaLocation(str(tmp_path))
    write_deltalake(location.path, row(1, "__HIVE_DEFAULT_PARTITION__"), mode="append")
    with pytest.raises(TableRefusedError) as at_start:
        delta_writer(location, DeltaLayout(ROWS, ("id",)), mode, "at_least_once", "", None)
    with pytest.raises(TableRefusedError) as compacted:
        compact(location, 1 << 20)
    assert at_start.value.condition == compacted.value.condition == "TABLE_REFUSED.PARTITION_VALUE"


def test_files_in_an_object_store_are_committed_in_every_mode() -> None:
    with object_store() as store:
        store.bucket("lake")
        location = DeltaLocation("s3://lake/t", object_settings(store.endpoint))
        RowQuery(location, ROWS, "append").write(0, row(1), row(2))
        query = RowQuery(location, ROWS, "update", ["id"], "updating")
        query.write(0, row(2, "long" * 100_000), row(3))
        query.write(0, row(2))
        assert [(number, len(text)) for number, text in query.rows()] == [(1, 1), (2, 400_000), (3, 1)]
        assert len(query.own_files()) == 3
        RowQuery(location, ROWS, "complete", app_id="completing").write(0, row(4))
        assert query.rows() == [(4, "x")]
