"""A case whose sink is a SQL table, in each output mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.crash.cases import Case
from tests.support.crash.queries import (
    CHUNK_ROWS,
    KINDS,
    PARTITIONS,
    SOURCE,
    START,
    WINDOW,
    QueryKind,
    Row,
    chunk,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock import Pipeline, Stream

CHUNKS = 2


@dataclass(frozen=True)
class TableQuery:
    """A query with the output mode and the keys of its table."""

    query: QueryKind
    mode: str
    keys: tuple[str, ...] = ()
    changes: bool = False
    """Whether its rows are change rows."""
    scd_type: int = 1


def _totals(frames: Sequence[DataFrame]) -> DataFrame:
    """Some keys come with each chunk, and some with one of them alone."""
    keyed = frames[0].selectExpr(f"k + 10 * cast(id / {CHUNK_ROWS // 2} as bigint) * (k % 2) as k", "id")
    return keyed.groupBy("k").agg({"*": "count", "id": "sum"}).toDF("k", "n", "total")


def _totals_rows(chunks: int) -> Counter[Row]:
    found: dict[int, list[int]] = {}
    for row in (row for n in range(chunks) for row in chunk(n)):
        key = row["k"] + 10 * (row["id"] // (CHUNK_ROWS // 2)) * (row["k"] % 2)
        found.setdefault(key, []).append(row["id"])
    return Counter((k, len(ids), sum(ids)) for k, ids in found.items())


def _windows(frames: Sequence[DataFrame]) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    counted = (
        frames[0]
        .withWatermark("ts", "0 seconds")
        .groupBy(F.window("ts", f"{WINDOW} seconds").alias("w"), "k")
        .agg(F.count("*").alias("n"), F.sum("id").alias("total"))
    )
    return counted.select(F.unix_timestamp("w.start").alias("start"), "k", "n", "total")


def _all_windows(chunks: int) -> Counter[Row]:
    found: dict[tuple[int, int], list[int]] = {}
    for n in range(chunks):
        start = int(START.timestamp()) + n * 3 * WINDOW
        for row in chunk(n):
            found.setdefault((start, row["k"]), []).append(row["id"])
    return Counter((start, k, len(ids), sum(ids)) for (start, k), ids in found.items())


def _closed_windows(chunks: int) -> Counter[Row]:
    last = int(START.timestamp()) + (chunks - 1) * 3 * WINDOW
    return Counter({row: count for row, count in _all_windows(chunks).items() if row[0] < last})


def _changes(frames: Sequence[DataFrame]) -> DataFrame:
    """Several changes of each key in each chunk, those of odd keys in the order of their ids backwards."""
    return frames[0].selectExpr(
        "id % 7 as k",
        "id as v",
        "case when id % 11 < 4 then 'delete' when id < 7 then 'insert' else 'update_postimage' end as "
        "_change_type",
        "case when id % 7 % 2 = 1 then -id else id end as _commit_version",
    )


def _change_rows(chunks: int) -> Counter[Row]:
    last: dict[int, int] = {}
    for row in (row for n in range(chunks) for row in chunk(n)):
        k = row["id"] % 7
        last[k] = row["id"] if k % 2 == 0 else last.get(k, row["id"])
    return Counter((k, v) for k, v in last.items() if v % 11 >= 4)


def _versions(chunks: int) -> Counter[Row]:
    """Each change ends the one before it, whatever chunk that came with."""
    found: Counter[Row] = Counter()
    for k in range(7):
        ids = [row["id"] for n in range(chunks) for row in chunk(n) if row["id"] % 7 == k]
        begins = sorted((-i if k % 2 else i, i) for i in ids)
        ends = [*(begin for begin, _ in begins), None][1:]
        found.update((k, i, begin, end) for (begin, i), end in zip(begins, ends, strict=True) if i % 11 >= 4)
    return found


_TOTALS = QueryKind("totals", _totals, SOURCE, _totals_rows)
TABLES = {
    "append": TableQuery(KINDS["stateless"], "append"),
    "append windows": TableQuery(
        QueryKind("windows", _windows, SOURCE, _closed_windows, no_data=True), "append", ("start", "k")
    ),
    "update": TableQuery(_TOTALS, "update", ("k",)),
    "update windows": TableQuery(
        QueryKind("windows", _windows, SOURCE, _all_windows, no_data=True), "update", ("start", "k")
    ),
    "changes": TableQuery(
        QueryKind("changes", _changes, SOURCE, _change_rows, stateful=False), "append", ("k",), changes=True
    ),
    "history": TableQuery(
        QueryKind("history", _changes, SOURCE, _versions, stateful=False),
        "append",
        ("k",),
        changes=True,
        scd_type=2,
    ),
    "complete": TableQuery(_TOTALS, "complete", ("k",)),
    "complete without keys": TableQuery(_TOTALS, "complete"),
}


class TableCase(Case):
    """Its name is its table's too, which the connection's search path leads to."""

    @property
    def query(self) -> QueryKind:
        return TABLES[self.kind].query

    def create(self) -> None:
        source, sink = self.stores()
        consumer = source.create_consumer(self.name)
        for queue in self.sources:
            source.create_queue(queue, SOURCE, partitions=PARTITIONS)
            consumer.register(queue, vital=True)
        Path(self.marker).parent.mkdir(exist_ok=True, parents=True)
        self._close(source, sink)

    def write(self, stream: Stream) -> Pipeline:
        import penstock

        table = TABLES[self.kind]
        more = {"apply_changes": table.changes, "scd_type": table.scd_type}
        sink = penstock.TableSink(self.name, table.keys, self.target, **more)
        return stream.write(sink, guarantee=self.guarantee, output_mode=table.mode)

    def rows(self) -> Counter[Row]:
        source, sink = self.stores()
        # A transaction of the store does not look for names on the connection's search path.
        schema = sink.database.url.options.get("schema", "main")
        with sink.database.transaction(write=False) as tx:
            if tx.dialect == "sqlite":
                there = tx.query("select count(*) from main.sqlite_schema where name = :name", name=self.name)
            else:
                there = tx.query(
                    "select count(*) from pg_tables where schemaname = :schema and tablename = :name",
                    schema=schema,
                    name=self.name,
                )
            found = tx.query(f'select * from "{schema}"."{self.name}"') if there[0][0] else []
        self._close(source, sink)
        return Counter(found)

    def beyond(self, chunks: int) -> Counter[Row]:
        """Nothing, where the table is as it has to be after some of the chunks; else what it is."""
        found = self.rows()
        states = [self.query.expected(upto) for upto in range(chunks + 1)]
        return Counter() if found in [Counter(), *states] else found or Counter({("empty",): 1})
