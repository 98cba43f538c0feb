"""``QueryProgress``: how far the query that fills a copy has got, according to its checkpoint."""

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

_QUEUE_PREFIX = "queue:"
_WAL_PAGE_BYTES, _WAL_HEADER_BYTES = 8192, 40


class QueryProgress:
    """Progress of a query that reads the source's slot, or a queue that a pump fills from the slot.

    ``tables`` has the compared table, and ``queue_store`` is the URL of the store with the queue.
    """

    def __init__(self, checkpoint: str, feed: PostgresFeed, tables: Tables, queue_store: str | None) -> None:
        self._checkpoint = Checkpoint(checkpoint)
        self._feed: OpenPostgresFeed = feed.open()
        self._store = queue_store
        try:
            self._find_query(feed, tables)
        except BaseException:
            self.close()
            raise

    def _find_query(self, feed: PostgresFeed, tables: Tables) -> None:
        table_suffix = "".join(f"/{table}" for table in sorted(feed.tables or ()))
        self._identity = self._feed.identity().removesuffix(table_suffix)
        self._queue: str | None = None
        self._feed.slot.choose(tables)
        self._require_query()

    def close(self) -> None:
        self._feed.close()

    def includes(self, position: int) -> bool:
        """Return whether the copy has everything that was committed before a position of the source's log."""
        version = self._version()
        if version is None:
            return False
        if self._queue is None:
            return version >= position or self._has_no_commits(version, position)
        pump = self._pump()
        if pump is None or recoveries_of(pump.name, pump.state):
            # During a recovery, the queue may lack rows that the pump has not reread yet.
            return False
        # A recovery may have shifted the versions in the queue.
        version_needed = position + int(pump.state.get("offset", 0))
        return version >= version_needed or self._is_confirmed(version, position)

    def _version(self) -> int | None:
        """Return the last feed version that the query has written; None before its first micro-batch."""
        last = self._checkpoint.last_commit()
        return None if last is None else self._offset(last)[1]

    def _offset(self, batch: int) -> tuple[str, int]:
        offsets: list[JsonValue] = self._checkpoint.offsets(batch)
        offset = offsets[0] if len(offsets) == 1 else None
        if not isinstance(offset, dict) or type(offset.get("to")) is not int:
            raise self._wrong_checkpoint("does not read one change feed")
        return str(offset.get("feed")), int(offset["to"])

    def _require_query(self) -> None:
        """Refuse the checkpoint of a query that does not read the source."""
        last = self._checkpoint.last_planned()
        if last is None:
            raise self._wrong_checkpoint("has not begun")
        feed, _ = self._offset(last)
        if feed.startswith(_QUEUE_PREFIX):
            self._queue = self._pumped_queue(feed)
        elif feed != self._identity and not feed.startswith(f"{self._identity}/"):
            raise self._wrong_checkpoint(f"reads the feed {in_quotes(feed)}, not {in_quotes(self._identity)}")

    def _pumped_queue(self, feed: str) -> str:
        if self._store is None:
            raise self._wrong_checkpoint("reads a queue, so queue_store must name the store of the queue")
        with closing(connect(self._store, create=False)) as store:
            identity, _, _ = feed.rpartition("/")
            store_id, _, name = identity.removeprefix(_QUEUE_PREFIX).partition("/")
            if store_id != store.uuid or self._find_pump(store, name) is None:
                raise self._wrong_checkpoint(
                    f"reads a queue that no pump of {store.url} fills from {in_quotes(self._identity)}"
                )
        return name

    def _pump(self) -> PumpRecord | None:
        assert self._queue is not None
        assert self._store is not None
        return self._find_pump(open_store(self._store), self._queue)

    def _find_pump(self, store: Store, queue: str) -> PumpRecord | None:
        """Return the pump that fills a queue from the source; None if there is none."""
        for pump in store.database.run(pumps.list_pumps, write=False):
            feed = str(pump.state.get("feed"))
            is_source = feed == self._identity or feed.startswith(f"{self._identity}/")
            if is_source and queue in dict(pump.state.get("queues", {})).values():
                return pump
        return None

    def _has_no_commits(self, version: int, position: int) -> bool:
        """Return whether the table has no commits above a version and below a position."""
        slot_state = self._feed.slot.find()
        if slot_state is None or not slot_state.ready or not _reaches(slot_state.flushed, position):
            return False
        try:
            return not self._feed.slot.has_changes(version, position)
        except SlotInUse:
            # The query is still reading, so try again later.
            return False

    def _is_confirmed(self, version: int, position: int) -> bool:
        """Return whether the pump has confirmed a position, and the queue has no commits above a version."""
        slot_state = self._feed.slot.find()
        if slot_state is None or not slot_state.ready:
            return False
        return _reaches(slot_state.confirmed, position) and self._newest_in_queue(version) == version

    def _newest_in_queue(self, version: int) -> int:
        assert self._queue is not None
        assert self._store is not None
        return QueueFeed(self._queue, self._store).open().newest(version)

    def _wrong_checkpoint(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"the query of the checkpoint {self._checkpoint.label} {why}: pass the checkpoint of the query "
            "that fills the copy from this source, or no checkpoint",
            condition="INVALID_INPUT.OTHER_CHECKPOINT",
            parameter="checkpoint",
        )


def _reaches(end: int, position: int) -> bool:
    """Return whether a log end is at or after a position.

    At the end of a WAL page, the next record follows the header of the next page.
    """
    return end >= position or (end % _WAL_PAGE_BYTES == 0 and position - end <= _WAL_HEADER_BYTES)
