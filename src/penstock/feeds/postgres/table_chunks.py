"""Chunks of a table in key order, each read in one transaction with its snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.feeds.postgres.catalog import Table, Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.key_order import Key, KeyOrder
from penstock.feeds.postgres.pgoutput import Column, Decoder, Integers, Mask, Truncation
from penstock.feeds.postgres.row_messages import qualified, row_messages, source_of
from penstock.feeds.postgres.rows import RowReader
from penstock.feeds.postgres.schema_changes import can_represent
from penstock.feeds.postgres.server import Connection, Server, first_chunk, run

_HALF = 2**31


@dataclass(frozen=True)
class Visible:
    """The transactions that are visible in a snapshot of the database: PostgreSQL's ``pg_snapshot``."""

    oldest: int
    """All earlier transactions had ended."""
    next: int
    """This transaction and later ones had not begun."""
    running: tuple[int, ...]
    """The transactions in between that were still running."""

    def shows(self, transactions: Integers) -> Mask:
        """Return the mask of the transactions that are visible, given that all of them have committed.

        Parameters
        ----------
        transactions
            The lower 32 bits of the transaction ids, as in the log; all are within 2³¹ of ``oldest``.
        """
        low = np.int64(self.oldest & 0xFFFFFFFF)
        distance = (transactions - low + _HALF) % (2 * _HALF) - _HALF
        ids = self.oldest + distance
        found: Mask = (ids < self.next) & ~np.isin(ids, np.array(self.running, np.int64))
        return found


@dataclass(frozen=True)
class Chunk:
    """The rows of a table between two keys."""

    table: Table
    """The table as it was read."""
    rows: pa.RecordBatch | None
    """The rows as inserts in key order, followed by the rows of the gaps; None if there are none."""
    keys: Sequence[pa.StringArray]
    """The keys of the rows as text, one array for each key column."""
    count: int
    """The number of rows without those of the gaps."""
    last: Key | None
    """The key of the last of these rows; None if there are none."""
    more: bool
    """Whether the table may have rows after ``last``."""
    gaps: Sequence[Key]
    """Keys that were read in addition; a key may have no row."""
    visible: Visible
    """The transactions that were visible to the read."""
    position: int
    """A log position after the commits of all visible transactions."""
    timestamp: int
    """The time of the read on the server's clock, in microseconds since 1970."""


class TableChanged(Exception):
    """The definition of a table differs from the planned one."""


def require_backfills(server: Server, publication: str) -> None:
    """Refuse a server or a publication with which tables cannot be backfilled.

    Raises
    ------
    FeedUnavailableError
    """
    (now,) = server.fetch("transaction")
    if not now.timeline:
        raise server.unavailable(
            "BACKFILL_ON_STANDBY",
            "the server is a standby, which does not report running transactions: read from the primary, or "
            "start the pump with schema_changes='ignore' (--schema-changes ignore)",
        )
    rows = server.fetch("publication", publication=publication)
    if rows and not rows[0].all_changes:
        raise server.unavailable(
            "PARTLY_PUBLISHED",
            f"the publication {publication!r} does not publish inserts, updates and deletes, so a table "
            "cannot be backfilled while it changes: alter publication … set (publish = 'insert, update, "
            "delete'), or start the pump with schema_changes='ignore' (--schema-changes ignore)",
            publication=publication,
        )


def visible_now(connection: Connection) -> tuple[Visible, int]:
    """Return the visible transactions, and the server's time in microseconds since 1970."""
    (row,) = run(connection, "visible")
    return Visible(row.oldest, row.next, tuple(row.running)), row.timestamp


def read_chunk(
    feed: OpenPostgresFeed,
    connection: Connection,
    tables: Tables,
    order: KeyOrder,
    after: Key | None,
    gaps: Sequence[Key],
    limit: int,
) -> Chunk:
    """Read the rows after a key, up to ``limit`` rows or a few megabytes, and the rows of gaps.

    Parameters
    ----------
    feed
        The open feed, for checks in other sessions.
    connection
        A connection without an open transaction.
    tables
        The table to read, as the only table.
    gaps
        Keys of rows to read in addition.

    Raises
    ------
    TableChanged
        When the table was altered; the log has the change.
    """
    (table,) = tables.tables
    feed.snapshots.require_trusted_functions([table])
    psycopg = feed.server.psycopg
    with feed.server.translating():
        try:
            with connection.transaction():
                run(connection, "read_chunk")
                # Lock the table before taking the snapshot: a table that is rewritten later looks empty in
                # it.
                connection.execute(f"LOCK TABLE {source_of(table)} IN ACCESS SHARE MODE".encode())
                visible, timestamp = visible_now(connection)
                filtered = _filter(connection, feed.settings.publication, table)
                missing = _missing_columns(connection, tables)
                clauses = order.clauses(connection, after, filtered, limit)
                messages, more = first_chunk(connection, row_messages(table, clauses, without=missing))
                count = len(messages)
                if gaps:
                    clauses = order.clauses_of(connection, gaps, filtered)
                    cursor = connection.cursor(row_factory=psycopg.rows.tuple_row)
                    query = row_messages(table, clauses, without=missing)
                    cursor.execute(query.encode(), binary=True)
                    messages += [message for (message,) in cursor]
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise TableChanged from error
        (mark,) = run(connection, "mark")
    position = int(mark.position)
    rows, keys = _decoded(feed, tables, messages, position, timestamp)
    more = more or count == limit
    last = tuple(texts[count - 1].as_py() for texts in keys) if count else None
    return Chunk(table, rows, keys, count, last, more, gaps, visible, position, timestamp)


def _filter(connection: Connection, publication: str, table: Table) -> str | None:
    """Return the row filter of a table; raise if the filter changed, or another table has its name."""
    oid, partitioned = table.relation.oid, table.partitioned
    (held,) = run(connection, "is_table", name=qualified(table), oid=oid, partitioned=partitioned)
    filters = [row.rowfilter for row in run(connection, "row_filter", publication=publication, oid=oid)]
    if not held.same or filters != [table.filter]:
        raise TableChanged
    (found,) = filters
    return None if found is None else str(found)


def _missing_columns(connection: Connection, tables: Tables) -> list[str]:
    """Return the planned columns that a table no longer has; raise if a column has another type."""
    (table,) = tables.tables
    now = {row.name: row for row in run(connection, "current_columns", oid=table.relation.oid)}
    missing = [name for name in table.relation.names if name not in now]
    if set(missing) & set(table.key):
        raise TableChanged
    for name, planned in zip(table.relation.names, table.bases, strict=True):
        current = now.get(name)
        if current is None:
            continue
        if not can_represent(planned, tables.base(Column(name, current.type, current.modifier))):
            raise TableChanged
    return missing


def _decoded(
    feed: OpenPostgresFeed, tables: Tables, messages: Sequence[bytes], version: int, timestamp: int
) -> tuple[pa.RecordBatch | None, Sequence[pa.StringArray]]:
    """Return the rows in messages, and the keys of the rows."""
    (table,) = tables.tables
    if not messages:
        return None, [pa.array([], pa.string()) for _ in table.key]
    reader = RowReader(feed.settings, tables, tables.schema(), 0, from_log=False)
    decoder = Decoder(version - 1, version, reader.wants)
    decoder.begin(version, timestamp, 0, table.relation)
    (part,) = decoder.decode(messages)
    assert not isinstance(part, Truncation)
    (changes,) = part
    keys = [changes.text(table.relation.names.index(name)) for name in table.key]
    rows = reader.rows_of(part)
    reader.report_invalid()
    return rows, keys
