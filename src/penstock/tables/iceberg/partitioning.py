"""Partitioning of rows by the transforms of an Iceberg table's partition spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform, HourTransform, MonthTransform, Transform, YearTransform
from pyiceberg.types import IcebergType, PrimitiveType

from penstock.errors import TableRefusedError

_ROW = "_penstock_row"
_HOUR = pa.scalar(3_600_000_000, pa.int64())


def require_partitioning(table: str, metadata: TableMetadata) -> None:
    """Refuse a partition spec whose values cannot be computed."""
    schema, spec = metadata.schema(), metadata.spec()
    use_counts = Counter(part.source_id for part in spec.fields)
    for part in spec.fields:
        reason = _refusal(schema, part, use_counts[part.source_id])
        if reason:
            raise TableRefusedError(
                f"the Iceberg table {table} is partitioned by {reason}: partition it by columns, or by year, "
                "month, day or hour. For bucket and truncate, install pyiceberg-core",
                condition="TABLE_REFUSED.PARTITIONING",
                table=table,
            )


def _refusal(schema: Schema, part: PartitionField, uses: int) -> str | None:
    if part.source_id not in {field.field_id for field in schema.fields}:
        return "a field inside a column"
    if uses > 1:
        return "two transforms of one column, which pyiceberg does not write"
    kind = schema.find_field(part.source_id).field_type
    try:
        transform(part.transform, kind)(pa.nulls(0, schema_to_pyarrow(kind)))
    except Exception as error:  # Transforms need a library, and raise what it raises.
        return f"{part.transform}, which pyiceberg cannot compute ({type(error).__name__})"
    return None


def partition_rows(
    spec: PartitionSpec, schema: Schema, rows: pa.Table
) -> Iterator[tuple[PartitionKey, pa.Table]]:
    """Divide rows by their partition values."""
    columns = []
    for part in spec.fields:
        source = schema.find_field(part.source_id)
        columns.append(transform(part.transform, source.field_type)(rows[source.name]))
    names = [f"p{number}" for number in range(len(columns))]
    numbered = pa.table([*columns, np.arange(rows.num_rows)], names=[*names, _ROW])
    groups = numbered.group_by(names).aggregate([(_ROW, "list")])
    for group in groups.to_batches(1):
        (values,) = group.select(names).to_pylist()
        fields = [
            PartitionFieldValue(field=part, value=values[name])
            for part, name in zip(spec.fields, names, strict=True)
        ]
        for field in fields:
            _require_storable(schema, field)
        yield PartitionKey(fields, spec, schema), rows.take(group.column(f"{_ROW}_list").flatten())


def _require_storable(schema: Schema, partition_value: PartitionFieldValue) -> None:
    """Raise an error if manifests cannot store a value, as truncating a decimal may add a digit."""
    kind = partition_value.field.transform.result_type(
        schema.find_field(partition_value.field.source_id).field_type
    )
    if partition_value.value is not None and isinstance(kind, PrimitiveType):
        to_bytes(kind, partition_value.value)


def transform(
    partition_transform: Transform[object, object], kind: IcebergType
) -> Callable[[pa.ChunkedArray], pa.ChunkedArray]:
    """Return a function that transforms a column; pyiceberg's own functions need another library."""
    if isinstance(partition_transform, YearTransform):
        return lambda values: pc.subtract(_year(values), pa.scalar(1970, pa.int32()))
    if isinstance(partition_transform, MonthTransform):
        return _month
    if isinstance(partition_transform, DayTransform):
        return _day
    if isinstance(partition_transform, HourTransform):
        return _hour
    compute: Callable[[pa.ChunkedArray], pa.ChunkedArray] = partition_transform.pyarrow_transform(kind)
    return compute


def _year(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.year(values).cast(pa.int32())


def _month(values: pa.ChunkedArray) -> pa.ChunkedArray:
    years = pc.subtract(_year(values), pa.scalar(1970, pa.int32()))
    months = pc.add(pc.multiply(years, pa.scalar(12, pa.int32())), pc.month(values).cast(pa.int32()))
    return pc.subtract(months, pa.scalar(1, pa.int32()))


def _day(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if pat.is_timestamp(values.type):
        values = pc.floor_temporal(values, unit="day").cast(pa.date32())
    return values.cast(pa.int32())


def _hour(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(pc.floor_temporal(values, unit="hour").cast(pa.int64()), _HOUR).cast(pa.int32())
