"""The kinds of tables to which a queue can be exported, by URL; their libraries are loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidUrlError
from penstock.export.table import ExportTable, QueueId
from penstock.extras import load
from penstock.lake.storage import DeltaPlace, is_delta
from penstock.tables.iceberg.place import IcebergPlace, is_iceberg

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Place = DeltaPlace | IcebergPlace


def place_of(url: str, table: str) -> Place:
    """Return the location of a table."""
    if is_delta(url):
        return DeltaPlace.of(url, table)
    if is_iceberg(url):
        return IcebergPlace.of(url, table)
    raise InvalidUrlError(
        "a queue can be exported to a folder of Delta tables, delta:///folder or delta:s3://bucket/folder, "
        "or to an Iceberg catalog, iceberg:CATALOG",
        condition="INVALID_URL.UNKNOWN_KIND",
    )


def location(place: Place) -> str:
    """Return a text that identifies the location."""
    if isinstance(place, DeltaPlace):
        return place.path
    return ".".join((place.catalog_name, *place.identifier))


def table_at(place: Place, queue: QueueId, file_bytes: int) -> ExportTable:
    """Return the table at a location, which need not exist yet. Its library must be installed."""
    name = "DeltaExportTable" if isinstance(place, DeltaPlace) else "IcebergExportTable"
    create: Callable[..., ExportTable] = _load_class(place, "table", name)
    return create(place, queue, file_bytes)


def exported_frame(spark: SparkSession, place: Place, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows of a version of the table, in the types of the queue."""
    read_frame: Callable[..., DataFrame] = _load_class(place, "frame", "exported_frame")
    return read_frame(spark, place, version, rows)


def _load_class(place: Place, module: str, name: str) -> Any:
    if isinstance(place, DeltaPlace):
        return load(f"penstock.export.delta_{module}", name, "a Delta table")
    return load(f"penstock.export.iceberg_{module}", name, "an Iceberg table")
