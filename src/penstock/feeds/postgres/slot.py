"""The replication slot: where it stands, what is behind that, and how it moves on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from penstock.errors import FeedUnavailable
from penstock.feeds.postgres.catalog import missing_publication
from penstock.feeds.postgres.open_transactions import OpenTransaction
from penstock.feeds.postgres.pgoutput import TRUNCATE, Relation, truncated_relations
from penstock.feeds.postgres.server import WAL_LEVEL, Server, SlotInUse, lsn, quoted
from penstock.feeds.protocol import Commit

log = logging.getLogger("penstock.changes")
_MOST_MESSAGES = 2**31 - 1
_GROWTH = 8
_OLDEST_SERVER = 130_000
FAILOVER_SINCE = 170_000
"""The server whose standbys can have a primary's logical slots."""


@dataclass(frozen=True)
class SlotLag:
    """What a slot keeps the server from letting go of."""

    retained: int
    """Bytes of log on the server's disk."""
    unconfirmed: int
    """Bytes of log behind what has been read and logged."""
    open_transaction: OpenTransaction | None = None
    """The oldest transaction that is open on the server: the log is kept from its beginning on."""


@dataclass(frozen=True)
class SlotState:
    """A slot at one moment."""

    flushed: int
    """Where the log that is safe on disk ends: later commits begin there or behind it."""
    restart: int
    confirmed: int
    """Commits from here on are still to be had."""
    ready: bool = True
    """False while the server is making it."""

    @property
    def lag(self) -> SlotLag:
        return SlotLag(self.flushed - self.restart, max(0, self.flushed - self.confirmed))


@dataclass(frozen=True)
class RelationUse:
    """A relation that rows were written with."""

    relation: Relation
    version: int
    """The first commit with such rows."""


@dataclass(frozen=True)
class Truncation:
    """Relations that a commit has emptied."""

    relations: list[Relation]
    version: int


@dataclass(frozen=True)
class LogRelations:
    """The relations in a range of the log, each list in the log's order."""

    uses: list[RelationUse]
    emptied: list[Truncation]
    others: list[Relation]
    """Relations without rows of their own: partitions, whose rows come under another name."""


class Slot:
    """A slot and the publication that is read through it.

    Parameters
    ----------
    server
        The way to it.
    name, publication
        Their names.
    lag_warning
        Retained bytes from which on a warning is logged, once for each doubling; 0 for none.
    """

    def __init__(self, server: Server, name: str, publication: str, lag_warning: int) -> None:
        self._server, self.name, self._publication = server, name, publication
        self._warned_at, self._lag_warning = lag_warning, lag_warning
        self._chosen: dict[str, int] | None = None
        self._moved_to = 0

    def choose(self, tables: Mapping[str, int] | None) -> None:
        """Look at the rows of some tables only, by name and object id."""
        self._chosen = None if tables is None else dict(tables)

    def check_server(self) -> None:
        """Refuse a server that cannot decode its log.

        Raises
        ------
        FeedUnavailable
            SERVER_TOO_OLD, WAL_LEVEL or ENCODING.
        """
        (found,) = self._server.all("server")
        if found.version < _OLDEST_SERVER:
            raise self._server.unavailable(
                "SERVER_TOO_OLD",
                f"the server is PostgreSQL {found.version // 10_000}: a feed needs 13 or later",
            )
        if found.wal_level != "logical":
            raise self._server.unavailable("WAL_LEVEL", WAL_LEVEL)
        if found.encoding == "SQL_ASCII":
            raise self._server.unavailable(
                "ENCODING", "the database's encoding is SQL_ASCII, which does not say what its text means"
            )

    def find(self) -> SlotState | None:
        """Where the slot stands; None when there is none.

        Raises
        ------
        FeedUnavailable
            PUBLICATION_MISSING, or SLOT_UNUSABLE when it is no slot of pgoutput's in this database.
        DataLost
            When the server has let go of the log.
        """
        (found,) = self._server.all("slot", slot=self.name, publication=self._publication)
        if not found.published:
            raise missing_publication(self._server, self._publication)
        if found.plugin is None and found.type is None:
            return None
        if found.type != "logical" or found.plugin != "pgoutput" or found.database != found.here:
            raise self._server.unavailable(
                "SLOT_UNUSABLE",
                f"the slot {self.name!r} is {found.type}, with plugin {found.plugin}, in database {found.database}: it has to be "
                f"a logical one with pgoutput in {found.here}; take another name",
            )
        if found.wal_status == "lost" or found.reason:
            raise self._server.lost_slot(found.reason or f"wal_status is {found.wal_status}")
        if found.confirmed is None:
            return SlotState(int(found.flushed), int(found.flushed), 0, ready=False)
        state = SlotState(int(found.flushed), int(found.restart), int(found.confirmed))
        self._warn(state.lag)
        return state

    def state(self) -> SlotState:
        """Where the slot stands.

        Raises
        ------
        FeedUnavailable
            SLOT_MISSING too.
        """
        found = self.find()
        if found is None:
            raise self.missing()
        if not found.ready:
            raise SlotInUse(
                f"the slot {self.name!r} is being made: that waits for all transactions to end that are open now"
            )
        return found

    def missing(self) -> FeedUnavailable:
        (found,) = self._server.all("server")
        failover = ", failover => true" if found.version >= FAILOVER_SINCE else ""
        return self._server.unavailable(
            "SLOT_MISSING",
            f'there is no replication slot {self.name!r}. With snapshot="initial", the default, a streaming query with a new '
            "checkpoint makes one, and reads the rows that are there first; so does one that has lost its slot, and with it the changes "
            'since: let it start over into an empty or another sink. For snapshot="none", '
            f"select pg_create_logical_replication_slot('{self.name}', 'pgoutput'{failover}) makes one that starts now",
            slot=self.name,
        )

    def used(self, oldest: int) -> FeedUnavailable:
        return self._server.unavailable(
            "SLOT_USED",
            f"the slot {self.name!r} has been read up to {oldest}, or was made by hand: a query with a new checkpoint would miss "
            "what came before that, the rows of its beginning among it. Go on with the checkpoint of the query that has read it. Or "
            f"start over: select pg_drop_replication_slot('{self.name}'), empty the sink or take another one, which would keep what "
            "was deleted meanwhile, and the next start makes a slot with the rows as they are. Or take what is left with "
            'snapshot="none" (snapshot=none in the URL)',
            slot=self.name,
            oldest=oldest,
        )

    def others(self) -> list[int]:
        """Relations whose rows are left out."""
        chosen = self._chosen
        oids = None if chosen is None else list(chosen.values())
        return [row.oid for row in self._server.all("others", chosen=oids, names=list(chosen or ()))]

    def has_changes(self, after: int, upto: int) -> bool:
        """Whether some commit of a range has rows."""
        others, messages = self.others(), 1
        while True:
            (found,) = self._server.all(
                "probe", **self._bounds(upto), messages=messages, after=after, others=others
            )
            if (found.last_change or 0) > (found.behind or 0):
                return True
            if found.messages < messages:
                return False
            messages = min(messages * _GROWTH**2, _MOST_MESSAGES)

    def commits(self, after: int, upto: int, rows: int | None) -> Iterator[Commit]:
        """The commits of a range that have rows; more and more of the log is decoded as they are asked for."""
        others, messages = self.others(), (rows or 5_000) + 1_000
        while True:
            seen = 0
            found = self._server.rows("commits", **self._bounds(upto), messages=messages, others=others)
            with closing(found):
                for row in found:
                    seen = row.number
                    if row.rows and after < row.version <= upto:
                        after = row.version
                        yield Commit(row.version, row.timestamp, row.rows)
            if seen < messages:
                return
            messages = min(messages * _GROWTH, _MOST_MESSAGES)

    def relations(
        self, after: int, upto: int, *, skipped: Collection[int] = (), messages: int | None = None
    ) -> LogRelations:
        """The relations of the rows of a range, and what it empties.

        Parameters
        ----------
        skipped
            Commits that do not count.
        messages
            About how many messages of the log to look at; all when None.
        """
        rows = self._server.all(
            "relations",
            **self._bounds(upto),
            messages=messages,
            after=after,
            skipped=list(skipped),
            others=self.others(),
        )
        known: dict[int, Relation] = {}
        uses: dict[Relation, RelationUse] = {}
        emptied = []
        for row in rows:
            if row.oid is not None:
                relation = known[row.oid]
                if row.version <= upto:
                    uses.setdefault(relation, RelationUse(relation, row.version))
            elif row.data[:1] == b"R":
                relation = Relation.of(row.data)
                known[relation.oid] = relation
            elif after < row.version <= upto and row.version not in skipped:
                oids = truncated_relations(row.data)
                emptied.append(Truncation([known[oid] for oid in oids if oid in known], row.version))
        with_rows = {relation.oid for relation in uses}
        with_rows |= {relation.oid for each in emptied for relation in each.relations}
        others = [relation for oid, relation in known.items() if oid not in with_rows]
        return LogRelations(list(uses.values()), emptied, others)

    def descriptions(self, upto: int) -> list[Relation] | None:
        """The relations that the log describes up to a commit, with rows or without; None where it empties some."""
        found = [row.data for row in self._server.all("descriptions", **self._bounds(upto))]
        if any(data[:1] == TRUNCATE for data in found):
            return None
        return [Relation.of(data) for data in found]

    def messages(self, upto: int) -> Generator[list[bytes], None, None]:
        """All messages up to a commit, in chunks; from the slot's position on."""
        if self._chosen is None:
            return self._server.chunks("messages", **self._bounds(upto))
        return self._server.chunks("chosen_messages", **self._bounds(upto), others=self.others())

    def advance(self, upto: int) -> None:
        """Let the server go of everything up to a commit."""
        # A commit is skipped when it begins before the slot's position.
        position = upto + 1
        if position <= self._moved_to:
            return
        if self.state().confirmed < position:
            self._server.all("advance", slot=self.name, upto=lsn(position))
        self._moved_to = position

    def drop(self) -> None:
        self._server.all("drop_slot", slot=self.name)
        log.info("the slot %s is dropped", self.name, extra={"action": "slot_dropped", "slot": self.name})

    def _bounds(self, upto: int) -> dict[str, str]:
        # Decoding stops behind the first record that reaches the position, which has to be the commit's own.
        names = quoted([self._publication])
        return {"slot": self.name, "upto": lsn(upto + 1), "names": names}

    def _warn(self, lag: SlotLag) -> None:
        if not self._lag_warning:
            return
        if lag.retained < self._lag_warning:
            self._warned_at = self._lag_warning
        elif lag.retained >= self._warned_at:
            self._warned_at = 2 * lag.retained
            log.warning(
                "the slot %s keeps %.1f MiB of log on the server: does its query run and keep up? A slot that nobody reads has to "
                "be dropped",
                self.name,
                lag.retained / 2**20,
                extra={"action": "slot_lag", "slot": self.name, "retained_bytes": lag.retained},
            )
