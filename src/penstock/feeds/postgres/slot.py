"""The replication slot: its positions, reading and advancing it, and open transactions that hold it back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.catalog import Tables, missing_publication
from penstock.feeds.postgres.pgoutput import TRUNCATE, Relation, Truncation, truncated_relations
from penstock.feeds.postgres.server import WAL_LEVEL, Server, SlotInUse, lsn, quoted, statements
from penstock.feeds.protocol import Commit, history_changed
from penstock.redaction import sentence, without_literals

log = logging.getLogger("penstock.feeds")
_MAX_QUERY_TEXT = 120
_HIDDEN_QUERY = "<insufficient privilege>"
_CHECK_SECONDS = 5.0
"""Maximum time between two checks, in seconds."""
_MAX_MESSAGES = 2**31 - 1
_GROWTH = 8
_OLDEST_SERVER = 150_000
"""Older servers omit changes of a partition that was decoded before it was attached."""
FAILOVER_SINCE = 170_000
"""The first server version that can synchronize logical slots to standbys."""


@dataclass(frozen=True)
class SlotLag:
    """The amount of log that a slot retains on the server."""

    retained: int
    """Bytes of log that the server retains for the slot."""
    unconfirmed: int
    """Bytes of log after the confirmed position, up to which all commits have been logged."""
    open_transaction: OpenTransaction | None = None
    """The oldest open transaction on the server, which retains the log from its start on."""


@dataclass(frozen=True)
class SlotState:
    """The positions of a slot at one point in time."""

    flushed: int
    """The end of the log that is flushed to disk; later commits start at or after it."""
    restart: int
    confirmed: int
    """Commits from this position on can still be read."""
    ready: bool = True
    """False while the server is creating the slot."""
    written: int = 0
    """The end of the log, including log that is not flushed to disk yet."""
    now: int = 0
    """The server's time, read before ``written``, in microseconds since 1970."""

    @property
    def lag(self) -> SlotLag:
        return SlotLag(self.flushed - self.restart, max(0, self.flushed - self.confirmed))


@dataclass(frozen=True)
class LogRelations:
    """The relations in a range of the log, in log order."""

    uses: Mapping[Relation, int]
    """Relations that have rows, each with the first commit of such rows."""
    truncations: Sequence[Truncation]
    others: Sequence[tuple[Relation, int]]
    """Relations without rows, each version of them with its first commit in the range. These are partitions
    whose rows are published under their table.
    """


class Slot:
    """A slot and its publication.

    A warning is logged when the slot retains ``lag_warning`` bytes, and each time this doubles; 0 for no
    warning.
    """

    def __init__(self, server: Server, name: str, publication: str, lag_warning: int) -> None:
        self._server, self.name, self._publication = server, name, publication
        self._warned_at, self._lag_warning = lag_warning, lag_warning
        self._chosen: Tables | None = None
        self._advanced_to = 0

    def choose(self, tables: Tables) -> None:
        """Read only the rows of these tables, if the feed reads named tables."""
        self._chosen = tables if tables.chosen else None

    def check_server(self) -> None:
        """Refuse a server that cannot decode its log."""
        (row,) = self._server.fetch("server")
        if row.version < _OLDEST_SERVER:
            raise self._server.unavailable(
                "SERVER_TOO_OLD",
                f"the server is PostgreSQL {row.version // 10_000}, but a feed needs 15 or later, because "
                "older servers may omit changes of attached partitions: upgrade the server",
            )
        if row.wal_level != "logical":
            raise self._server.unavailable("WAL_LEVEL", WAL_LEVEL)
        if row.encoding == "SQL_ASCII":
            raise self._server.unavailable(
                "ENCODING", "the database's encoding is SQL_ASCII, so the encoding of its text is unknown"
            )

    def find(self) -> SlotState | None:
        """Return the positions of the slot; None if it does not exist."""
        (row,) = self._server.fetch("slot", slot=self.name, publication=self._publication)
        if not row.published:
            raise missing_publication(self._server, self._publication)
        if row.plugin is None and row.type is None:
            return None
        if row.type != "logical" or row.plugin != "pgoutput" or row.database != row.here:
            raise self._server.unavailable(
                "SLOT_UNUSABLE",
                f"the slot {self.name!r} is {row.type}, with plugin {row.plugin}, in database "
                f"{row.database}, but a feed needs a logical slot with pgoutput in {row.here}: use another "
                "name",
            )
        if row.two_phase:
            raise self._server.unavailable(
                "SLOT_TWO_PHASE",
                f"the slot {self.name!r} has two_phase, so the server sends the rows of a prepared "
                "transaction before it is committed or rolled back: use a slot without two_phase",
                slot=self.name,
            )
        if row.wal_status == "lost" or row.reason:
            raise self._server.lost_slot(row.reason or f"wal_status is {row.wal_status}")
        if row.confirmed is None:
            return SlotState(int(row.flushed), int(row.flushed), 0, ready=False)
        state = SlotState(
            int(row.flushed),
            int(row.restart),
            int(row.confirmed),
            written=int(row.written),
            now=int(row.now),
        )
        self._warn(state.lag)
        return state

    def state(self) -> SlotState:
        state = self.find()
        if state is None:
            raise self._missing()
        if not state.ready:
            raise SlotInUse(
                f"the slot {self.name!r} is being created, which waits until all open transactions have "
                "ended: try again later",
                condition="FEED_UNAVAILABLE.SLOT_NOT_READY",
            )
        return state

    def _missing(self) -> FeedUnavailableError:
        (row,) = self._server.fetch("server")
        failover = ", failover => true" if row.version >= FAILOVER_SINCE else ""
        return self._server.unavailable(
            "SLOT_MISSING",
            f'there is no replication slot {self.name!r}. With snapshot="initial", start a streaming query '
            "with a new checkpoint and an empty sink: it creates the slot and reads the existing rows first. "
            f"For snapshot=\"none\", select pg_create_logical_replication_slot('{self.name}', "
            f"'pgoutput'{failover}) creates a slot that starts now",
            slot=self.name,
        )

    def already_read(self, oldest: int) -> FeedUnavailableError:
        """Return the error for a new query on a slot that no longer has its initial snapshot."""
        return self._server.unavailable(
            "SLOT_USED",
            f"the slot {self.name!r} has been read up to {oldest}, or was created manually, so a query with "
            "a new checkpoint would miss earlier changes. Use the checkpoint of the query that has read it; "
            f"or run select pg_drop_replication_slot('{self.name}') and empty the sink; or read the "
            "remaining "
            'changes with snapshot="none"',
            slot=self.name,
            oldest=oldest,
        )

    def _unread_relations(self) -> list[int]:
        """Return the object ids of relations whose rows are not read."""
        chosen = self._chosen
        oids = None if chosen is None else list(chosen.by_oid)
        names = [] if chosen is None else list(chosen.by_name)
        return [row.oid for row in self._server.fetch("others", chosen=oids, names=names)]

    def has_changes(self, after: int, upto: int) -> bool:
        others, messages = self._unread_relations(), 1
        while True:
            (row,) = self._server.fetch(
                "probe", **self._bounds(upto), messages=messages, after=after, others=others
            )
            if (row.last_change or 0) > (row.last_commit or 0):
                return True
            if row.messages < messages:
                return False
            messages = min(messages * _GROWTH**2, _MAX_MESSAGES)

    def commits(self, after: int, upto: int, rows: int | None) -> Iterator[Commit]:
        """Yield the commits of a range that have rows; decode ever larger parts of the log as needed."""
        others, messages = self._unread_relations(), (rows or 5_000) + 1_000
        while True:
            seen = 0
            rows_of_log = self._server.rows("commits", **self._bounds(upto), messages=messages, others=others)
            with closing(rows_of_log) as counted:
                for row in counted:
                    seen = row.number
                    if row.rows and after < row.version <= upto:
                        after = row.version
                        yield Commit(row.version, row.timestamp, row.rows)
            if seen < messages:
                return
            messages = min(messages * _GROWTH, _MAX_MESSAGES)

    def relations(
        self, after: int, upto: int, *, skipped: Collection[int] = (), messages: int | None = None
    ) -> LogRelations:
        """Return the relations of rows in a range, and its truncations, without skipped commits.

        About ``messages`` messages of the log are searched; None searches the whole range.
        """
        if upto <= after:
            return LogRelations({}, [], [])
        rows = self._server.fetch(
            "relations",
            **self._bounds(upto),
            messages=messages,
            after=after,
            skipped=list(skipped),
            others=self._unread_relations(),
        )
        relations_by_oid: dict[int, list[tuple[Relation, int]]] = {}
        uses: dict[Relation, int] = {}
        truncations = []
        for row in rows:
            if row.oid is not None:
                relation = relations_by_oid[row.oid][-1][0]
                if row.version <= upto:
                    uses.setdefault(relation, row.version)
            elif row.data[:1] == b"R":
                relation = Relation.of(row.data)
                versions = relations_by_oid.setdefault(relation.oid, [])
                if row.version <= after:
                    # An earlier relation only applied before the range.
                    versions.clear()
                if not versions or versions[-1][0] != relation:
                    versions.append((relation, max(row.version, after + 1)))
            elif after < row.version <= upto and row.version not in skipped:
                oids = truncated_relations(row.data)
                truncated = [relations_by_oid[oid][-1][0] for oid in oids if oid in relations_by_oid]
                truncations.append(Truncation(truncated, row.version))
        with_rows = {relation.oid for relation in uses}
        with_rows |= {relation.oid for truncation in truncations for relation in truncation.relations}
        others = [
            relation_version
            for oid, versions in relations_by_oid.items()
            if oid not in with_rows
            for relation_version in versions
        ]
        return LogRelations(uses, truncations, others)

    def descriptions(self, upto: int) -> list[Relation] | None:
        """Return the relations in the log up to a commit; None if the log has a truncation."""
        messages = [row.data for row in self._server.fetch("descriptions", **self._bounds(upto))]
        if any(message[:1] == TRUNCATE for message in messages):
            return None
        return [Relation.of(message) for message in messages]

    def messages(self, upto: int) -> Generator[list[bytes], None, None]:
        """Read the messages from the slot's confirmed position up to a commit, in chunks."""
        bounds = self._bounds(upto)
        if self._chosen is None:
            return self._server.chunks(statements()["messages"], bounds)
        return self._server.chunks(
            statements()["chosen_messages"], {**bounds, "others": self._unread_relations()}
        )

    def advance(self, upto: int) -> None:
        """Advance the slot, so that the server may remove the log up to a commit."""
        # The server skips commits whose record starts before the slot's position.
        position = upto + 1
        if position <= self._advanced_to:
            return
        state = self.state()
        if state.flushed < position:
            self.require_log(upto)
        if state.confirmed < position:
            self._server.fetch("advance", slot=self.name, upto=lsn(position))
        self._advanced_to = position

    def require_log(self, upto: int) -> None:
        """Refuse a server whose log ends before commits that were read, unless it is a lagging standby."""
        (end,) = self._server.fetch("position")
        if not end.standby and end.position <= upto:
            raise history_changed(self._server.name, upto, int(end.position) - 1)

    def _bounds(self, upto: int) -> dict[str, str]:
        # Decoding stops after the first record at or after this position, which has to be the commit record.
        return {"slot": self.name, "upto": lsn(upto + 1), "names": quoted(self._publication)}

    def _warn(self, lag: SlotLag) -> None:
        if not self._lag_warning:
            return
        if lag.retained < self._lag_warning:
            self._warned_at = self._lag_warning
        elif lag.retained >= self._warned_at:
            self._warned_at = 2 * lag.retained
            log.warning(
                "the slot %s retains %.1f MiB of log on the server: check that its query runs and keeps up, "
                "or drop the slot if it is no longer read",
                self.name,
                lag.retained / 2**20,
                extra={"action": "slot_lag", "slot": self.name, "retained_bytes": lag.retained},
            )


@dataclass(frozen=True)
class OpenTransaction:
    """The oldest open transaction on the server that has written data."""

    pid: int | None
    """The server process; None for a prepared transaction, which has no process."""
    seconds: float
    """The age; if the role may not see it, the time since this process first saw the transaction."""
    state: str | None
    """The state of the process in ``pg_stat_activity``."""
    query: str
    """The last statement without literals; for a prepared transaction, its name."""

    @property
    def name(self) -> str:
        """The transaction for messages."""
        return f"prepared transaction {self.query}" if self.pid is None else f"server process {self.pid}"

    def describe(self) -> str:
        """Describe the transaction and its age for messages."""
        if self.pid is None:
            return f"{self.name}, open for {_age(self.seconds)}"
        if self.state is None:
            shows = "grant pg_read_all_stats shows its statement"
            return f"{self.name}, open for at least {_age(self.seconds)} ({shows})"
        return f"{self.name}, open for {_age(self.seconds)}, {self.state}: {self.query}"

    @property
    def ended_by(self) -> str:
        """How to end the transaction, as a sentence."""
        if self.pid is None:
            return f"Run commit prepared {self.query} or rollback prepared {self.query}"
        return f"Commit it, roll it back, or run select pg_terminate_backend({self.pid})"

    def warning(self, slot: str, retained: int) -> str:
        """Return a warning with advice on ending the transaction."""
        return (
            f"the slot {slot} retains {retained / 2**20:.1f} MiB of log, and more until a transaction ends: "
            f"{self.describe()}. {self.ended_by}"
        )


class OpenTransactions:
    """Periodic check for transactions that are open for more than ``longest`` seconds; 0 for no check."""

    def __init__(self, server: Server, slot: str, longest: float) -> None:
        self._server, self._slot, self._longest = server, slot, longest
        self._first_seen: tuple[str, float] = "", 0.0
        self._warned: tuple[str, float] = "", 0.0
        self._current: str | None = None
        self._next_check = 0.0

    def oldest(self) -> OpenTransaction | None:
        """Return the oldest open transaction, regardless of its age."""
        oldest = self._find()
        return None if oldest is None else oldest[1]

    def warning(self, retained: Callable[[], int]) -> str | None:
        """Return a warning about a transaction that is too old, and log it each time its age doubles.

        Parameters
        ----------
        retained
            Function that returns the bytes of log that the slot retains.
        """
        if self._longest and time.monotonic() >= self._next_check:
            oldest = self._find()
            too_old = oldest is not None and oldest[1].seconds >= self._longest
            self._current = self._warning(*oldest, retained()) if oldest is not None and too_old else None
            self._next_check = time.monotonic() + min(_CHECK_SECONDS, self._longest / 2)
        return self._current

    def _warning(self, number: str, transaction: OpenTransaction, retained: int) -> str:
        warning = transaction.warning(self._slot, retained)
        last, seconds = self._warned
        if last != number or transaction.seconds >= 2 * seconds:
            self._warned = number, transaction.seconds
            log.warning(
                "a transaction has been open for too long: %s",
                warning,
                extra={
                    "action": "open_transaction",
                    "slot": self._slot,
                    "pid": transaction.pid,
                    "seconds": transaction.seconds,
                    "retained_bytes": retained,
                },
            )
        return warning

    def _find(self) -> tuple[str, OpenTransaction] | None:
        rows = self._server.fetch("oldest_transaction")
        if not rows:
            return None
        (row,) = rows
        if self._first_seen[0] != row.number:
            self._first_seen = row.number, time.monotonic()
        hidden = row.query == _HIDDEN_QUERY
        seconds = time.monotonic() - self._first_seen[1] if row.seconds is None else max(0.0, row.seconds)
        # The name of a prepared transaction is shown unchanged, because ending the transaction needs it.
        query = row.query if row.pid is None else sentence(without_literals(row.query or ""), _MAX_QUERY_TEXT)
        return row.number, OpenTransaction(row.pid, seconds, None if hidden else row.state, query)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
