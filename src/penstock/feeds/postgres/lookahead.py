"""Lookahead of a stream: finds the first commit whose rows do not match the plan, before which it has to
stop.

Spark logs the end of a micro-batch before its rows are read. If a table changed within the micro-batch, no
plan could read it, and the query could never resume. Therefore the log is searched first, unless the catalog
shows that no table was changed.
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
from penstock.feeds.postgres.publication import PublicationState, StoredState, removed_tables, state_of
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.slot import LogRelations, Slot
from penstock.feeds.postgres.timelines import require_same_history
from penstock.feeds.postgres.unlogged import Unlogged
from penstock.json_text import Json

log = logging.getLogger("penstock.feeds")


class Lookahead:
    """Search of the log ahead of a stream, which reads the given columns (None for all) of planned tables."""

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
        """States of the publication, oldest first, each with the end of the log when it was loaded."""
        self._is_first_comparison = True

    def end(self, after: int, upto: int, before: Json | None, *, rows_before: bool) -> int:
        """Return the version up to which the stream can read.

        Parameters
        ----------
        after, upto
            The range of commits to search.
        before
            The state that the stream stored with ``after``.
        rows_before
            Whether there are rows to read before this range.
        """
        # Check for locks before loading the state: the change of a transaction that has committed becomes
        # visible only when it releases its locks.
        (changing,) = self._server.fetch("changing")
        stored = None if before is None else StoredState.from_json(before)
        known = None if stored is None else stored.newest
        if stored is not None and not self._states:
            self._states.append((stored.since, stored.newest))
        if changing.alone and known is not None:
            # Listing the tables would wait for that transaction, so keep the known state. The next call
            # compares with it again.
            (now,) = self._server.fetch("transaction")
            require_same_history(self._server, known.timeline, now.timeline, after)
            state, is_changing = known, True
        else:
            state, is_changing = self._current_state(known, after), changing.busy
        if not is_changing and self._is_verified(state, after, upto):
            return upto
        log_relations = self._slot.relations(after, upto, skipped=self._settings.skip or ())
        self._refuse_temporary_partitions(log_relations.others, known, state)
        self._refuse_removed_tables(log_relations.uses, known, state)
        readable_end = self._readable_end(log_relations, upto, state, rows_before)
        self._refuse_ambiguous_columns(
            log_relations, readable_end, None if stored is None else stored.earlier, state
        )
        is_verified = readable_end == upto and not is_changing and self._catalog_fits(state)
        self._verified = state if is_verified else None
        return readable_end

    def _current_state(self, known: PublicationState | None, after: int) -> PublicationState:
        """Load the publication's state; refuse unlogged changes since the stored state and the last one."""
        state = state_of(self._server, self._settings.publication, self._tables)
        last = self._states[-1][1] if self._states else None
        for earlier in [known] if last is known else [known, last]:
            if earlier is not None:
                require_same_history(self._server, earlier.timeline, state.timeline, after)
                self._refuse_unlogged(earlier, state)
        state = state if last is None else state.with_dropped_columns(last)
        self._add_state(state, after)
        return state

    def state_at(self, upto: int, before: Json | None) -> Json | None:
        """Return the last known state of the publication, to be stored with a version.

        It includes the last state that is not newer than the version, if its columns or keys differ, because
        the next rows may have been written between the two states.
        """
        if not self._states:
            return before
        since, now = self._states[-1]
        not_newer = [state for position, state in self._states if position <= upto]
        if not_newer:
            return StoredState(now, since, not_newer[-1]).to_json()
        earlier = now if before is None else StoredState.from_json(before).earlier
        return StoredState(now, since, earlier).to_json()

    def _add_state(self, state: PublicationState, after: int) -> None:
        """Add a state, and drop states that are too old to be needed from ``after`` on."""
        if not self._states or self._states[-1][1].definitions() != state.definitions():
            (row,) = self._server.fetch("position")
            self._states.append((int(row.position), state))
        older = sum(position <= after for position, _ in self._states)
        del self._states[: max(0, older - 1)]

    def _is_verified(self, state: PublicationState, after: int, upto: int) -> bool:
        """Whether a search has shown that all rows can be read, and no table has changed since."""
        if self._verified is None or self._verified.definitions() != state.definitions():
            return False
        if self._tables.chosen or upto <= after:
            return True
        # The catalog does not show a table that was created, published and dropped since then.
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
        altered = unlogged.altered_columns(before, now) if self._is_first_comparison else []
        self._is_first_comparison = False
        if altered:
            log.warning(
                "columns have changed since the end of the checkpoint: %s. Rows that were written before "
                "keep the values in the log",
                "; ".join(altered),
                extra={"action": "columns_changed", "slot": self._settings.slot, "columns": altered},
            )

    def _columns_read(self, now: PublicationState) -> dict[str, list[str]]:
        """Return the columns that are read, by the current name of the table."""
        return {name: self._fit.columns_of(oid, name) for oid, name in now.names.items()}

    def _refuse_ambiguous_columns(
        self, log: LogRelations, upto: int, before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse rows if their columns or key may differ from the current ones with the same names."""
        changes: dict[str, Unlogged] = {}
        columns_read = self._columns_read(now)
        for relation, version in log.uses.items():
            earlier = [state for position, state in self._states if position < version][-1:]
            known = earlier[0] if earlier else before
            if known is not None and version <= upto:
                columns = unlogged.ambiguous_columns(relation, known, now, columns_read)
                keys = unlogged.ambiguous_keys(relation, known, now) if self._tables.changes_rows else ()
                changes |= {change.token: change for change in chain(columns, keys)}
        self._refuse(list(changes.values()))

    def _refuse_temporary_partitions(
        self, others: Sequence[tuple[Relation, int]], before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse partitions that were attached and detached again since the last search of the log."""
        latest = {relation.oid: relation for relation, _ in others}
        known = set(chain.from_iterable(now.partitions.values()))
        if before is not None:
            known.update(chain.from_iterable(before.partitions.values()))
        changes = unlogged.temporary_partitions(
            self._server,
            self._tables,
            [relation for oid, relation in latest.items() if oid not in known],
            keeps_emptied=self._settings.truncate == "skip",
        )
        self._refuse(changes)

    def _refuse_removed_tables(
        self, relations: Iterable[Relation], before: PublicationState | None, now: PublicationState
    ) -> None:
        """Refuse tables that were removed from the publication since the last search of the log, or that have
        the name of an earlier table.
        """
        read = [relation for relation in relations if self._fit.reads(relation) is not None]
        unpublished = unlogged.unpublished_tables(self._server, self._settings.publication, read, before, now)
        self._refuse([*unpublished, *unlogged.recreated_tables(read, before, now)])

    def _readable_end(
        self, relations: LogRelations, upto: int, state: PublicationState, rows_before: bool
    ) -> int:
        """Return the version before the first commit that cannot be read; raise if no row precedes it."""
        uses = [(version, self._table_of(relation, state)) for relation, version in relations.uses.items()]
        readable: dict[str, int] = {}
        for version, table in uses:
            if isinstance(table, Table):
                readable.setdefault(table.name, version)
        refused = self._refused_commits(relations, uses, readable)
        if refused:
            version, error = min(refused, key=itemgetter(0))
            if rows_before or min(readable.values(), default=version) < version:
                return version - 1
            raise error
        removed = [table for table in removed_tables(self._tables, state) if table.name not in readable]
        if removed and not rows_before:
            raise schema_changes.removed_in_stream(self._name, removed[0])
        return upto

    def _refused_commits(
        self,
        relations: LogRelations,
        uses: Iterable[tuple[int, Table | SchemaChange | None]],
        readable: Mapping[str, int],
    ) -> list[tuple[int, FeedUnavailableError]]:
        """Return the commits that cannot be read, each with its error."""
        refused = []
        for version, change in uses:
            if isinstance(change, SchemaChange):
                is_in_one_commit = readable.get(change.parameters.get("table", "")) == version
                error_of = change.in_one_commit if is_in_one_commit else change.in_stream
                refused.append((version, error_of(self._name, version)))
        for truncation in relations.truncations:
            error = schema_changes.truncated(self._settings, self._fit, truncation)
            if error is not None:
                refused.append((truncation.version, error))
        return [*refused, *partition_key_errors(self._name, self._server, self._tables, relations)]

    def _table_of(self, relation: Relation, state: PublicationState) -> Table | SchemaChange | None:
        table = self._fit.reads(relation)
        if not isinstance(table, Table):
            return table
        return self._other_primary_key(table, relation, state) or table

    def _other_primary_key(
        self, table: Table, relation: Relation, state: PublicationState
    ) -> SchemaChange | None:
        """Return a change of the primary key, which only the catalog shows with replica identity full."""
        name = state.names.get(relation.oid)
        if name is None or not self._tables.changes_rows:
            return None
        if relation.identity != "f" or state.keys[name].identity != "f":
            return None
        columns, primary = set(relation.names), state.primary_key(name)
        key = primary if primary and primary <= columns else columns
        return schema_changes.key_changed(table, sorted(key)) if key != set(table.key) else None

    def _catalog_fits(self, state: PublicationState) -> bool:
        """Whether all future rows can be read if no table is changed."""
        tables, _ = published(self._server, self._settings.publication)
        now = {table.name: table for table in tables}
        if any(table.partitioned for table in self._tables.tables):
            # The catalog does not show a partition that is attached and detached again.
            return False
        all_match = all(
            name in now and isinstance(self._table_of(now[name].relation, state), Table)
            for name in state.tables
        )
        return all_match and not removed_tables(self._tables, state)


def partition_key_errors(
    name: str, server: Server, tables: Tables, relations: LogRelations
) -> Iterator[tuple[int, FeedUnavailableError]]:
    """Yield the commits from which on a partition does not log the key columns of its table.

    The log then shows an update of the key as if the key were unchanged. A relation of the partition is
    ignored if another one replaced it before the table's first row in the range.
    """
    relations_of_partitions = relations.others
    if not (
        relations_of_partitions and tables.changes_rows and any(table.partitioned for table in tables.tables)
    ):
        return
    oids = [partition.oid for partition, _ in relations_of_partitions]
    roots = {row.oid: row.root for row in server.fetch("partition_roots", oids=oids)}
    first_uses: dict[int, int] = {}
    for relation, version in relations.uses.items():
        first_uses[relation.oid] = min(version, first_uses.get(relation.oid, version))
    for index, (partition, version) in enumerate(relations_of_partitions):
        root = roots.get(partition.oid, 0)
        table, first = tables.by_oid.get(root), first_uses.get(root)
        if table is None or not table.partitioned or first is None or not logs_other_key(partition, table):
            continue
        later = [
            until
            for following, until in relations_of_partitions[index + 1 :]
            if following.oid == partition.oid
        ]
        if not later or later[0] > first:
            yield version, schema_changes.partition_key(name, table, partition, version)


def logs_other_key(partition: Relation, table: Table) -> bool:
    """Whether changes of a partition are logged without a key column of its table.

    If a partition logs no column at all, PostgreSQL refuses changes. If it lacks a key column, the column was
    renamed.
    """
    key, logged = set(table.key), partition.identifying
    return bool(logged) and key.issubset(partition.names) and not key.issubset(logged)
