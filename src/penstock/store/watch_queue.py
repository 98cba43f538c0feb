"""Watch a queue of a SQLite or PostgreSQL store.

This is a separate module because each kind of watch imports the modules of its database.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.store.database import Database
from penstock.store.postgres.database import PostgresDatabase
from penstock.store.postgres.watch import PostgresWatch
from penstock.store.records.catalog import QueueRecord
from penstock.store.sqlite.database import SqliteDatabase
from penstock.store.sqlite.watch import SqliteWatch
from penstock.store.watching import Watch


def watch(database: Database, queue: QueueRecord, partitions: Collection[int] | None = None) -> Watch:
    """Watch a queue for rows that any process appends. Close the watch after use.

    Parameters
    ----------
    partitions
        The partitions to watch; all if None.
    """
    if isinstance(database, SqliteDatabase):
        return SqliteWatch(database, queue, partitions)
    assert isinstance(database, PostgresDatabase)
    return PostgresWatch(database, queue, partitions)
