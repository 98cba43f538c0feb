"""Watch a queue of a PostgreSQL store. An append notifies a channel if it has listeners.

A notification locks the whole database while it commits. So an append notifies only if there are listeners,
and only after its own commit. A listener holds an advisory lock, which is released when its connection ends.
An append checks that lock while it holds the lock on the partition's row. An append that checked before the
listener had its lock may commit afterwards without a notification. So a new listener polls until all
transactions that were open then have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from penstock.errors import StoreUnavailableError
from penstock.store.postgres.locks import close_inherited
from penstock.store.records.catalog import QueueRecord
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.postgres.database import PostgresDatabase

CHECK_SECONDS = 1.0
_SHORTEST_PAUSE = 0.005


class PostgresWatch(Watch):
    """Checks the queue after each notification, and every second besides. Poolers do not forward
    notifications, and a writer may die before it sends one.
    """

    def __init__(
        self, database: PostgresDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._statements = statements("postgres", database.url.schema)
        self._listened_since: int | None = None
        """A transaction id above those of all transactions that may have missed this listener; None before it
        listens.
        """
        self.misses_no_append = False
        self._notified = False
        self._last_pause = _SHORTEST_PAUSE
        super().__init__(queue, partitions, database.long_lived_connection, database.translating)

    def _descriptors(self) -> Sequence[int]:
        return [] if self.connection is None else [self.connection.fileno()]

    def _read(self, woken: bool) -> list[tuple[int, int, int]]:
        if self.connection is None:
            self.connection = self._connect()
            self.connection.add_notify_handler(self._on_notify)
            self._listened_since, self.misses_no_append, self._last_pause = None, False, _SHORTEST_PAUSE
        if not self.misses_no_append:
            self._confirm_listening()
        self._notified = False
        rows = [(row[0], row[1], row[2]) for row in self._fetch("read_ends", **self._parameters)]
        # Keep notifications that arrived with the result: they may be for a later commit.
        while self.connection.pgconn.notifies() is not None:
            self._notified = True
        return rows

    def _fetch(self, name: str, **parameters: int) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = self.connection.execute(
            self._statements[name], parameters, binary=True
        ).fetchall()
        return rows

    def _on_notify(self, notification: object) -> None:
        self._notified = True

    def _confirm_listening(self) -> None:
        ((channel,),) = self._fetch("watch_channel", queue_id=self._queue.queue_id)
        if self._listened_since is None:
            self.connection.execute(f'listen "{channel}"')
            ((is_held,),) = self._fetch("hold_watch", queue_id=self._queue.queue_id)
            if is_held:
                ((self._listened_since,),) = self._fetch("newest_transaction")
        if self._listened_since is not None:
            ((oldest_running,),) = self._fetch("oldest_transaction")
            self.misses_no_append = oldest_running > self._listened_since

    def _seconds_to_next_check(self, has_new_rows: bool) -> float:
        if self._notified:
            return 0.0
        if self.misses_no_append:
            return CHECK_SECONDS
        self._last_pause = min(self._last_pause * 2, CHECK_SECONDS)
        return self._last_pause

    def _report_unavailable(self, error: StoreUnavailableError) -> None:
        super()._report_unavailable(error)
        self._notified = self.misses_no_append = False
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        connection, self.connection = self.connection, None
        if connection is not None:
            close_inherited(connection)
