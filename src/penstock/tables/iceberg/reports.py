"""Reports of tasks to the driver about their data files, as JSON, so that the driver unpickles nothing."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from penstock.tables.iceberg.data_files import FileTarget

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def to_report(target: FileTarget, files: Sequence[DataFile]) -> bytes:
    """Return the report on files that a task has written."""
    return json.dumps([_to_json(target, file) for file in files]).encode()


def from_report(target: FileTarget, report: bytes) -> list[DataFile]:
    """Return the files in a report."""
    return [_from_json(target, described) for described in json.loads(report)]


def _to_json(target: FileTarget, file: DataFile) -> dict[str, Any]:
    types = _partition_types(target)
    values = [file.partition[position] for position in range(len(types))]
    return {
        "path": file.file_path,
        "size": file.file_size_in_bytes,
        "records": file.record_count,
        "splits": file.split_offsets,
        "partition": [
            None if value is None else _base64(to_bytes(kind, value))
            for kind, value in zip(types, values, strict=True)
        ],
        **{name: dict(_by_column(file, name)) for name in _COUNTS},
        **{name: {key: _base64(bound) for key, bound in _by_column(file, name).items()} for name in _BOUNDS},
    }


def _from_json(target: FileTarget, described: Mapping[str, Any]) -> DataFile:
    values = [
        None if value is None else from_bytes(kind, b64decode(value))
        for kind, value in zip(_partition_types(target), described["partition"], strict=True)
    ]
    statistics: dict[str, Any] = {
        **{name: {int(key): count for key, count in described[name].items()} for name in _COUNTS},
        **{name: {int(key): b64decode(bound) for key, bound in described[name].items()} for name in _BOUNDS},
    }
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=described["path"],
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=described["records"],
        file_size_in_bytes=described["size"],
        split_offsets=described["splits"],
        # The rows are unsorted, whatever sort order the table has.
        sort_order_id=None,
        spec_id=target.metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics,
    )


def _partition_types(target: FileTarget) -> list[PrimitiveType]:
    fields = target.metadata.spec().partition_type(target.metadata.schema()).fields
    return [field.field_type for field in fields if isinstance(field.field_type, PrimitiveType)]


def _by_column(file: DataFile, name: str) -> dict[str, Any]:
    return {str(key): value for key, value in (getattr(file, name) or {}).items()}


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
