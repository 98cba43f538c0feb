"""The progress of the query that fills a copy, from its checkpoint."""

from __future__ import annotations

from contextlib import closing

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.server import SlotInUse
from penstock.feeds.queue_feed import QueueFeed
from penstock.json_text import JsonValue
from penstock.pump.recovery_records import recoveries_of
from penstock.queue.store import Store, connect, open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpRecord

_QUEUE = "queue:"
_LOG_PAGE, _PAGE_HEADER = 8192, 40


class QueryProgress:
    """The progress of a query that reads the source's slot, or a queue that a pump fills from it.

    ``tables`` has the table that is compared, and ``store`` is the URL of the store with the queue.
    """

    def __init__(self, checkpoint: str, feed: PostgresFeed, tables: Tables, store: str | None) -> None:
        self._checkpoint = Checkpoint(checkpoint)
        self._feed: OpenPostgresFeed = feed.open()
        self._store = store
        try:
            self._look_up(feed, tables)
        except BaseException:
            self.close()
            raise

    def _look_up(self, feed: PostgresFeed, tables: Tables) -> None:
        chosen = "".join(f"/{table}" for table in sorted(feed.tables or ()))
        self._identity = self._feed.identity().removesuffix(chosen)
        self._queue: str | None = None
        self._feed.slot.choose(tables)
        self._require_query()

    def close(self) -> None:
        self._feed.close()

    def passed(self, position: int) -> bool:
        """Whether the copy has everything that was committed before a position of the source's log."""
        version = self._version()
        if version is None:
            return False
        if self._queue is None:
            return version >= position or self._is_quiet(version, position)
        pump = self._pump()
        if pump is None or recoveries_of(pump.name, pump.state):
            # Until then, the queue may lack rows that the pump has to read again.
            return False
        # A recovery has shifted the versions in the queue.
        shifted = position + int(pump.state.get("offset", 0))
        return version >= shifted or self._is_confirmed(version, position)

    def _version(self) -> int | None:
        """Return the last version of the feed that the query has written; None before the first one."""
        last = self._checkpoint.last_commit()
        return None if last is None else self._offset(last)[1]

    def _offset(self, batch: int) -> tuple[str, int]:
        offsets: list[JsonValue] = self._checkpoint.offsets(batch)
        offset = offsets[0] if len(offsets) == 1 else None
        if not isinstance(offset, dict) or type(offset.get("to")) is not int:
            raise self._refusal("does not read one change feed")
        return str(offset.get("feed")), int(offset["to"])

    def _require_query(self) -> None:
        """Refuse the checkpoint of a query that reads something else than the source."""
        last = self._checkpoint.last_planned()
        if last is None:
            raise self._refusal("has not begun")
        feed, _ = self._offset(last)
        if feed.startswith(_QUEUE):
            self._queue = self._pumped_queue(feed)
        elif feed != self._identity and not feed.startswith(f"{self._identity}/"):
            raise self._refusal(f"reads the feed {in_quotes(feed)}, not {in_quotes(self._identity)}")

    def _pumped_queue(self, feed: str) -> str:
        if self._store is None:
            raise self._refusal("reads a queue, so the queue's store has to be named: queue_store")
        with closing(connect(self._store, create=False)) as store:
            identity, _, _ = feed.rpartition("/")
            number, _, name = identity.removeprefix(_QUEUE).partition("/")
            if number != store.uuid or self._pump_of(store, name) is None:
                raise self._refusal(
                    f"reads a queue that no pump of {store.url} fills from {in_quotes(self._identity)}"
                )
        return name

    def _pump(self) -> PumpRecord | None:
        assert self._queue is not None
        assert self._store is not None
        return self._pump_of(open_store(self._store), self._queue)

    def _pump_of(self, store: Store, queue: str) -> PumpRecord | None:
        """Return the pump that fills a queue from the source."""
        for pump in store.database.run(pumps.list_pumps, write=False):
            feed = str(pump.state.get("feed"))
            is_source = feed == self._identity or feed.startswith(f"{self._identity}/")
            if is_source and queue in dict(pump.state.get("queues", {})).values():
                return pump
        return None

    def _is_quiet(self, version: int, position: int) -> bool:
        """Whether the table has no commits above a version and below a position."""
        state = self._feed.slot.find()
        if state is None or not state.ready or not _reaches(state.flushed, position):
            return False
        try:
            return not self._feed.slot.has_changes(version, position)
        except SlotInUse:
            # The query is still reading, so try again later.
            return False

    def _is_confirmed(self, version: int, position: int) -> bool:
        """Whether the pump has confirmed a position, and the queue has no commits above a version."""
        state = self._feed.slot.find()
        if state is None or not state.ready:
            return False
        return _reaches(state.confirmed, position) and self._newest_in_queue(version) == version

    def _newest_in_queue(self, version: int) -> int:
        assert self._queue is not None
        assert self._store is not None
        return QueueFeed(self._queue, self._store).open().newest(version)

    def _refusal(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"the query of the checkpoint {self._checkpoint.shown} {why}: give the checkpoint of the query "
            "that fills the copy from this source, or leave it out",
            condition="INVALID_INPUT.OTHER_CHECKPOINT",
            parameter="checkpoint",
        )


def _reaches(end: int, position: int) -> bool:
    """Whether a position is the end of the log, or before it: the next record may follow a page's header."""
    return end >= position or (end % _LOG_PAGE == 0 and position - end <= _PAGE_HEADER)
