"""Lookahead of a stream: it may read up to the first commit whose rows do not fit its plan.

The end of a micro-batch is logged before its rows are read. If it lay after a change of a table, no plan
could read the micro-batch, and the query could never resume; so the log is searched first, unless the catalog
proves that no table was changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres import schema_changes, unlogged
from penstock.feeds.postgres.catalog import Table, Tables, published
from penstock.feeds.postgres.pgoutput import Relation
from penstock.feeds.postgres.publication import KeptState, PublicationState, state_of, tables_left
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.slot import LogRelations, Slot
from penstock.feeds.postgres.timelines import require_same_history
from penstock.feeds.postgres.unlogged import Unlogged
from penstock.json_text import Json

log = logging.getLogger("penstock.feeds")


class Lookahead:
    """Searches the log ahead of a stream that reads some columns (all when None) of planned tables."""

    def __init__(
        self,
        settings: FeedSettings,
        server: Server,
        slot: Slot,
        tables: Tables,
        columns: Sequence[str] | None,
    ) -> None:
        self._settings, self._server, self._slot, self._tables = settings, server, slot, tables
        self._name = settings.name
        read = [field for field in tables.schema() if columns is None or field.name in columns]
        self._fit = Fit(tables, tables.selected_columns(read), settings.accept or ())
        self._verified: PublicationState | None = None
        self._states: list[tuple[int, PublicationState]] = []
        """States of the publication, each with the end of the log when it was loaded, the oldest first."""
        self._is_new = True

    def end(self, after: int, upto: int, before: Json | None, *, rows_before: bool) -> int:
        """Return the version up to which the stream can read.

        Parameters
        ----------
        after, upto
            The commits to search.
        before
            The state that the stream has kept with ``after``.
        rows_before
            Whether there are rows to read before them.
        """
        # In this order: a holder of a lock may have committed already, which is visible only once the lock is
        # released.
        (changing,) = self._server.fetch("changing")
        kept = None if before is None else KeptState.from_json(before)
        known = None if kept is None else kept.newest
        if kept is not None and not self._states:
            self._states.append((kept.since, kept.newest))
        if changing.alone and known is not None:
            # Listing the tables would wait for that transaction. The next call compares with the same state
            # as this one.
            (now,) = self._server.fetch("transaction")
            require_same_history(self._server, known.timeline, now.timeline, after)
            state, busy = known, True
        else:
            state, busy = self._current_state(known, after), changing.busy
        if not busy and self._is_verified(state, after, upto):
            return upto
        log_relations = self._slot.relations(after, upto, skipped=self._settings.skip or ())
        self._refuse_passing_partitions(log_relations.others, known, state)
        self._refuse_passing_tables(log_relations.uses, known, state)
        fitting = self._fitting(log_relations, upto, state, rows_before)
        self._refuse_doubtful(log_relations, fitting, None if kept is None else kept.earlier, state)
        settled = fitting == upto and not busy and self._catalog_fits(state)
        self._verified = state if settled else None
        return fitting

    def _current_state(self, known: PublicationState | None, after: int) -> PublicationState:
        """Load the state of the publication; refuse unlogged changes since the known one and the last one."""
        state = state_of(self._server, self._settings.publication, self._tables)
        last = self._states[-1][1] if self._states else None
        for earlier in [known] if last is known else [known, last]:
            if earlier is not None:
                require_same_history(self._server, earlier.timeline, state.timeline, after)
                self._refuse_unlogged(earlier, state)
        state = state if last is None else state.remembering(last)
        self._note(state, after)
        return state

    def state_at(self, upto: int, before: Json | None) -> Json | None:
        """Return the last known state of the publication, to be kept with a version.

        With it comes the last one that is not newer than the version, if its columns or keys are others: rows
        that come next may be from between the two.
        """
        if not self._states:
            return before
        since, now = self._states[-1]
        noted = [state for position, state in self._states if position <= upto]
        if noted:
            return KeptState(now, since, noted[-1]).to_json()
        earlier = now if before is None else KeptState.from_json(before).earlier
        return KeptState(now, since, earlier).to_json()

    def _note(self, state: PublicationState, after: int) -> None:
        """Remember a state, and forget those that are older than the start of the stream needs."""
        if not self._states or self._states[-1][1].definitions() != state.definitions():
            (row,) = self._server.fetch("position")
            self._states.append((int(row.position), state))
        older = sum(position <= after for position, _ in self._states)
        del self._states[: max(0, older - 1)]

    def _is_verified(self, state: PublicationState, after: int, upto: int) -> bool:
        """Whether everything can be read, since no table has changed since a search showed so."""
        if self._verified is None or self._verified.definitions() != state.definitions():
            return False
        if self._tables.chosen or upto <= after:
            return True
        # A table that was created, published and dropped since then leaves no trace in the catalog.
        described = self._slot.descriptions(upto)
        return described is not None and not any(
            isinstance(self._fit.reads(relation), SchemaChange) for relation in described
        )

    def _refuse(self, changes: Sequence[Unlogged]) -> None:
        unlogged.refuse(self._name, changes, self._settings.accept or ())

    def _refuse_unlogged(self, before: PublicationState, now: PublicationState) -> None:
        changes = unlogged.changes_between(
            self._server,
            self._settings.publication,
            before,
            now,
            self._tables,
            self._columns_read(now),
            keeps_emptied=self._settings.truncate == "skip",
        )
        self._refuse(changes)
        altered = unlogged.altered_columns(before, now) if self._is_new else []
        self._is_new = False
        if altered:
            log.warning(
                "columns have changed since the end of the checkpoint: %s. Rows that were written before "
                "keep the values that were logged then",
                "; ".join(altered),
                extra={"action": "columns_changed", "slot": self._settings.slot, "columns": altered},
            )

    def _columns_read(self, now: PublicationState) -> dict[str, list[str]]:
        """Return the columns that are read, by the current name of their table."""
        return {name: self._fit.columns_of(oid, name) for oid, name in now.names.items()}

    def _refuse_doubtful(
        self, log: LogRelations, upto: int, before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse rows whose columns may be others than those of the same names are now, or whose key may."""
        changes: dict[str, Unlogged] = {}
        columns_read = self._columns_read(now)
        for relation, version in log.uses.items():
            earlier = [state for position, state in self._states if position < version][-1:]
            known = earlier[0] if earlier else before
            if known is not None and version <= upto:
                columns = unlogged.doubtful_columns(relation, known, now, columns_read)
                keys = unlogged.doubtful_keys(relation, known, now) if self._tables.changes_rows else ()
                changes |= {change.token: change for change in chain(columns, keys)}
        self._refuse(list(changes.values()))

    def _refuse_passing_partitions(
        self, others: Sequence[tuple[Relation, int]], before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse partitions that were attached and detached since the log was last searched."""
        latest = {relation.oid: relation for relation, _ in others}
        known = set(chain.from_iterable(now.partitions.values()))
        if before is not None:
            known.update(chain.from_iterable(before.partitions.values()))
        changes = unlogged.passed_partitions(
            self._server,
            self._tables,
            [relation for oid, relation in latest.items() if oid not in known],
            keeps_emptied=self._settings.truncate == "skip",
        )
        self._refuse(changes)

    def _refuse_passing_tables(
        self, relations: Iterable[Relation], before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse tables that have left the publication since the log was last searched, or that took the
        name of an earlier one.
        """
        read = [relation for relation in relations if self._fit.reads(relation) is not None]
        gone = unlogged.unpublished_tables(self._server, self._settings.publication, read, before, now)
        self._refuse([*gone, *unlogged.recreated_tables(read, before, now)])

    def _fitting(self, relations: LogRelations, upto: int, state: PublicationState, rows_before: bool) -> int:
        """Return the version before the first commit that cannot be read; raise if no row comes before."""
        uses = [(version, self._table_of(relation, state)) for relation, version in relations.uses.items()]
        readable: dict[str, int] = {}
        for version, table in uses:
            if isinstance(table, Table):
                readable.setdefault(table.name, version)
        refused = self._refused(relations, uses, readable)
        if refused:
            version, error = min(refused, key=itemgetter(0))
            if rows_before or min(readable.values(), default=version) < version:
                return version - 1
            raise error
        removed = [table for table in tables_left(self._tables, state) if table.name not in readable]
        if removed and not rows_before:
            raise schema_changes.table_removed(self._name, removed[0])
        return upto

    def _refused(
        self,
        relations: LogRelations,
        uses: Iterable[tuple[int, Table | SchemaChange | None]],
        readable: Mapping[str, int],
    ) -> list[tuple[int, FeedUnavailableError]]:
        """Return the commits that cannot be read, each with the error."""
        refused = []
        for version, change in uses:
            if isinstance(change, SchemaChange):
                within = readable.get(change.parameters.get("table", "")) == version
                error_of = change.in_one_commit if within else change.in_stream
                refused.append((version, error_of(self._name, version)))
        for truncation in relations.truncations:
            error = schema_changes.truncated(self._settings, self._fit, truncation)
            if error is not None:
                refused.append((truncation.version, error))
        return [*refused, *other_identities(self._name, self._server, self._tables, relations)]

    def _table_of(self, relation: Relation, state: PublicationState) -> Table | SchemaChange | None:
        table = self._fit.reads(relation)
        if not isinstance(table, Table):
            return table
        return self._other_primary_key(table, relation, state) or table

    def _other_primary_key(
        self, table: Table, relation: Relation, state: PublicationState
    ) -> SchemaChange | None:
        """With replica identity full, only the catalog has the primary key."""
        name = state.names.get(relation.oid)
        if name is None or not self._tables.changes_rows:
            return None
        if relation.identity != "f" or state.keys[name].identity != "f":
            return None
        columns, primary = set(relation.names), state.primary_key(name)
        key = primary if primary and primary <= columns else columns
        return schema_changes.key_changed(table, sorted(key)) if key != set(table.key) else None

    def _catalog_fits(self, state: PublicationState) -> bool:
        """Whether future rows can be read as long as no table is changed."""
        tables, _ = published(self._server, self._settings.publication)
        now = {table.name: table for table in tables}
        if any(table.partitioned for table in self._tables.tables):
            # A partition that is attached and detached leaves no trace in the catalog.
            return False
        fitting = all(
            name in now and isinstance(self._table_of(now[name].relation, state), Table)
            for name in state.tables
        )
        return fitting and not tables_left(self._tables, state)


def other_identities(
    name: str, server: Server, tables: Tables, relations: LogRelations
) -> Iterator[tuple[int, FeedUnavailableError]]:
    """Yield the commits from which on a partition logs other key columns than its table has.

    A change of the table's key is then logged as if the key had stayed the same. A form that another one has
    followed before the table's first row in the range does not count.
    """
    forms = relations.others
    if not (forms and tables.changes_rows and any(table.partitioned for table in tables.tables)):
        return
    oids = [partition.oid for partition, _ in forms]
    roots = {row.oid: row.root for row in server.fetch("partition_roots", oids=oids)}
    used: dict[int, int] = {}
    for relation, version in relations.uses.items():
        used[relation.oid] = min(version, used.get(relation.oid, version))
    for place, (partition, version) in enumerate(forms):
        root = roots.get(partition.oid, 0)
        table, first = tables.by_oid.get(root), used.get(root)
        if table is None or not table.partitioned or first is None or not logs_other_key(partition, table):
            continue
        later = [until for following, until in forms[place + 1 :] if following.oid == partition.oid]
        if not later or later[0] > first:
            yield version, schema_changes.partition_key(name, table, partition, version)


def logs_other_key(partition: Relation, table: Table) -> bool:
    """Whether changes of a partition are logged without a key column of its table.

    Without any key column PostgreSQL refuses changes, and a column of another name was renamed.
    """
    key, logged = set(table.key), partition.identifying
    return bool(logged) and key.issubset(partition.names) and not key.issubset(logged)
