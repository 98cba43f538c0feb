"""A case whose sink is an Iceberg table, in each output mode and with changes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.support.crash.chains import at_length
from tests.support.crash.children import Fault
from tests.support.crash.queries import Row
from tests.tables.crash.cases import CHUNKS, TABLES, TableCase

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
        sink = penstock.TableSink(
            f"shop.{self.name}",
            () if kind.mode == "append" and not kind.changes else kind.keys,
            f"iceberg:lake?{properties}",
            apply_changes=kind.changes,
            scd_type=kind.scd_type,
        )
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


def every_state(case: IcebergCase) -> list[Fault]:
    """Every state of each micro-batch. Changes, and updates with rows, have one more, between the files that
    are written and the commit.
    """
    plan, table = [], TABLES[case.kind]
    for fault in at_length(case):
        rewrites = table.changes or (table.mode == "update" and fault.batch < CHUNKS)
        if fault.state == "COMMITTED" and rewrites:
            plan.append(Fault("REWRITTEN", fault.batch))
        if fault.state != "HALF":
            plan.append(fault)
    return plan
