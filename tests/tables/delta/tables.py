"""Delta tables, and queries that write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltalake import DeltaTable

import penstock
from tests.support.sql_tables import Feed


class DeltaTables:
    """A folder of Delta tables, and a queue that feeds them."""

    def __init__(self, feed: Feed, folder: Path) -> None:
        self.feed, self.folder = feed, folder
        self.url = f"delta://{folder}"

    def sink(self, name: str, *keys: str, **more: Any) -> penstock.TableSink:
        return penstock.TableSink(name, keys, self.url, **more)

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(str(self.folder / name))

    def version(self, name: str) -> int:
        return self.table(name).version()

    def lines(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table(name).to_pyarrow_table().to_pylist()
        return found

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        return sorted((tuple(row.values()) for row in self.lines(name)), key=repr)

    def staged(self, name: str) -> list[str]:
        return [path.name for path in (self.folder / name / "_penstock").glob("*.parquet")]
