"""Conversion of decoded changes to change rows in the schema of a read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.arrow.arrays import lists_of
from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    IS_DELETE,
    IS_INSERT,
    IS_POSTIMAGE,
    IS_PREIMAGE,
    TYPES,
)
from penstock.feeds.postgres import pgoutput, schema_changes
from penstock.feeds.postgres.catalog import KEY, SEQUENCE, TABLE, UNCHANGED_COLUMNS, Table, Tables
from penstock.feeds.postgres.pgoutput import Changes, Decoder, Integers, Item, Mask, Relation, Truncation
from penstock.feeds.postgres.schema_changes import Fit, SchemaChange
from penstock.feeds.postgres.server import START_OVER
from penstock.feeds.postgres.settings import FeedSettings
from penstock.feeds.postgres.values import fits_type, from_text
from penstock.feeds.protocol import INSTANT

log = logging.getLogger("penstock.feeds")
_TYPES = pa.array(TYPES)
_INTEGER_TYPES = {20, 21, 23, 26}
"""Types whose text form is valid JSON."""


class KeyedRows(NamedTuple):
    """The keys of some rows, in log order, for deciding which rows to hold back."""

    keys: Sequence[pa.StringArray]
    """The keys as text, one array for each key column."""
    transactions: Integers
    """The lower 32 bits of the transaction ids."""
    source_rows: Integers
    """For each row, the index of the row with another key that has its missing values, or -1.

    An update that changes the key may have no values for unchanged TOAST columns; the deleted row has them.
    """
    incomplete: Mask
    """The mask of rows with unchanged TOAST values that are not in the log."""

    def filter(self, mask: Mask) -> KeyedRows:
        """Return the rows in a mask; their ``source_rows`` still are indexes of the unfiltered rows."""
        chosen = pa.array(mask)
        keys = [key.filter(chosen) for key in self.keys]
        return KeyedRows(keys, self.transactions[mask], self.source_rows[mask], self.incomplete[mask])


class RowHolder(Protocol):
    """Holds back rows of a table, so that a reader does not return them yet."""

    key: Sequence[str]
    """The key columns of the table."""

    def rows_to_hold(self, rows: KeyedRows) -> Mask:
        """Return the mask of the rows to hold back."""

    def hold(self, rows: pa.RecordBatch, keyed: KeyedRows) -> None:
        """Take the rows that are held back."""


class RowReader:
    """Reader of the rows of one task, which can resume after the last row that it has returned.

    ``first`` is the first commit of the range, for messages. Only commits from the log (``from_log``) can be
    skipped, not those of the snapshot. A ``holder`` requires a feed of one table.
    """

    def __init__(
        self,
        settings: FeedSettings,
        tables: Tables,
        schema: pa.Schema,
        first: int,
        *,
        from_log: bool,
        holder: RowHolder | None = None,
    ) -> None:
        self._holder = holder
        self._settings, self._tables, self.schema = settings, tables, schema
        self._name, self._first, self._from_log = settings.name, first, from_log
        # Columns with the position of the last row, for resuming after a lost connection.
        position = [name for name in (COMMIT_VERSION, SEQUENCE) if schema.get_field_index(name) < 0]
        planned = tables.schema()
        self._columns = pa.schema([*schema, *(planned.field(name) for name in position)])
        self._last = (-1, -1)
        self._structs = tables.columns()
        self.fit = Fit(tables, tables.selected_columns(self._columns), settings.accept or ())
        self._table_of: dict[Relation, Table | None] = {}
        self._invalid: Counter[tuple[str, str]] = Counter()
        """Number of values that were replaced with null, by table and column."""

    def decoder(self, after: int, upto: int) -> Decoder:
        return Decoder(after, upto, self.wants, skipped_commits(self._settings, after, upto))

    def batches(self, decoder: Decoder, chunks: Iterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of messages, except rows that were returned before."""
        for messages in chunks:
            for part in decoder.decode(messages):
                if isinstance(part, Truncation):
                    self.check_truncation(part)
                elif (rows := self.rows_of(part)) is not None:
                    yield rows

    def check_truncation(self, truncation: Truncation) -> None:
        """Refuse a TRUNCATE of a table that is read, unless the settings skip it."""
        if error := schema_changes.truncated(self._settings, self.fit, truncation):
            raise error

    def rows_of(self, part: Sequence[Changes]) -> pa.RecordBatch | None:
        """Return the rows of changes of one or more tables, in log order; None if there are none."""
        rows = self._batch(part)
        if rows is None:
            return None
        self._last = (rows[COMMIT_VERSION][-1].as_py(), rows[SEQUENCE][-1].as_py())
        return rows.select(self.schema.names) if len(rows.schema) > len(self.schema) else rows

    @property
    def place(self) -> tuple[int, int]:
        """The commit of the last row that was read, and the position of the row in it."""
        return self._last

    def resume_after(self, version: int, sequence: int) -> None:
        """Skip rows up to a position in a commit, which were read before."""
        self._last = (version, sequence)

    def report_invalid(self) -> None:
        for (table, column), count in self._invalid.items():
            log.warning(
                "%s of %s has %d values that its type cannot represent; they are read as NULL",
                column,
                table,
                count,
                extra={"action": "invalid_values", "table": table, "column": column, "values": count},
            )
        self._invalid.clear()

    def wants(self, relation: Relation, version: int) -> bool:
        """Whether the feed reads the rows of a relation; raise if they do not match the plan."""
        if relation not in self._table_of:
            table = self.fit.reads(relation)
            if isinstance(table, SchemaChange):
                raise table.in_range(self._name, self._first, version)
            self._table_of[relation] = table
        return self._table_of[relation] is not None

    def _batch(self, part: Sequence[Changes]) -> pa.RecordBatch | None:
        """Return the rows of the changes of several tables, in log order."""
        rows_and_places = [self._rows(changes) for changes in part]
        batches = [rows for rows, _ in rows_and_places if rows.num_rows]
        if len(batches) <= 1:
            return batches[0] if batches else None
        places = np.concatenate([places for _, places in rows_and_places])
        table = pa.Table.from_batches(batches).combine_chunks()
        return table.take(pa.array(np.argsort(places, kind="stable"))).combine_chunks().to_batches()[0]

    def _rows(self, changes: Changes) -> tuple[pa.RecordBatch, Integers]:
        table = self._table_of[changes.relation]
        assert table is not None
        columns = TableColumns(self, table, changes)
        kinds, keep = columns.kinds()
        version, sequence = self._last
        if changes.version[0] <= version:
            keep &= (changes.version > version) | (
                (changes.version == version) & (changes.sequence > sequence)
            )
        if self._holder is not None:
            keep &= ~self._hold_back(self._holder, table, columns, kinds, keep)
        return self._selected_rows(table, columns, kinds, keep), columns.selected(changes.place)

    def _selected_rows(
        self, table: Table, columns: TableColumns, kinds: NDArray[np.int8], keep: Mask
    ) -> pa.RecordBatch:
        columns.keep = None if keep.all() else keep
        arrays = [self._array(field, table, columns, kinds) for field in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self._columns)

    def _hold_back(
        self, holder: RowHolder, table: Table, columns: TableColumns, kinds: NDArray[np.int8], keep: Mask
    ) -> Mask:
        """Pass the rows to hold back to the holder; return their mask."""
        rows, incomplete = np.flatnonzero(keep), columns.incomplete()
        keyed = KeyedRows(
            [columns.text(columns.places[name]).take(pa.array(rows)) for name in holder.key],
            columns.changes.transaction[rows],
            columns.source_rows(kinds, rows, incomplete),
            incomplete[rows],
        )
        held = np.zeros(len(keep), bool)
        to_hold = holder.rows_to_hold(keyed)
        if to_hold.any():
            held[rows[to_hold]] = True
            holder.hold(self._selected_rows(table, columns, kinds, held), keyed.filter(to_hold))
        return held

    def _array(
        self, field: pa.Field, table: Table, columns: TableColumns, kinds: NDArray[np.int8]
    ) -> pa.Array:
        changes = columns.changes
        if field.name == CHANGE_TYPE:
            return _TYPES.take(pa.array(columns.selected(kinds)))
        if field.name == COMMIT_VERSION:
            return pa.array(columns.selected(changes.version))
        if field.name == COMMIT_TIMESTAMP:
            return pa.array(columns.selected(changes.timestamp)).view(INSTANT)
        if field.name == SEQUENCE:
            return pa.array(columns.selected(changes.sequence))
        if field.name == UNCHANGED_COLUMNS:
            return columns.unchanged().cast(field.type)
        if not self._tables.several:
            return columns.values(field)
        if field.name == TABLE:
            return pa.repeat(table.name, columns.count)
        if field.name == KEY:
            return columns.key_json()
        if self._structs[field.name] is not table:
            return pa.nulls(columns.count, field.type)
        return pa.StructArray.from_arrays(
            [columns.values(inner) for inner in field.type], fields=list(field.type)
        )

    def replaces_invalid(self, table: Table, field: pa.Field, count: int) -> bool:
        """Whether values that a column's type cannot represent are read as null; if so, count them."""
        if self._settings.invalid_values != "null" or not field.nullable:
            return False
        self._invalid[table.name, field.name] += count
        return True

    def invalid_value(
        self, table: Table, field: pa.Field, value: str | None, version: int, why: str
    ) -> FeedUnavailableError:
        """Return the error for a value that the type of its column cannot represent."""
        skip = f"; or skip the commit with skip=[{version}]" if self._from_log else ""
        return FeedUnavailableError(
            f"{self._name}: {table.name} has {field.name} = {value!r} in commit {version}, which "
            f"{field.type} cannot represent{why}. Read the column as text with "
            f"types={{{field.name!r}: 'text'}} (a pump needs other queues then); or replace the value with "
            f"NULL with invalid_values='null'{skip}",
            condition="FEED_UNAVAILABLE.VALUE",
            table=table.name,
            column=field.name,
            version=version,
        )

    def missing_key(self, table: Table, column: str) -> FeedUnavailableError:
        """Return the error for a row without a value for a key column."""
        return FeedUnavailableError(
            f"{self._name}: a change of {table.name} has no value of the key column {column!r}, because a "
            "partition has another replica identity. Run alter table … replica identity default for each "
            f"partition, and {START_OVER}",
            condition="FEED_UNAVAILABLE.KEY_UNKNOWN",
            table=table.name,
            column=column,
        )


def skipped_commits(settings: FeedSettings, after: int, upto: int) -> list[int]:
    """Return the commits of a range to skip, and log them."""
    skipped = [version for version in settings.skip or () if after < version <= upto]
    if skipped:
        log.warning(
            "the rows of commits %s are skipped, as set in skip",
            skipped,
            extra={"action": "commits_skipped", "slot": settings.slot, "versions": skipped},
        )
    return skipped


class TableColumns:
    """The columns of changes of one table."""

    def __init__(self, rows: RowReader, table: Table, changes: Changes) -> None:
        self._rows, self._table, self.changes = rows, table, changes
        self.places = {column.name: place for place, column in enumerate(changes.relation.columns)}
        self._text: dict[int, pa.StringArray] = {}
        self.keep: Mask | None = None

    @property
    def count(self) -> int:
        return len(self.changes) if self.keep is None else int(self.keep.sum())

    def selected(self, values: NDArray[Item]) -> NDArray[Item]:
        return values if self.keep is None else values[self.keep]

    def kinds(self) -> tuple[NDArray[np.int8], Mask]:
        """Return the change type of each tuple, and the mask of the tuples that are rows.

        An update that changes the key is a delete and an insert. An old tuple with only the key is not a row
        if the key is unchanged.
        """
        changes = self.changes
        kind = changes.kind[changes.message]
        kinds = np.full(len(changes), IS_POSTIMAGE, np.int8)
        kinds[kind == pgoutput.INSERT] = IS_INSERT
        kinds[kind == pgoutput.DELETE] = IS_DELETE
        after = np.flatnonzero(changes.partner >= 0)
        keep = np.ones(len(changes), bool)
        if len(after):
            before = changes.partner[after]
            key_changed = self._differs(before, after)
            kinds[before] = np.where(key_changed, IS_DELETE, IS_PREIMAGE)
            kinds[after] = np.where(key_changed, IS_INSERT, IS_POSTIMAGE)
            keep[before] = key_changed | (changes.marker[changes.message[before]] == pgoutput.OLD)
        return kinds, keep

    def incomplete(self) -> Mask:
        """Return the mask of tuples with unchanged TOAST values that are not in their old tuple either."""
        incomplete = np.zeros(len(self.changes), bool)
        for column in self._table.relation.columns:
            if column.name in self.places:
                incomplete |= self.changes.unchanged(self.places[column.name])
        return incomplete

    def source_rows(self, kinds: NDArray[np.int8], rows: Integers, incomplete: Mask) -> Integers:
        """Return for each row the index of the row in ``rows`` that has its missing values, or -1.

        An update that changes the key and no TOAST value has a deleted row, which has these values.
        """
        source_rows = np.full(len(rows), -1)
        key_changed = np.flatnonzero((kinds[rows] == IS_INSERT) & (self.changes.partner[rows] >= 0))
        key_changed = key_changed[incomplete[rows[key_changed]]]
        source_rows[key_changed] = np.searchsorted(rows, self.changes.partner[rows[key_changed]])
        return source_rows

    def _differs(self, before: Integers, after: Integers) -> Mask:
        """Return the mask of pairs of tuples with different keys."""
        differs = np.zeros(len(before), bool)
        for name in self._table.key:
            text = self.text(self.places[name])
            left, right = text.take(pa.array(before)), text.take(pa.array(after))
            same = pc.fill_null(pc.equal(left, right), False)
            both_null = pc.and_(pc.is_null(left), pc.is_null(right))
            differs |= ~pc.or_(same, both_null).to_numpy(zero_copy_only=False)
        return differs

    def text(self, column: int) -> pa.StringArray:
        if column not in self._text:
            self._text[column] = self.changes.text(column)
        return self._text[column]

    def values(self, field: pa.Field) -> pa.Array:
        """Return a column, converted to the type of the read."""
        text = self.selected_text(self.places[field.name])
        try:
            values = from_text(text, field.type)
        except pa.ArrowInvalid as error:
            values = from_text(self._without_invalid(text, field, str(error)), field.type)
        if values.null_count and not field.nullable:
            raise self._rows.missing_key(self._table, field.name)
        return values

    def _without_invalid(self, text: pa.StringArray, field: pa.Field, why: str) -> pa.StringArray:
        """Replace values that the type cannot represent with null; raise unless the settings allow this."""
        valid = pc.fill_null(fits_type(text, field.type), True)
        invalid = np.flatnonzero(~valid.to_numpy(zero_copy_only=False))
        if not len(invalid) or not self._rows.replaces_invalid(self._table, field, len(invalid)):
            first = int(invalid[0]) if len(invalid) else None
            version = int(self.selected(self.changes.version)[first or 0])
            value = None if first is None else text[first].as_py()[:100]
            why = "" if len(invalid) else f" ({why[:200]})"
            raise self._rows.invalid_value(self._table, field, value, version, why)
        return pc.if_else(valid, text, pa.scalar(None, pa.string()))

    def selected_text(self, place: int) -> pa.StringArray:
        text = self.text(place)
        return text if self.keep is None else text.filter(pa.array(self.keep))

    def unchanged(self) -> pa.ListArray:
        """Return for each row the names of its columns with unchanged TOAST values; null for no columns."""
        masks = {
            column.name: self.selected(self.changes.unchanged(self.places[column.name]))
            for column in self._table.relation.columns
            if column.name in self.places
        }
        names = [name for name, mask in masks.items() if mask.any()]
        if not names:
            return pa.nulls(self.count, pa.list_(pa.string()))
        row, column = np.nonzero(np.stack([masks[name] for name in names], axis=1))
        sizes = pa.array(np.bincount(row, minlength=self.count))
        return lists_of(pa.array(names).take(pa.array(column)), sizes)

    def key_json(self) -> pa.StringArray:
        """Return each row's key as a JSON object."""
        if not self._table.key:
            return pa.repeat("{}", self.count)
        parts: list[pa.Array | str] = []
        for name in self._table.key:
            place = self.places[name]
            text = self.selected_text(place)
            if self._table.keyed and text.null_count:
                raise self._rows.missing_key(self._table, name)
            if self.changes.relation.columns[place].type not in _INTEGER_TYPES:
                text = json_strings(text)
            label = json_strings(pa.array([name]))[0].as_py()
            parts += ["," if parts else "{", f"{label}:", pc.fill_null(text, "null")]
        return pc.binary_join_element_wise(*parts, "}", "")


def json_strings(text: pa.StringArray) -> pa.StringArray:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\x01-\x1f]")).as_py():
        for code in range(1, 32):
            text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', text, '"', "")
