"""What tasks report of their data files is what the driver commits."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import DayTransform, IdentityTransform

from penstock.tables.iceberg.data_files import FileTarget, cast_to_file_schema, write_data_files
from penstock.tables.iceberg.reports import from_report, to_report

SCHEMA = pa.schema(
    [
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("name", pa.string()),
        ("price", pa.decimal128(20, 3)),
        ("flag", pa.bool_()),
        ("blob", pa.binary()),
        ("number", pa.int64()),
    ]
)
ROWS = [
    {
        "day": date(1969, 12, 31),
        "at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "name": "ä\0'",
        "price": Decimal("-1.500"),
        "flag": True,
        "blob": b"\xff\0",
        "number": -1,
    },
    dict.fromkeys(SCHEMA.names),
]


_NAMES = (
    "content", "file_path", "file_format", "partition", "record_count", "file_size_in_bytes", "column_sizes",
    "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds", "split_offsets",
    "sort_order_id", "equality_ids", "key_metadata",
)  # fmt: skip


def _fields(file: DataFile) -> dict[str, object]:
    return {name: getattr(file, name) for name in _NAMES}


def test_files_are_the_same_after_a_report(tmp_path: Path) -> None:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("shop")
    plain = catalog.create_table("shop.plain", SCHEMA)
    identities = [
        PartitionField(field.field_id, 1000 + field.field_id, IdentityTransform(), f"p_{field.name}")
        for field in plain.schema().fields
        if field.name != "at"
    ]
    at = plain.schema().find_field("at").field_id
    spec = PartitionSpec(*identities, PartitionField(at, 2000, DayTransform(), "p_at"))
    parted = catalog.create_table("shop.parted", plain.schema(), partition_spec=spec)
    for table in (plain, parted):
        target = FileTarget.of("shop", table.io, table.metadata, "token")
        rows = pa.Table.from_pylist(ROWS, SCHEMA)
        files = write_data_files(target, [cast_to_file_schema(target, rows.columns)])
        again = from_report(target, to_report(target, files))
        assert [_fields(file) for file in again] == [_fields(file) for file in files]
        assert len(files) == (1 if table is plain else 2)
