"""How far a stream may read: up to the first commit whose rows do not fit its plan.

The end of a micro-batch is logged before its rows are read. One that went past a change of a table could be read by no plan, and
the query could never go on; so the log is looked through first, unless the catalog proves that nobody has changed a table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.errors import FeedUnavailable
from penstock.feeds.postgres.catalog import Table, Tables, identity_key, published
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.publication import (
    PublicationState,
    altered_columns,
    passed_partitions,
    refusal,
    state_of,
    unlogged_changes,
)
from penstock.feeds.postgres.rows import SNAPSHOTS, selected_columns
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange, key_changed, table_removed
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.slot import LogRelations, Slot

if TYPE_CHECKING:
    from penstock.feeds.postgres.feed import PostgresFeed

log = logging.getLogger("penstock.changes")
NOTHING = LogRelations([], [], [])


@dataclass(frozen=True)
class _Refused:
    """The first commit that cannot be read, and why."""

    version: int
    error: FeedUnavailable


class Lookahead:
    """Looks through the log ahead of a stream.

    Parameters
    ----------
    feed, server, slot
        What is read.
    tables
        The tables as the query is planned with them.
    columns
        The names of the columns that it reads; all when None.
    """

    def __init__(
        self,
        feed: PostgresFeed,
        server: Server,
        slot: Slot,
        tables: Tables,
        columns: Sequence[str] | None,
    ) -> None:
        self._feed, self._server, self._slot, self._tables = feed, server, slot, tables
        read = [field for field in tables.schema() if columns is None or field.name in columns]
        self._fit = Fit(tables, selected_columns(tables, read), feed.accept or ())
        self._verified: PublicationState | None = None
        self._is_new = True

    def end(
        self, after: int, upto: int, before: Mapping[str, Any] | None, *, rows_before: bool
    ) -> tuple[int, PublicationState]:
        """The end of what can be read, and the state of the publication with it.

        Parameters
        ----------
        after, upto
            The commits to look at.
        before
            The state that the stream has kept with ``after``.
        rows_before
            Whether there is something to read before them.

        Raises
        ------
        FeedUnavailable
            When the first rows cannot be read as the query is planned, or rows have come or gone without being logged.
        """
        # In this order: who holds a lock may have committed already, and cannot be seen before the lock is gone.
        (changing,) = self._server.all("changing")
        known = None if before is None else PublicationState.from_json(before)
        if changing.alone and known is not None:
            # The tables could be listed only behind that transaction. The next look compares with the same state as this one.
            state, busy = known, True
        else:
            state, busy = state_of(self._server, self._feed.publication, self._tables), changing.busy
            if known is not None:
                self._refuse_unlogged(known, state)
        if busy or not self._is_verified(state, after, upto):
            log_relations = (
                self._slot.relations(after, upto, skipped=self._feed.skip or ()) if upto > after else NOTHING
            )
            self._refuse_passing_partitions(log_relations.others, before, state)
            fitting = self._fitting(log_relations, upto, state, rows_before)
            settled = fitting == upto and not busy and self._catalog_fits(state)
            self._verified = state if settled else None
            upto = fitting
        return upto, state

    def _is_verified(self, state: PublicationState, after: int, upto: int) -> bool:
        """Whether all can be read, since nobody has changed a table since that was so."""
        if self._verified is None or self._verified.definitions() != state.definitions():
            return False
        if self._tables.chosen or upto <= after:
            return True
        # A table that was made, published and dropped since leaves nothing in the catalog.
        described = self._slot.descriptions(upto)
        return described is not None and all(self._is_readable(relation) for relation in described)

    def _is_readable(self, relation: Relation) -> bool:
        table = self._fit.table_of(relation)
        return relation.schema == SNAPSHOTS or (
            isinstance(table, Table) and self._fit.change(table, relation) is None
        )

    def _refuse_unlogged(self, before: PublicationState, now: PublicationState) -> None:
        found = unlogged_changes(
            self._server,
            self._feed.publication,
            before,
            now,
            self._tables,
            self._fit.columns(),
            keeps_emptied=self._feed.truncate == "skip",
        )
        error = refusal(self._feed.name, found, self._feed.accept or ())
        if error is not None:
            raise error
        altered = altered_columns(before, now) if self._is_new else []
        self._is_new = False
        if altered:
            log.warning(
                "columns are not what they were at the end of the checkpoint: %s. Rows that were written before have in them what was "
                "logged then",
                "; ".join(altered),
                extra={"action": "columns_changed", "slot": self._feed.slot, "columns": altered},
            )

    def _refuse_passing_partitions(
        self, others: Sequence[Relation], before: Mapping[str, Any] | None, now: PublicationState
    ) -> None:
        """Refuse partitions that have come and gone since the log was looked through last."""
        known = set(chain.from_iterable(now.partitions.values()))
        if before is not None:
            known |= set(chain.from_iterable(before["partitions"].values()))
        found = passed_partitions(
            self._server,
            self._tables,
            [relation for relation in others if relation.oid not in known],
            keeps_emptied=self._feed.truncate == "skip",
        )
        error = refusal(self._feed.name, found, self._feed.accept or ())
        if error is not None:
            raise error

    def _fitting(self, relations: LogRelations, upto: int, state: PublicationState, rows_before: bool) -> int:
        readable: dict[str, int] = {}
        refused = self._first_refused(relations, readable)
        if refused is None:
            if not rows_before:
                self._require_published(state, readable)
            return upto
        if rows_before or min(readable.values(), default=refused.version) < refused.version:
            return refused.version - 1
        raise refused.error

    def _first_refused(self, relations: LogRelations, readable: dict[str, int]) -> _Refused | None:
        """The first commit that cannot be read; the tables of those before it go to ``readable``, with their first commit."""
        found = [(use.version, self._table_of(use.relation)) for use in relations.uses]
        for version, table in found:
            if isinstance(table, Table):
                readable.setdefault(table.name, version)
        refused = []
        for version, change in found:
            if isinstance(change, SchemaChange):
                within = readable.get(change.parameters.get("table", "")) == version
                told = change.in_one_commit if within else change.in_stream
                refused.append(_Refused(version, told(self._feed.name, version)))
        for each in relations.emptied:
            error = truncation(self._feed, self._fit, each.relations, each.version)
            if error is not None:
                refused.append(_Refused(each.version, error))
        return min(refused, key=lambda each: each.version, default=None)

    def _table_of(self, relation: Relation) -> Table | SchemaChange | None:
        if relation.schema == SNAPSHOTS:
            return None
        table = self._fit.table_of(relation)
        if not isinstance(table, Table):
            return table
        return self._fit.change(table, relation) or self._other_primary_key(table, relation) or table

    def _other_primary_key(self, table: Table, relation: Relation) -> SchemaChange | None:
        """With the replica identity full, the catalog alone has the primary key."""
        if relation.identity != "f" or not self._tables.changes_rows:
            return None
        now = next((each for each in self._published() if each.relation.oid == relation.oid), None)
        if now is None or now.relation.identity != "f":
            return None
        key, _ = identity_key(relation, now)
        return key_changed(table, key) if set(key) != set(table.key) else None

    def _require_published(self, state: PublicationState, readable: Mapping[str, int]) -> None:
        for table in self._gone(state):
            if table.name not in readable:
                raise table_removed(self._feed.name, table)

    def _gone(self, state: PublicationState) -> list[Table]:
        """The tables that the publication does not have any more."""
        oids = {int(entry.partition(".")[0]) for entry in state.tables.values()}
        return [
            table
            for table in self._tables.tables
            if table.relation.oid not in oids and table.name not in state.tables
        ]

    def _catalog_fits(self, state: PublicationState) -> bool:
        """Whether rows that are written from now on can be read, as long as nobody changes a table."""
        now = {table.name: table for table in self._published()}
        if any(table.partitioned for table in self._tables.tables):
            # A partition that comes and goes leaves nothing in the catalog.
            return False
        fitting = all(
            name in now and isinstance(self._table_of(now[name].relation), Table) for name in state.tables
        )
        return fitting and not self._gone(state)

    def _published(self) -> Sequence[Table]:
        return published(self._server, self._feed.publication)[0]


def truncation(
    feed: PostgresFeed, fit: Fit, relations: Sequence[Relation], version: int
) -> FeedUnavailable | None:
    """The error of a TRUNCATE of some relations, where it matters."""
    if feed.truncate == "skip":
        return None
    names = ", ".join(relation.name for relation in relations if isinstance(fit.table_of(relation), Table))
    if not names:
        return None
    return FeedUnavailable(
        f"{feed.name}: TRUNCATE has emptied {names} in commit {version}, and a feed of rows cannot say which rows went: start over "
        'with a new slot, a new checkpoint and an empty sink, or continue with truncate="skip" where the rows may stay; '
        "publish = 'insert, update, delete' leaves later ones out",
        condition="FEED_UNAVAILABLE.TRUNCATED",
        tables=names,
        version=version,
    )
