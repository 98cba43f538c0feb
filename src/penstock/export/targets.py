"""The kinds of tables that a queue can be exported to, by URL. The library of a kind is loaded on use."""

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
    """Return where a table is."""
    if is_delta(url):
        return DeltaPlace.of(url, table)
    if is_iceberg(url):
        return IcebergPlace.of(url, table)
    raise InvalidUrlError(
        "a queue is exported to a folder of Delta tables, delta:///folder or delta:s3://bucket/folder, or to "
        "an Iceberg catalog, iceberg:CATALOG",
        condition="INVALID_URL.UNKNOWN_KIND",
    )


def location(place: Place) -> str:
    """Return a text that identifies the place."""
    if isinstance(place, DeltaPlace):
        return place.path
    return ".".join((place.catalog_name, *place.identifier))


def table_at(place: Place, queue: QueueId, file_bytes: int) -> ExportTable:
    """Return the table at a place, which need not exist yet. Its library must be installed."""
    name = "DeltaExportTable" if isinstance(place, DeltaPlace) else "IcebergExportTable"
    make: Callable[..., ExportTable] = _loaded(place, "table", name)
    return make(place, queue, file_bytes)


def exported_frame(spark: SparkSession, place: Place, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows that a version of the table has, in the types of a queue's rows."""
    frame: Callable[..., DataFrame] = _loaded(place, "frame", "exported_frame")
    return frame(spark, place, version, rows)


def _loaded(place: Place, what: str, name: str) -> Any:
    if isinstance(place, DeltaPlace):
        return load(f"penstock.export.delta_{what}", name, "a Delta table")
    return load(f"penstock.export.iceberg_{what}", name, "an Iceberg table")
