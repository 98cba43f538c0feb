"""Decoded changes as change rows in a read's schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    DELETE,
    INSERT,
    POSTIMAGE,
    PREIMAGE,
)
from penstock.changes.feeds.changelog import INSTANT
from penstock.changes.feeds.postgres import pgoutput
from penstock.changes.feeds.postgres.catalog import KEY, SEQUENCE, TABLE, UNCHANGED_COLUMNS, Table, Tables
from penstock.changes.feeds.postgres.pgoutput import Changes, Relation
from penstock.changes.feeds.postgres.values import from_text
from penstock.errors import FeedUnavailable

_TYPES = pa.array([INSERT, DELETE, PREIMAGE, POSTIMAGE])
_INSERT, _DELETE, _PREIMAGE, _POSTIMAGE = range(4)
_BARE = {20, 21, 23, 26}
"""Whole numbers, whose text is JSON already."""
_SNAPSHOTS = "penstock_snapshots"


class Rows:
    """Makes the rows of one read.

    Parameters
    ----------
    tables
        The tables as the query knows them.
    schema
        The columns to give.
    name
        The feed, for messages.
    published
        Finds the tables that the publication has now.
    """

    def __init__(
        self, tables: Tables, schema: pa.Schema, name: str, published: Callable[[], Sequence[Table]]
    ) -> None:
        self._tables, self._schema, self._name, self._published = tables, schema, name, published
        self._columns = tables.columns()
        self._known: dict[Relation, Table] = {}

    def wanted(self, relation: Relation) -> bool:
        """Whether a relation's rows belong to the feed.

        What the log tells may be older than what the query knows, or newer: columns and tables that have gone since are left
        out, those that have come since are not.

        Raises
        ------
        FeedUnavailable
            SCHEMA_CHANGED, when a table has got a column or a name that the query does not know, or the publication a table.
        """
        if relation.schema == _SNAPSHOTS:
            return False
        table = self._table_of(relation)
        if table is None:
            return False
        known = {column.name for column in table.relation.columns}
        strange = [column.name for column in relation.columns if column.name not in known]
        if strange:
            now = next((each for each in self._published() if each.name == table.name), table)
            added = [column.name for column in now.relation.columns if column.name in strange]
            if added:
                raise self._changed(
                    f"{table.name} has a column {added[0]!r} that it did not have when the query began",
                    table=table.name,
                )
        self._known[relation] = table
        return True

    def _table_of(self, relation: Relation) -> Table | None:
        for table in self._tables.tables:
            if table.name == relation.name:
                return table
        renamed = next((table for table in self._tables.tables if table.relation.oid == relation.oid), None)
        if renamed is None and not self._tables.several:
            return None
        now = {table.relation.oid: table.name for table in self._published()}
        if renamed is not None:
            if now.get(relation.oid) in (None, renamed.name):
                # It got its name between the row and the query.
                return renamed
            raise self._changed(f"{renamed.name} is called {now[relation.oid]} now", table=renamed.name)
        if relation.name in now.values():
            raise self._changed(f"the publication has a table {relation.name} that it did not have")
        return None

    def _changed(self, what: str, **parameters: Any) -> FeedUnavailable:
        return FeedUnavailable(
            f"{self._name}: {what}: start the query again, which reads the columns anew",
            condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
            **parameters,
        )

    def batch(self, part: Sequence[Changes], done: tuple[int, int]) -> pa.RecordBatch | None:
        """The rows of some changes in their order, without those up to a version and sequence."""
        found = [self._rows(changes, done) for changes in part]
        batches = [rows for rows, _ in found if rows.num_rows]
        if not batches:
            return None
        if len(batches) == 1:
            return batches[0]
        places = np.concatenate([places for _, places in found])
        table = pa.Table.from_batches(batches).combine_chunks()
        return table.take(pa.array(np.argsort(places, kind="stable"))).combine_chunks().to_batches()[0]

    def _rows(self, changes: Changes, done: tuple[int, int]) -> tuple[pa.RecordBatch, Any]:
        table = self._known[changes.relation]
        columns = _TableColumns(self, table, changes)
        kinds, keep = columns.kinds()
        if changes.version[0] <= done[0]:
            keep &= (changes.version > done[0]) | (
                (changes.version == done[0]) & (changes.sequence > done[1])
            )
        columns.keep = None if keep.all() else keep
        arrays = [self._array(field, table, columns, kinds) for field in self._schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return rows, columns.kept(changes.place)

    def _array(self, field: pa.Field, table: Table, columns: _TableColumns, kinds: Any) -> pa.Array:
        changes = columns.changes
        if field.name == CHANGE_TYPE:
            return _TYPES.take(pa.array(columns.kept(kinds)))
        if field.name == COMMIT_VERSION:
            return pa.array(columns.kept(changes.version))
        if field.name == COMMIT_TIMESTAMP:
            return pa.array(columns.kept(changes.timestamp)).view(INSTANT)
        if field.name == SEQUENCE:
            return pa.array(columns.kept(changes.sequence))
        if field.name == UNCHANGED_COLUMNS:
            return columns.unchanged().cast(field.type)
        if not self._tables.several:
            return columns.values(field)
        if field.name == TABLE:
            return pa.repeat(table.name, columns.count)
        if field.name == KEY:
            return columns.key_text()
        if self._columns[field.name] is not table:
            return pa.nulls(columns.count, field.type)
        return pa.StructArray.from_arrays(
            [columns.values(each) for each in field.type], fields=list(field.type)
        )

    def misfit(
        self, table: Table, changes: Changes, column: int, field: pa.Field, why: str
    ) -> FeedUnavailable:
        """A value that its column cannot hold."""
        found = changes.relation.columns[column]
        known = next(each for each in table.relation.columns if each.name == found.name)
        if (found.type, found.modifier) != (known.type, known.modifier):
            return self._changed(
                f"the type of the column {found.name!r} of {table.name} has changed, and this row is of the other type ({why}); "
                "with a new slot where it is older than the query; else",
                table=table.name,
            )
        return FeedUnavailable(
            f"{self._name}: the column {found.name!r} of {table.name} has a value that {field.type} cannot hold ({why}): change "
            "the row, or make the column text or numeric without a precision, which are read as strings; rows that are "
            "in the log already need a new slot",
            condition="FEED_UNAVAILABLE.VALUE",
            table=table.name,
            column=found.name,
        )


class _TableColumns:
    """The columns of some changes of one table."""

    def __init__(self, rows: Rows, table: Table, changes: Changes) -> None:
        self._rows, self._table, self.changes = rows, table, changes
        self._places = {column.name: place for place, column in enumerate(changes.relation.columns)}
        self._text: dict[int, pa.StringArray] = {}
        self.keep: Any = None

    @property
    def count(self) -> int:
        return len(self.changes) if self.keep is None else int(self.keep.sum())

    def kept(self, values: Any) -> Any:
        return values if self.keep is None else values[self.keep]

    def kinds(self) -> tuple[Any, Any]:
        """The change type of each tuple, and whether it is a row.

        An update that changes the key is a delete and an insert. A key from before that is the same tells nothing.
        """
        changes = self.changes
        kind = changes.kind[changes.message]
        found = np.full(len(changes), _POSTIMAGE, np.int8)
        found[kind == pgoutput.INSERT] = _INSERT
        found[kind == pgoutput.DELETE] = _DELETE
        after = np.flatnonzero(changes.partner >= 0)
        keep = np.ones(len(changes), bool)
        if len(after):
            before = changes.partner[after]
            moved = self._differs(before, after)
            found[before] = np.where(moved, _DELETE, _PREIMAGE)
            found[after] = np.where(moved, _INSERT, _POSTIMAGE)
            keep[before] = moved | (changes.marker[changes.message[before]] == pgoutput.OLD)
        return found, keep

    def _differs(self, before: Any, after: Any) -> Any:
        found = np.zeros(len(before), bool)
        for name in self._table.key:
            if name not in self._places:
                continue
            text = self.text(self._places[name])
            left, right = text.take(pa.array(before)), text.take(pa.array(after))
            same = pc.fill_null(pc.equal(left, right), False).to_numpy(zero_copy_only=False)
            both_null = (pc.is_null(left).to_numpy(zero_copy_only=False)) & (
                pc.is_null(right).to_numpy(zero_copy_only=False)
            )
            found |= ~(same | both_null)
        return found

    def text(self, column: int) -> pa.StringArray:
        if column not in self._text:
            self._text[column] = self.changes.text(column)
        return self._text[column]

    def values(self, field: pa.Field) -> pa.Array:
        """A column in the type that is asked for; null where the table did not have it then."""
        place = self._places.get(field.name)
        if place is None:
            return pa.nulls(self.count, field.type)
        text = self._kept_text(place)
        try:
            return from_text(text, field.type)
        except pa.ArrowInvalid as error:
            why = str(error)[:200]
            raise self._rows.misfit(self._table, self.changes, place, field, why) from None

    def _kept_text(self, place: int) -> pa.StringArray:
        text = self.text(place)
        return text if self.keep is None else text.filter(pa.array(self.keep))

    def unchanged(self) -> pa.ListArray:
        """The names of the columns whose values are not known, for each row; null where all are."""
        found = {name: self.kept(self.changes.unknown(place)) for name, place in self._places.items()}
        names = [name for name, mask in found.items() if mask.any()]
        if not names:
            return pa.nulls(self.count, pa.list_(pa.string()))
        masks = np.stack([found[name] for name in names], axis=1)
        row, column = np.nonzero(masks)
        sizes = np.bincount(row, minlength=self.count)
        ends = np.r_[0, np.cumsum(sizes)].astype(np.int32)
        offsets = pa.array(ends, mask=np.r_[sizes == 0, False])
        return pa.ListArray.from_arrays(offsets, pa.array(names).take(pa.array(column)))

    def key_text(self) -> pa.StringArray:
        """The key as the text of a JSON object."""
        parts: list[Any] = []
        for name in self._table.key:
            if name not in self._places:
                continue
            place = self._places[name]
            text = self._kept_text(place)
            if self.changes.relation.columns[place].type not in _BARE:
                text = json_strings(text)
            label = json_strings(pa.array([name]))[0].as_py()
            parts += ["," if parts else "{", f"{label}:", pc.fill_null(text, "null")]
        return pc.binary_join_element_wise(*parts, "}", "")


def json_strings(text: pa.StringArray) -> pa.StringArray:
    """Text as JSON strings."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\x01-\x1f]")).as_py():
        for code in range(1, 32):
            text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', text, '"', "")
