"""Places for the tables of exports, and the tables as others read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlencode

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError


class Lake(ABC):
    url: str

    def named(self, name: str) -> str:
        """The name of a table as an export takes it."""
        return name

    @abstractmethod
    def rows(self, name: str, version: int | None = None) -> pa.Table:
        """All rows of a version of a table, by default the current one."""

    @abstractmethod
    def files(self, name: str) -> int:
        """The number of its data files."""

    @abstractmethod
    def count(self, name: str) -> int:
        """The number of its rows, 0 if it does not exist."""

    @abstractmethod
    def drop_column(self, name: str, column: str) -> None:
        """Drop a column of a table, as another program does."""

    def numbers(self, name: str) -> list[int]:
        found: list[int] = self.rows(name)["n"].to_pylist()
        return sorted(found)


class DeltaLake(Lake):
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "lake"
        self.url = f"delta://{self.folder}"

    def rows(self, name: str, version: int | None = None) -> pa.Table:
        return DeltaTable(str(self.folder / name), version=version).to_pyarrow_table()

    def files(self, name: str) -> int:
        return len(DeltaTable(str(self.folder / name)).file_uris())

    def count(self, name: str) -> int:
        if not DeltaTable.is_deltatable(str(self.folder / name)):
            return 0
        actions = pa.table(DeltaTable(str(self.folder / name)).get_add_actions())
        return int(sum(actions["num_records"].to_pylist()))

    def drop_column(self, name: str, column: str) -> None:
        rows = self.rows(name).drop_columns([column])
        write_deltalake(str(self.folder / name), rows, mode="overwrite", schema_mode="overwrite")


class IcebergLake(Lake):
    def __init__(self, folder: Path) -> None:
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.catalog = SqlCatalog("lake", **properties)
        named = {f"property.{name}": value for name, value in properties.items()}
        self.url = f"iceberg:lake?{urlencode(named, quote_via=quote)}"

    def named(self, name: str) -> str:
        return f"shop.{name}"

    def rows(self, name: str, version: int | None = None) -> pa.Table:
        return self.catalog.load_table(("shop", name)).scan(snapshot_id=version).to_arrow()

    def files(self, name: str) -> int:
        return len(list(self.catalog.load_table(("shop", name)).scan().plan_files()))

    def count(self, name: str) -> int:
        try:
            snapshot = self.catalog.load_table(("shop", name)).current_snapshot()
        except NoSuchTableError:
            return 0
        summary = None if snapshot is None else snapshot.summary
        return int(summary["total-records"] or 0) if summary is not None else 0

    def drop_column(self, name: str, column: str) -> None:
        with self.catalog.load_table(("shop", name)).update_schema() as update:
            update.delete_column(column)


LAKES: dict[str, Callable[[Path], Lake]] = {"delta": DeltaLake, "iceberg": IcebergLake}
