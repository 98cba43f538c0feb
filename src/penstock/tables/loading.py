"""Rows into a temporary relation, where a statement can read them, in the transaction that puts them into the table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.csv as pacsv

from penstock.errors import PenstockError, TableRefused
from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.stages import Source
from penstock.tables.unchanged import UNKNOWN

_CSV = pacsv.WriteOptions(include_header=False)
_NO_TEXT = ("22021", "22P05")


def defined(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a relation for rows that are ready for the database; SQLite keeps values as they are in columns without a type."""
    if layout.dialect == "sqlite":
        return tuple(names)
    columns = [f"c{n} {column.sql_type}" for n, column in enumerate(layout.columns)]
    if layout.sequence is not None:
        columns += [f"sequence {layout.sequence.declared}", "present integer"]
    columns += [f"t{n} {tie.declared}" for n, tie in enumerate(layout.ties)]
    if layout.unchanged is not None:
        columns += [f"{UNKNOWN} text"]
    return tuple(columns)


def load(tx: Transaction, columns: Sequence[str], chunks: Iterable[pa.RecordBatch]) -> Source:
    """The rows as SQL reads them; for the caller to clear.

    Parameters
    ----------
    columns
        As ``defined`` gives them.
    """
    relation = _made(tx, columns)
    for chunk in chunks:
        _add(tx, relation, chunk)
    return Source(relation)


def clear(tx: Transaction, columns: Sequence[str]) -> None:
    """Take rows away that were loaded; PostgreSQL does so itself when the transaction ends."""
    if tx.dialect == "sqlite":
        tx.execute(f"drop table if exists {_relation(tx, columns)}")


def _relation(tx: Transaction, columns: Sequence[str]) -> str:
    digest = hashlib.sha256(", ".join(columns).encode()).hexdigest()[:32]
    return f"{'temp' if tx.dialect == 'sqlite' else 'pg_temp'}.penstock_rows_{digest}"


def _made(tx: Transaction, columns: Sequence[str]) -> str:
    """An empty relation; PostgreSQL keeps it for the connection's next one, since its catalog swells with each that is made."""
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
    """Rows as PostgreSQL's COPY takes them."""
    sink = pa.BufferOutputStream()
    pacsv.write_csv(chunk, sink, _CSV)
    return memoryview(sink.getvalue())


@contextmanager
def nul_refused() -> Iterator[None]:
    """Text that PostgreSQL cannot keep is an error that says so."""
    try:
        yield
    except PenstockError as error:
        if getattr(error.__cause__, "sqlstate", None) not in _NO_TEXT:
            raise
        raise TableRefused(
            "a text has the character NUL, which PostgreSQL cannot keep: take it out, as translate(column, chr(0), '') does",
            condition="TABLE_REFUSED.NUL_CHARACTER",
        ) from error
