"""Decoded changes as change rows in a read's schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import FeedUnavailable
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    DELETE,
    INSERT,
    POSTIMAGE,
    PREIMAGE,
)
from penstock.feeds.postgres import pgoutput
from penstock.feeds.postgres.catalog import KEY, SEQUENCE, TABLE, UNCHANGED_COLUMNS, Table, Tables
from penstock.feeds.postgres.pgoutput import Changes, Relation
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.values import from_text, held
from penstock.feeds.protocol import INSTANT

_TYPES = pa.array([INSERT, DELETE, PREIMAGE, POSTIMAGE])
_INSERT, _DELETE, _PREIMAGE, _POSTIMAGE = range(4)
_BARE = {20, 21, 23, 26}
"""Whole numbers, whose text is JSON already."""
SNAPSHOTS = "penstock_snapshots"


class Rows:
    """Makes the rows of one read.

    Parameters
    ----------
    tables
        The tables as the query is planned with them.
    schema
        The columns to give.
    name
        The feed, for messages.
    first
        The commit with which the range begins, for messages.
    accepted
        As for :class:`Fit`.
    nulls_invalid
        Whether values that a type cannot hold are null.
    may_skip
        Whether a commit of the range can be left out; the snapshot cannot.
    """

    def __init__(
        self,
        tables: Tables,
        schema: pa.Schema,
        name: str,
        first: int,
        accepted: Collection[str],
        *,
        nulls_invalid: bool,
        may_skip: bool,
    ) -> None:
        self._tables, self._schema, self._name, self._first = tables, schema, name, first
        self._columns = tables.columns()
        self.fit = Fit(tables, selected_columns(tables, schema), accepted)
        self._known: dict[Relation, Table] = {}
        self.nulls_invalid, self._may_skip = nulls_invalid, may_skip
        self.invalid: Counter[tuple[str, str]] = Counter()
        """Values that are null since their type cannot hold them, by table and column."""

    def wanted(self, relation: Relation, version: int) -> bool:
        """Whether a relation's rows belong to the feed.

        Raises
        ------
        FeedUnavailable
            When they do, and cannot be read as the query is planned.
        """
        if relation.schema == SNAPSHOTS:
            return False
        table = self.fit.table_of(relation)
        change = table if isinstance(table, SchemaChange) else None
        if isinstance(table, Table):
            self._known[relation] = table
            change = self.fit.change(table, relation)
        if change is not None:
            raise change.in_range(self._name, self._first, version)
        return table is not None

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

    def not_held(
        self, table: Table, field: pa.Field, value: str | None, version: int, why: str
    ) -> FeedUnavailable:
        """A value that its column cannot hold."""
        skip = f"; or leave the commit out, skip=[{version}]" if self._may_skip else ""
        return FeedUnavailable(
            f"{self._name}: {table.name} has {field.name} = {value!r} in commit {version}, which {field.type} cannot hold{why}. Read "
            f"the column as text, types={{{field.name!r}: 'text'}}; or have NULL in its place, "
            f"invalid_values='null'{skip}",
            condition="FEED_UNAVAILABLE.VALUE",
            table=table.name,
            column=field.name,
            version=version,
        )

    def note_invalid(self, table: Table, field: pa.Field, count: int) -> None:
        """Count values that are given as null."""
        self.invalid[table.name, field.name] += count

    def key_unknown(self, table: Table, column: str) -> FeedUnavailable:
        """A row that is not identified."""
        return FeedUnavailable(
            f"{self._name}: a change of {table.name} came without {column!r}, by which its rows are identified. A partition with "
            "another replica identity does that: alter table … replica identity default, for each partition, and start over with a "
            "new slot and a new checkpoint",
            condition="FEED_UNAVAILABLE.KEY_UNKNOWN",
            table=table.name,
            column=column,
        )


def selected_columns(tables: Tables, schema: Iterable[pa.Field]) -> dict[str, Collection[str]]:
    """Which columns of the tables a read has, by table."""
    fields = {field.name: field for field in schema}
    if not tables.several:
        return {tables.tables[0].name: set(fields)}
    return {
        table.name: {field.name for field in fields[name].type}
        for name, table in tables.columns().items()
        if name in fields
    }


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
        """A column in the type that is asked for."""
        text = self._kept_text(self._places[field.name])
        try:
            found = from_text(text, field.type)
        except pa.ArrowInvalid as error:
            found = from_text(self._held(text, field, str(error)), field.type)
        if found.null_count and not field.nullable:
            raise self._rows.key_unknown(self._table, field.name)
        return found

    def _held(self, text: pa.StringArray, field: pa.Field, why: str) -> pa.StringArray:
        """The values that a type has, and null for others, where that is wanted."""
        valid = pc.fill_null(held(text, field.type), True)
        wrong = np.flatnonzero(~valid.to_numpy(zero_copy_only=False))
        if not len(wrong) or not self._rows.nulls_invalid or not field.nullable:
            first = int(wrong[0]) if len(wrong) else None
            version = int(self.kept(self.changes.version)[first or 0])
            value = None if first is None else text[first].as_py()[:100]
            why = "" if len(wrong) else f" ({why[:200]})"
            raise self._rows.not_held(self._table, field, value, version, why)
        self._rows.note_invalid(self._table, field, len(wrong))
        return pc.if_else(valid, text, pa.scalar(None, pa.string()))

    def _kept_text(self, place: int) -> pa.StringArray:
        text = self.text(place)
        return text if self.keep is None else text.filter(pa.array(self.keep))

    def unchanged(self) -> pa.ListArray:
        """The names of the columns whose values are not known, for each row; null where all are."""
        found = {
            column.name: self.kept(self.changes.unknown(self._places[column.name]))
            for column in self._table.relation.columns
            if column.name in self._places
        }
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
        if not self._table.key:
            return pa.repeat("{}", self.count)
        parts: list[Any] = []
        for name in self._table.key:
            place = self._places[name]
            text = self._kept_text(place)
            if self._table.keyed and text.null_count:
                raise self._rows.key_unknown(self._table, name)
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
