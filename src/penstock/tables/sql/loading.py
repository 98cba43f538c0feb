"""Loading of rows into a temporary relation, from which SQL statements of the same transaction read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv as pacsv

from penstock.errors import PenstockError, TableRefusedError
from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.unchanged_values import UNKNOWN

_CSV = pacsv.WriteOptions(include_header=False)
_NUL_CHARACTER = ("22021", "22P05")


@dataclass(frozen=True)
class StagedRows:
    """Staged rows as SQL reads them, in the columns c0, c1 and so on."""

    relation: str
    where: str = "true"
    rows: int | None = None
    """How many there must be; None where they were counted before."""


def relation_columns(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """Return the column definitions of a relation for encoded rows; SQLite keeps values as they are without a
    type.
    """
    if layout.dialect == "sqlite":
        return tuple(names)
    columns = [f"c{n} {column.sql_type}" for n, column in enumerate(layout.columns)]
    if layout.sequence is not None:
        columns += [f"sequence {layout.sequence.declared}", "present integer"]
    columns += [f"t{n} {tie.declared}" for n, tie in enumerate(layout.ties)]
    if layout.unchanged is not None:
        columns += [f"{UNKNOWN} text"]
    return tuple(columns)


def load(tx: Transaction, columns: Sequence[str], chunks: Iterable[pa.RecordBatch]) -> StagedRows:
    """Load chunks into a temporary relation with some `relation_columns`; the caller clears it."""
    relation = _empty_relation(tx, columns)
    for chunk in chunks:
        _add(tx, relation, chunk)
    return StagedRows(relation)


def clear(tx: Transaction, columns: Sequence[str]) -> None:
    """Remove rows that were loaded; PostgreSQL does so itself when the transaction ends."""
    if tx.dialect == "sqlite":
        tx.execute(f"drop table if exists {_relation(tx, columns)}")


def _relation(tx: Transaction, columns: Sequence[str]) -> str:
    digest = hashlib.sha256(", ".join(columns).encode()).hexdigest()[:32]
    return f"{'temp' if tx.dialect == 'sqlite' else 'pg_temp'}.penstock_rows_{digest}"


def _empty_relation(tx: Transaction, columns: Sequence[str]) -> str:
    """Create the relation; PostgreSQL reuses the connection's, since each new one bloats its catalog."""
    relation = _relation(tx, columns)
    name = relation.partition(".")[2]
    if tx.dialect == "sqlite":
        clear(tx, columns)
        tx.execute(f"create temporary table {name} ({', '.join(columns)})")
    elif not tx.query("select to_regclass(:relation) is not null", relation=relation)[0][0]:
        tx.execute(f"create temporary table {name} ({', '.join(columns)}) on commit delete rows")
    return relation


def _add(tx: Transaction, relation: str, chunk: pa.RecordBatch) -> None:
    names = ", ".join(chunk.schema.names)
    if tx.dialect == "postgres":
        tx.load(f"copy {relation} ({names}) from stdin (format csv)", [as_csv(chunk)])
    else:
        values = ", ".join("?" * chunk.num_columns)
        rows = zip(*(column.to_pylist() for column in chunk.columns), strict=True)
        tx.load(f"insert into {relation} values ({values})", rows)


def as_csv(chunk: pa.RecordBatch) -> memoryview:
    """Write rows as the CSV of PostgreSQL's COPY."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(chunk, sink, _CSV)
    return memoryview(sink.getvalue())


@contextmanager
def refusing_nul_characters() -> Iterator[None]:
    """Raise a clear error for text that PostgreSQL cannot store."""
    try:
        yield
    except PenstockError as error:
        if getattr(error.__cause__, "sqlstate", None) not in _NUL_CHARACTER:
            raise
        raise TableRefusedError(
            "a text has the character NUL, which PostgreSQL cannot store: remove it, as translate(column, "
            "chr(0), '') does",
            condition="TABLE_REFUSED.NUL_CHARACTER",
        ) from error
