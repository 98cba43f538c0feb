"""Backfill: reads the existing rows of a table in chunks while its changes arrive, each row exactly once.

The method is that of DBLog (Andreakis and Papapanagiotou, "DBLog: A Watermark Based Change-Data-Capture
Framework", 2020), made exact with PostgreSQL's snapshots. Each chunk is read with the snapshot of its
transaction, and each change in the log has a transaction id, which shows whether the chunk includes the
change.

- A change of a row that no chunk has included yet is held back. A later chunk includes the row.
- When a chunk is appended, the held changes of its rows that its snapshot does not include are appended after
  it.
- Later changes of these rows are appended immediately.
- An update that changes the key may have no values for unchanged TOAST columns. If no chunk has included the
  row under its old key, the row is read again under its new key. Until then its key is a gap.

If a table is reread, its rows are already in the queue, so no change is held back. Rows that were changed by
transactions outside the snapshot are dropped from the chunk, because the log has newer values. If the log
does not have all of their values, because of unchanged TOAST values, the row is read again with the next
chunk. The same applies to a row that was not read under its old key and gets a new key in an update without
these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, POSTIMAGE
from penstock.feeds.postgres.catalog import SEQUENCE
from penstock.feeds.postgres.key_order import Key, KeyOrder
from penstock.feeds.postgres.pgoutput import Mask
from penstock.feeds.postgres.rows import KeyedRows
from penstock.feeds.postgres.server import Server
from penstock.feeds.postgres.table_chunks import Chunk, Visible
from penstock.feeds.protocol import INSTANT

_SEPARATOR = "\0"
"""Separates the columns of a key; text in PostgreSQL cannot contain this character."""


class _HeldChanges(NamedTuple):
    """Changes of rows in log order."""

    rows: pa.RecordBatch | None
    """The rows that are held back; None if they were returned and only their keys are needed."""
    keyed: KeyedRows

    def filter(self, mask: Mask) -> _HeldChanges:
        if mask.all():
            return self
        rows = None if self.rows is None else self.rows.filter(pa.array(mask))
        return _HeldChanges(rows, self.keyed.filter(mask))


@dataclass(frozen=True)
class _Gap:
    """A row at or before the last key read that has to be read again, because values of it are unknown."""

    key: Key
    transaction: int | None
    """The transaction that wrote the row; None if every later snapshot includes it."""


class Backfill:
    """The backfill of a table, which holds back changes for its :class:`RowReader`; not thread-safe.

    Parameters
    ----------
    server
        The server, for comparing keys.
    key
        The columns of the table's key.
    order
        The sort order of the key.
    after
        The key up to which rows have been read; None if none have been.
    gaps
        Keys up to ``after`` whose rows still have to be read.
    reread
        Whether the rows are already in the queue, possibly with outdated values.
    """

    def __init__(
        self,
        server: Server,
        key: Sequence[str],
        order: KeyOrder,
        after: Key | None,
        gaps: Iterable[Key] = (),
        *,
        reread: bool,
    ) -> None:
        self.key, self.order, self._server = key, order, server
        self.after, self.reread, self.is_complete = after, reread, False
        self._held: list[_HeldChanges] = []
        self._is_at_end = False
        """Whether a chunk has reached the end of the table."""
        self._gaps = {_SEPARATOR.join(gap): _Gap(gap, None) for gap in gaps}

    @property
    def gaps(self) -> list[Key]:
        """Keys up to the last key read whose rows have to be read with the next chunk.

        An update creates a gap if it changes the key of an unread row and has no values for its TOAST
        columns.
        """
        return [gap.key for gap in self._gaps.values()]

    def rows_to_hold(self, rows: KeyedRows) -> Mask:
        """Return the mask of the rows to hold back, because a later chunk includes them."""
        if self.is_complete:
            return np.zeros(len(rows.transactions), bool)
        if self.reread:
            self._held.append(_HeldChanges(None, rows))
            if (rows.source_rows >= 0).any():
                key_texts = _key_texts(rows.keys)
                unread = self._unread(rows.keys) | _is_in(key_texts, list(self._gaps))
                self._hold_incomplete(rows, key_texts, unread, _source_keys(rows, key_texts))
            return np.zeros(len(rows.transactions), bool)
        held = self.order.after(self._server, self.after, rows.keys)
        if self._gaps or (rows.source_rows >= 0).any():
            key_texts = _key_texts(rows.keys)
            held |= _is_in(key_texts, list(self._gaps))
            self._hold_incomplete(rows, key_texts, held, _source_keys(rows, key_texts))
        return held

    def _unread(self, keys: Sequence[pa.StringArray]) -> Mask:
        """Return the mask of the keys that no chunk of a reread table has included yet."""
        if self._is_at_end:
            return np.zeros(len(keys[0]), bool)
        return self.order.after(self._server, self.after, keys)

    def _hold_incomplete(
        self, rows: KeyedRows, key_texts: pa.StringArray, held: Mask, sources: Sequence[str] | None = None
    ) -> None:
        """Add gaps for rows with missing values, and hold all changes of their keys from there on.

        ``held`` is updated. ``sources`` has the key of the row that each of these rows takes its values from;
        if it is given, only rows whose source row is held become gaps.
        """
        incomplete = np.flatnonzero(rows.source_rows >= 0)
        keys = key_texts.take(pa.array(incomplete)).to_pylist()
        first_places: dict[str, int] = {}
        for number, place in enumerate(incomplete.tolist()):
            if held[place] or keys[number] in first_places:
                continue
            if sources is not None:
                source = int(rows.source_rows[place])
                if not held[source] and first_places.get(sources[number], source + 1) > source:
                    continue
            first_places[keys[number]] = place
            self._add_gap(rows, place)
        if first_places:
            indexes = pc.index_in(key_texts, value_set=pa.array(list(first_places), pa.string()))
            starts = np.append(np.fromiter(first_places.values(), np.int64, len(first_places)), len(held))
            first = starts[pc.fill_null(indexes, len(first_places)).to_numpy(zero_copy_only=False)]
            held |= np.arange(len(held)) >= first

    def _add_gap(self, rows: KeyedRows, place: int) -> None:
        key = tuple(texts[place].as_py() for texts in rows.keys)
        self._gaps[_SEPARATOR.join(key)] = _Gap(key, int(rows.transactions[place]))

    def hold(self, rows: pa.RecordBatch, keyed: KeyedRows) -> None:
        """Hold back changes until a chunk includes them or their rows."""
        self._held.append(_HeldChanges(rows, keyed))

    def saved_state(self) -> tuple[int, dict[str, _Gap]]:
        """Return the current state, for :meth:`restore`."""
        return len(self._held), dict(self._gaps)

    def restore(self, state: tuple[int, dict[str, _Gap]]) -> None:
        """Discard everything that was held back after a saved state."""
        del self._held[state[0] :]
        self._gaps = dict(state[1])

    def forget(self, visible: Visible) -> None:
        """Discard held changes that are visible in a current snapshot, and so in every later chunk."""
        left = (each.filter(~visible.shows(each.keyed.transactions)) for each in self._held)
        self._held = [each for each in left if len(each.keyed.transactions)]

    def complete(self, chunk: Chunk, version: int) -> list[pa.RecordBatch]:
        """Return the rows of a chunk and their later changes as the rows of one commit.

        All changes in the log before the chunk's position have to be read, and :meth:`forget` has to be
        called with its snapshot. From then on, changes of rows after the chunk are held back.
        """
        if self.reread:
            parts = [self._not_superseded(chunk)]
            self._close_gaps(chunk)
            self._add_incomplete_gaps(chunk)
            self._is_at_end |= not chunk.more
            self.is_complete = self._is_at_end and not self._gaps
        else:
            closed = self._close_gaps(chunk)
            has_incomplete = any((each.keyed.source_rows >= 0).any() for each in self._held)
            self.is_complete = not (chunk.more or self._gaps or has_incomplete)
            parts = [self._without_open_gaps(chunk, closed), *self._later_changes(chunk)]
        self.after = chunk.last or self.after
        if self.is_complete:
            self._held = []
        batches, sequence = [], 0
        for part in parts:
            if part is not None and part.num_rows:
                batches.append(as_commit(part, version, chunk.timestamp, sequence))
                sequence += part.num_rows
        return batches

    def _add_incomplete_gaps(self, chunk: Chunk) -> None:
        """Add gaps for rows of a chunk if later changes of them have missing values."""
        for each in self._held:
            keyed = each.keyed
            if not keyed.incomplete.any():
                continue
            in_chunk = self._unread(keyed.keys)
            if chunk.more:
                in_chunk &= ~self.order.after(self._server, chunk.last, keyed.keys)
            in_chunk |= _is_in(_key_texts(keyed.keys), list(map(_SEPARATOR.join, chunk.gaps)))
            for place in np.flatnonzero(keyed.incomplete & in_chunk).tolist():
                self._add_gap(keyed, place)

    def _close_gaps(self, chunk: Chunk) -> list[str]:
        """Close the gaps whose current rows a chunk includes; return their keys as text."""
        closed = []
        for key in map(_SEPARATOR.join, chunk.gaps):
            gap = self._gaps.get(key)
            if gap is None:
                continue
            if gap.transaction is None or chunk.visible.shows(np.array([gap.transaction])).all():
                closed.append(key)
                del self._gaps[key]
        return closed

    def _without_open_gaps(self, chunk: Chunk, closed: Sequence[str]) -> pa.RecordBatch | None:
        """Return the rows of a chunk without rows of gaps that remain open."""
        if chunk.rows is None or not chunk.gaps:
            return chunk.rows
        keep = np.arange(chunk.rows.num_rows) < chunk.count
        keep |= _is_in(_key_texts(chunk.keys), closed)
        return chunk.rows.filter(pa.array(keep))

    def _later_changes(self, chunk: Chunk) -> list[pa.RecordBatch]:
        """Return the held changes of rows that a chunk includes, and keep holding the others."""
        bound = chunk.last or self.after
        returned, still_held = [], []
        for each in self._held:
            held = (
                np.zeros(len(each.keyed.transactions), bool)
                if self.is_complete
                else self._must_hold(each.keyed, bound)
            )
            returned.append(each.filter(~held).rows)
            if held.any():
                still_held.append(each.filter(held))
        self._held = still_held
        return [rows for rows in returned if rows is not None]

    def _must_hold(self, rows: KeyedRows, bound: Key | None) -> Mask:
        """Return the mask of the changes of rows that no chunk has included yet, or that are gaps."""
        held = self.order.after(self._server, bound, rows.keys)
        key_texts = _key_texts(rows.keys)
        held |= _is_in(key_texts, list(self._gaps))
        self._hold_incomplete(rows, key_texts, held)
        return held

    def _not_superseded(self, chunk: Chunk) -> pa.RecordBatch | None:
        """Return the rows of a chunk for which the log had no newer values, as updates."""
        rows = chunk.rows
        if rows is None:
            return None
        place = rows.schema.get_field_index(CHANGE_TYPE)
        rows = rows.set_column(place, rows.schema.field(place), pa.repeat(POSTIMAGE, rows.num_rows))
        if not self._held:
            return rows
        changed = pa.concat_arrays([_key_texts(each.keyed.keys) for each in self._held])
        return rows.filter(pc.invert(pc.is_in(_key_texts(chunk.keys), value_set=changed)))


def _key_texts(keys: Sequence[pa.StringArray]) -> pa.StringArray:
    """Join the columns of each key into one text."""
    return keys[0] if len(keys) == 1 else pc.binary_join_element_wise(*keys, _SEPARATOR)


def _source_keys(rows: KeyedRows, key_texts: pa.StringArray) -> list[str]:
    """Return the keys of the source rows, for each row with missing values."""
    keys: list[str] = key_texts.take(pa.array(rows.source_rows[rows.source_rows >= 0])).to_pylist()
    return keys


def _is_in(texts: pa.StringArray, values: Sequence[str]) -> Mask:
    found: Mask = pc.is_in(texts, value_set=pa.array(values, pa.string())).to_numpy(zero_copy_only=False)
    return found


def as_commit(rows: pa.RecordBatch, version: int, timestamp: int, sequence: int) -> pa.RecordBatch:
    """Set the version, time and consecutive sequence numbers of a commit in rows."""
    count = rows.num_rows
    values = {
        COMMIT_VERSION: pa.repeat(pa.scalar(version, pa.int64()), count),
        COMMIT_TIMESTAMP: pa.repeat(pa.scalar(timestamp, pa.int64()), count).view(INSTANT),
        SEQUENCE: pa.array(np.arange(sequence, sequence + count)),
    }
    for name, column in values.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), column)
    return rows
