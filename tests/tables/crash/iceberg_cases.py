"""A case whose sink is an Iceberg table, in each output mode and with changes.

Some tables have rows before, of which each chunk changes a few, and their owner has chosen `merge-on-read`:
so these rows are deleted by position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.support.crash.chains import at_length
from tests.support.crash.children import Fault
from tests.support.crash.queries import SOURCE, QueryKind, Row, chunk
from tests.tables.crash.cases import CHUNKS, TABLES, TableCase, TableQuery

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame

    from penstock import Pipeline, Stream

STORED, EVERY, DELETED = 60, 20, 80
"""How many rows a table has before, which part of each chunk has keys of them, and a row that deletes one."""


def _few(frames: Sequence[DataFrame]) -> DataFrame:
    return frames[0].selectExpr(
        f"case when id % {EVERY} = 0 then -(id % {STORED}) - 1 else id end as k",
        "id as v",
        f"case when id = {DELETED} then 'delete' else 'insert' end as _change_type",
        "id as _commit_version",
    )


def _few_totals(frames: Sequence[DataFrame]) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    return _few(frames).groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def _ids(chunks: int) -> dict[int, list[int]]:
    """The rows of each key, and none of those that are only stored."""
    found: dict[int, list[int]] = {-number - 1: [] for number in range(STORED)}
    for i in (row["id"] for n in range(chunks) for row in chunk(n)):
        found.setdefault(i if i % EVERY else -(i % STORED) - 1, []).append(i)
    return found


def _few_total_rows(chunks: int) -> Counter[Row]:
    return Counter((k, len(ids), sum(ids)) for k, ids in _ids(chunks).items())


def _few_latest(chunks: int) -> Counter[Row]:
    last = {k: max(ids, default=-1) for k, ids in _ids(chunks).items()}
    return Counter((k, v) for k, v in last.items() if v != DELETED)


def _few_versions(chunks: int) -> Counter[Row]:
    return Counter(
        (k, begins, begins, ends)
        for k, ids in _ids(chunks).items()
        for begins, ends in pairwise([*([-1] if k < 0 else []), *ids, None])
        if begins != DELETED
    )


def _changes(name: str, expected: Any, scd_type: int) -> TableQuery:
    query = QueryKind(name, _few, SOURCE, expected, stateful=False)
    return TableQuery(query, "append", ("k",), changes=True, scd_type=scd_type)


BY_POSITION = {
    "few updates": TableQuery(QueryKind("few", _few_totals, SOURCE, _few_total_rows), "update", ("k",)),
    "few changes": _changes("few changes", _few_latest, 1),
    "few versions": _changes("few versions", _few_versions, 2),
}
ICEBERG_TABLES = TABLES | BY_POSITION


class IcebergCase(TableCase):
    """Its name is its table's too, in a catalog beside the store."""

    @property
    def query(self) -> QueryKind:
        return ICEBERG_TABLES[self.kind].query

    def create(self) -> None:
        super().create()
        if self.kind in BY_POSITION:
            self._fill()

    def _fill(self) -> None:
        """Have the table there before its query, with rows."""
        import pyarrow as pa

        columns = {
            "few updates": ("k", "n", "total"),
            "few changes": ("k", "v"),
            "few versions": ("k", "v", "_valid_from", "_valid_to"),
        }
        schema = pa.schema([(name, pa.int64()) for name in columns[self.kind]])
        rows = [dict(zip(schema.names, row, strict=True)) for row in self.query.expected(0)]
        self.catalog.create_namespace("shop")
        table = self.catalog.create_table(
            ("shop", self.name), schema, properties={"write.merge.mode": "merge-on-read"}
        )
        table.append(pa.Table.from_pylist(rows, schema))

    @property
    def properties(self) -> dict[str, str]:
        return {
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog {self.name}.db",
            "warehouse": f"file://{self.folder}/warehouse",
        }

    def write(self, stream: Stream) -> Pipeline:
        import penstock

        kind = ICEBERG_TABLES[self.kind]
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
    def catalog(self) -> Catalog:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("lake", **self.properties)

    @property
    def table(self) -> Table:
        return self.catalog.load_table(("shop", self.name))

    def deleted_by_position(self) -> int:
        """How many rows its snapshots have deleted by position."""
        summaries = [snapshot.summary for snapshot in self.table.snapshots()]
        return sum(int(each["added-position-deletes"] or 0) for each in summaries if each is not None)

    def rows(self) -> Counter[Row]:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            found = self.table.scan().to_arrow().to_pylist()
        except (NoSuchTableError, NoSuchNamespaceError):
            return Counter()
        return Counter(tuple(row.values()) for row in found)


def every_state(case: IcebergCase) -> list[Fault]:
    """Every state of each micro-batch. Changes, and updates with rows, have one more, between the files that
    are written and the commit, and where rows are deleted by position, more in their tasks.
    """
    plan, table = [], ICEBERG_TABLES[case.kind]
    for fault in at_length(case):
        rewrites = table.changes or (table.mode == "update" and fault.batch < CHUNKS)
        if fault.state == "COMMITTED" and case.kind in BY_POSITION:
            names = ["EDITED", *(["MOVED"] if table.scd_type == 2 else [])]
            plan += [Fault(name, fault.batch) for name in names]
        if fault.state == "COMMITTED" and rewrites:
            plan.append(Fault("REWRITTEN", fault.batch))
        if fault.state != "HALF":
            plan.append(fault)
    return plan
