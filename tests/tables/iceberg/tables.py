"""Iceberg tables in a SQLite catalog, and queries that write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

import penstock
from penstock.tables.iceberg.attempts import _list_files
from tests.support.sql_tables import Feed


class IcebergTables:
    """A catalog of Iceberg tables, and a queue that feeds them."""

    def __init__(self, feed: Feed, folder: Path, properties: Mapping[str, str] | None = None) -> None:
        self.feed, self.folder = feed, folder
        folder.mkdir(exist_ok=True)
        self.properties = properties or {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.catalog = load_catalog("lake", **self.properties)

    @property
    def url(self) -> str:
        properties = {f"property.{name}": value for name, value in self.properties.items()}
        return f"iceberg:lake?{urlencode(properties, quote_via=quote)}"

    def sink(self, name: str, *keys: str, **more: Any) -> penstock.TableSink:
        return penstock.TableSink(f"shop.{name}", keys, self.url, **more)

    def table(self, name: str) -> Table:
        return self.catalog.load_table(("shop", name))

    def version(self, name: str) -> int:
        """The number of the last snapshot, of any branch."""
        return self.table(name).metadata.last_sequence_number

    def lines(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table(name).scan().to_arrow().to_pylist()
        return found

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        return sorted((tuple(row.values()) for row in self.lines(name)), key=repr)

    def staged(self, name: str) -> list[str]:
        return self.orphans(name)

    def files(self, name: str) -> list[DataFile]:
        """The data files of the current snapshot."""
        return [task.file for task in self.table(name).scan().plan_files()]

    def snapshots(self, name: str) -> int:
        return len(self.table(name).metadata.snapshots)

    def stored(self, name: str) -> list[str]:
        """The names of all files in the table's data folder."""
        data = Path(self.table(name).location().removeprefix("file://")) / "data"
        return sorted(path.name for path in data.rglob("*") if path.is_file())

    def listed(self, name: str) -> set[str]:
        """The locations of all files in the table's data folder, wherever that is."""
        table = self.table(name)
        return set(_list_files(table.io, table.location_provider().data_path))

    def ever(self, name: str) -> list[DataFile]:
        """The data files of all snapshots."""
        table = self.table(name)
        return [
            entry.data_file
            for snapshot in table.metadata.snapshots
            for manifest in snapshot.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        ]

    def orphans(self, name: str) -> list[str]:
        """The names of files in the data folder that no snapshot has ever had."""
        known = {file.file_path.rpartition("/")[2] for file in self.ever(name)}
        return [file for file in self.stored(name) if file not in known]
