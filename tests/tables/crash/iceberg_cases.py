"""A case whose sink is an Iceberg table, in each output mode."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.support.crash.queries import Row
from tests.tables.crash.cases import TABLES, TableCase

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from penstock import Pipeline, Stream


class IcebergCase(TableCase):
    """Its name is its table's too, in a catalog beside the store."""

    @property
    def properties(self) -> dict[str, str]:
        return {
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog {self.name}.db",
            "warehouse": f"file://{self.folder}/warehouse",
        }

    def write(self, stream: Stream) -> Pipeline:
        import penstock

        kind = TABLES[self.kind]
        properties = "&".join(f"property.{name}={value}" for name, value in self.properties.items())
        keys = () if kind.mode == "append" else kind.keys
        sink = penstock.TableSink(f"shop.{self.name}", keys, f"iceberg:lake?{properties}")
        return stream.write(sink, guarantee=self.guarantee, output_mode=kind.mode)

    @property
    def table(self) -> Table:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("lake", **self.properties).load_table(("shop", self.name))

    def rows(self) -> Counter[Row]:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            found = self.table.scan().to_arrow().to_pylist()
        except (NoSuchTableError, NoSuchNamespaceError):
            return Counter()
        return Counter(tuple(row.values()) for row in found)
