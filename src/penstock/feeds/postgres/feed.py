"""``PostgresFeed``: the changes of the tables of a PostgreSQL publication."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from penstock.feeds.postgres.open_feed import OpenPostgresFeed
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.slot import SlotLag
from penstock.feeds.protocol import PlannedRead


@dataclass(frozen=True)
class PostgresFeed(FeedSettings):
    """The changes of the tables of a PostgreSQL publication, through a logical replication slot.

    A transaction is a commit: its version is the log position (LSN) of its commit record, its timestamp the
    server's. Changes can be read again until Spark has logged them; then the slot advances.

    One table comes with its columns. Several come in one form: ``_table`` ("schema.table"), ``_key`` (the key
    as JSON), and a struct for each table, which is null in the rows of other tables. ``tables`` with one name
    selects one table of a publication. ``_commit_sequence`` orders the rows of a commit. ``_unchanged`` names
    the columns of a row with unchanged TOAST values: a long value that an update did not touch is not in the
    log, unless the table's replica identity is full.

    With the default replica identity an update has no pre-image, and a delete has only the key. An update
    that changes the key is a delete directly followed by an insert, whose unchanged TOAST values are those of
    the deleted row. A table without a key needs ``replica identity full``; all its columns together identify
    a row.

    Types: boolean, smallint to bigint, real, double, numeric(p, s) up to 38 digits, date, timestamp with and
    without time zone, and bytea as Arrow has them; domains as their base type; everything else (numeric
    without a precision, time, interval, uuid, json, enums, arrays, …) as PostgreSQL's text. Infinite dates
    and times become the first and the last that Spark has; other dates before year 1 or after 9999, and NaN
    in a numeric with a precision, are an error: see ``types`` and ``invalid_values``.

    Parameters
    ----------
    url
        libpq's URL of the database; its query may have the other parameters, ``table`` several times.
    publication
        The publication: ``create publication … for table …``.
    slot
        The replication slot: lower-case letters, digits and underscores. A slot is for one query. By default
        ``penstock_`` and the publication's name, where that name has only such letters.
    tables
        Some tables of the publication, as "schema.table" or "table"; all when None.
    snapshot
        ``initial``: a streaming query with a new checkpoint creates the slot, and the existing rows come
        first, as inserts of one commit. They are copied inside the database, into the schema
        ``penstock_snapshots``, until they are logged. If the slot has been read already, or was created by
        hand, a query with a new checkpoint is refused, since it would miss rows. ``none``: the slot has to
        exist; a query reads what it still has.
    truncate
        What to do with TRUNCATE of a table: ``fail`` the query, or ``skip`` it, so that the copy keeps the
        rows.
    accept
        Changes of the tables that are not in their log, which the copy may therefore lack: as named by the
        error that stops the query.
    types
        Columns to read as ``text`` or as ``double`` rather than as their own type: ``{"price": "text"}``, or
        with the table if several have such a column, ``{"orders.price": "double"}``. Text has every value.
    invalid_values
        What to do with a value that the type of its column cannot hold, such as NaN in a numeric with a
        precision: ``fail`` the query, or ``null``, which replaces it with NULL and logs the number of such
        values.
    skip
        Commits to leave out, by their versions; the copy lacks their rows from then on.
    lag_warning
        Bytes of log that the slot may keep on the server's disk before a warning is logged; 0 for no warning.
    transaction_warning
        Seconds that a transaction on the server may be open before a warning is logged and added to the
        progress of the query, since the slot keeps all log that is written meanwhile; 0 for no warning.
    slot_wait
        Seconds to wait for another reader to release the slot.

    Raises
    ------
    InvalidUrl
        For a parameter that is wrong, missing or unknown.
    MissingDependency
        Without psycopg.
    """

    @classmethod
    def from_url(cls, url: str) -> PostgresFeed:
        """Return the feed of a URL."""
        return cls(url)

    def open(self, planned: PlannedRead | None = None) -> OpenPostgresFeed:
        """Open the feed in this process; close it when done."""
        return OpenPostgresFeed(self, planned)

    def begin(self) -> int:
        """Return the start of a new query; with ``snapshot="initial"``, create the slot if needed."""
        with closing(self.open()) as feed:
            return feed.begin()

    def lag(self) -> SlotLag:
        """Return how much log the slot keeps and how much is unconfirmed, and the oldest transaction."""
        with closing(self.open()) as feed:
            return feed.lag()
