"""The kinds of tables to which a queue can be exported, by URL; their libraries are loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidUrlError
from penstock.export.table import ExportTable, QueueId
from penstock.extras import load
from penstock.lake.storage import DeltaLocation, is_delta
from penstock.tables.iceberg.location import IcebergLocation, is_iceberg

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

TableLocation = DeltaLocation | IcebergLocation


def location_of(url: str, table: str) -> TableLocation:
    """Return the location of a table."""
    if is_delta(url):
        return DeltaLocation.of(url, table)
    if is_iceberg(url):
        return IcebergLocation.of(url, table)
    raise InvalidUrlError(
        "a queue can be exported to a folder of Delta tables, delta:///folder or delta:s3://bucket/folder, "
        "or to an Iceberg catalog, iceberg:CATALOG",
        condition="INVALID_URL.UNKNOWN_KIND",
    )


def location_text(location: TableLocation) -> str:
    """Return a text that identifies the location."""
    if isinstance(location, DeltaLocation):
        return location.path
    return ".".join((location.catalog_name, *location.identifier))


def table_at(location: TableLocation, queue: QueueId, file_bytes: int) -> ExportTable:
    """Return the table at a location, which need not exist yet. Its library must be installed."""
    name = "DeltaExportTable" if isinstance(location, DeltaLocation) else "IcebergExportTable"
    create: Callable[..., ExportTable] = _load_class(location, "table", name)
    return create(location, queue, file_bytes)


def exported_frame(spark: SparkSession, location: TableLocation, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows of a version of the table, in the types of the queue."""
    read_frame: Callable[..., DataFrame] = _load_class(location, "frame", "exported_frame")
    return read_frame(spark, location, version, rows)


def _load_class(location: TableLocation, module: str, name: str) -> Any:
    if isinstance(location, DeltaLocation):
        return load(f"penstock.export.delta_{module}", name, "a Delta table")
    return load(f"penstock.export.iceberg_{module}", name, "an Iceberg table")
