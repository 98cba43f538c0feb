"""Watching a queue of a PostgreSQL store: an append notifies a channel when somebody listens.

A notification costs every append a lock of the whole database while it commits, so an append looks first whether anybody
listens, and notifies after its commit. Who listens holds an advisory lock, which goes with his connection whatever ends it; an
append asks for that lock while it holds the partition's row. An append that asked before the listener had the lock may end
later without a word: until all transactions of that time are over the listener looks by himself.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import StoreUnavailable
from penstock.store.records.catalog import QueueRecord
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.postgres.database import PostgresDatabase

REST = 1.0
_SHORTEST = 0.005
_inherited: list[Any] = []


class PostgresWatch(Watch):
    """Looks when the server tells it to, and each second, since a pooler tells nothing and an appender may die in between."""

    def __init__(
        self, database: PostgresDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._statements = statements("postgres", database.url.schema)
        self._listened_since: int | None = None
        """A transaction behind all those that may not have found us listening; None before that."""
        self._settled = False
        self._told = False
        self._last_pause = _SHORTEST
        super().__init__(queue, partitions, database.lasting_connection, database.translating)

    def _descriptors(self) -> Sequence[int]:
        return [] if self._connection is None else [self._connection.fileno()]

    def _read(self, heard: bool) -> list[tuple[int, int, int]]:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.add_notify_handler(self._tell)
            self._listened_since, self._settled, self._last_pause = None, False, _SHORTEST
        if not self._settled:
            self._settle()
        self._told = False
        rows: list[tuple[int, int, int]] = self._rows("read_ends", **self._wanted)
        # What came with the answer may be about a later commit than the answer.
        while self._connection.pgconn.notifies() is not None:
            self._told = True
        return rows

    def _rows(self, name: str, **parameters: Any) -> list[Any]:
        found: list[Any] = self._connection.execute(
            self._statements[name], parameters, binary=True
        ).fetchall()
        return found

    def _tell(self, notification: object) -> None:
        self._told = True

    def _settle(self) -> None:
        ((channel,),) = self._rows("watch_channel", queue_id=self._queue.queue_id)
        if self._listened_since is None:
            self._connection.execute(f'listen "{channel}"')
            ((held,),) = self._rows("hold_watch", queue_id=self._queue.queue_id)
            if held:
                ((self._listened_since,),) = self._rows("newest_transaction")
        if self._listened_since is not None:
            ((oldest,),) = self._rows("oldest_transaction")
            self._settled = oldest > self._listened_since

    def _pause(self, changed: bool) -> float:
        if self._told:
            return 0.0
        if self._settled:
            return REST
        self._last_pause = min(self._last_pause * 2, REST)
        return self._last_pause

    def _lose(self, error: StoreUnavailable) -> None:
        super()._lose(error)
        self._told = self._settled = False
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        connection, self._connection = self._connection, None
        if connection is not None:
            # Closing it in order would say goodbye to the server in the parent's name.
            _inherited.append(connection)
            with suppress(OSError):
                os.close(connection.fileno())
