"""Backfill: existing rows of a table, read in chunks while its changes come, each row exactly once.

The idea is that of watermarks (Andreakis and Papapanagiotou, "DBLog: A Watermark Based Change-Data-Capture
Framework", 2020), made exact by PostgreSQL's snapshots: a chunk of the table comes with the set of
transactions whose rows it has, and each change in the log names its transaction. So for each change it is
known whether a chunk has it already.

- A change of a row that no chunk has had yet is held back. The chunk with that row comes later, and has it.
- When a chunk is appended, the changes of its rows that were held back and that it does not have follow.
- Later changes of its rows are appended as they come.
- An update that changes a key may lack values of the row, those of TOAST columns that it leaves as they
  are. If no chunk has had that row under its old key, it is read again under its new one.

A table that is read again, whose rows are there already, has nothing held back. Of a chunk, those rows are
left out that were changed by transactions which it does not show: the log had newer values. If it did not
have all of them, since TOAST values were not changed, the row is read again with the next chunk. So is a row
that was not read under its old key, and that an update without such values brings under a new one.
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
"""Between the columns of a key: no text in PostgreSQL has this character."""


class _Held(NamedTuple):
    """Changes of rows, in the order of the log."""

    rows: pa.RecordBatch | None
    """None if the rows themselves were returned."""
    keyed: KeyedRows

    def only(self, mask: Mask) -> _Held:
        if mask.all():
            return self
        rows = None if self.rows is None else self.rows.filter(pa.array(mask))
        return _Held(rows, self.keyed.filter(mask))


@dataclass(frozen=True)
class _Gap:
    """A row at or before the last one read whose values are not known, and which is to be read again."""

    key: Key
    transaction: int | None
    """The one that made it; None if every later chunk shows it."""


class Backfill:
    """The backfill of a table, and the sieve of its :class:`RowReader`; not thread-safe.

    Parameters
    ----------
    server
        The server, which compares keys.
    key
        The columns of the table's key.
    order
        Their order.
    after
        The key up to which the rows are there; None if none are.
    gaps
        Keys before that one whose rows are not there.
    again
        Whether the rows are there already, perhaps with other values.
    """

    def __init__(
        self,
        server: Server,
        key: Sequence[str],
        order: KeyOrder,
        after: Key | None,
        gaps: Iterable[Key] = (),
        *,
        again: bool,
    ) -> None:
        self.key, self.order, self._server = key, order, server
        self.after, self.again, self.is_complete = after, again, False
        self._held: list[_Held] = []
        self._is_at_end = False
        """Whether a chunk had the last row."""
        self._gaps = {_SEPARATOR.join(gap): _Gap(gap, None) for gap in gaps}

    @property
    def gaps(self) -> list[Key]:
        """Keys up to the last one read whose rows are not there, and are to be read with the next chunk.

        An update may change the key of a row that was not read, without its unchanged TOAST values.
        """
        return [gap.key for gap in self._gaps.values()]

    def holds(self, rows: KeyedRows) -> Mask:
        """Return the mask of the rows to hold back: those that a later chunk has."""
        if self.is_complete:
            return np.zeros(len(rows.transactions), bool)
        if self.again:
            self._held.append(_Held(None, rows))
            if (rows.needs >= 0).any():
                joined = _joined(rows.keys)
                unread = self._unread(rows.keys) | _is_in(joined, list(self._gaps))
                self._hold_lacking(rows, joined, unread, _needed(rows, joined))
            return np.zeros(len(rows.transactions), bool)
        held = self.order.after(self._server, self.after, rows.keys)
        if self._gaps or (rows.needs >= 0).any():
            joined = _joined(rows.keys)
            held |= _is_in(joined, list(self._gaps))
            self._hold_lacking(rows, joined, held, _needed(rows, joined))
        return held

    def _unread(self, keys: Sequence[pa.StringArray]) -> Mask:
        """Return the mask of the keys of a table that is read again which no chunk has had yet."""
        if self._is_at_end:
            return np.zeros(len(keys[0]), bool)
        return self.order.after(self._server, self.after, keys)

    def _hold_lacking(
        self, rows: KeyedRows, joined: pa.StringArray, held: Mask, sources: Sequence[str] | None = None
    ) -> None:
        """Make gaps of rows that lack values, and hold what comes under their keys from there on.

        With ``sources``, the keys of the rows that they need, only of those that need a row which is held.
        """
        lacking = np.flatnonzero(rows.needs >= 0)
        keys = joined.take(pa.array(lacking)).to_pylist()
        begins: dict[str, int] = {}
        for number, place in enumerate(lacking.tolist()):
            if held[place] or keys[number] in begins:
                continue
            if sources is not None:
                source = int(rows.needs[place])
                if not held[source] and begins.get(sources[number], source + 1) > source:
                    continue
            begins[keys[number]] = place
            self._make_gap(rows, place)
        if begins:
            found = pc.index_in(joined, value_set=pa.array(list(begins), pa.string()))
            starts = np.append(np.fromiter(begins.values(), np.int64, len(begins)), len(held))
            first = starts[pc.fill_null(found, len(begins)).to_numpy(zero_copy_only=False)]
            held |= np.arange(len(held)) >= first

    def _make_gap(self, rows: KeyedRows, place: int) -> None:
        key = tuple(texts[place].as_py() for texts in rows.keys)
        self._gaps[_SEPARATOR.join(key)] = _Gap(key, int(rows.transactions[place]))

    def hold(self, rows: pa.RecordBatch, keyed: KeyedRows) -> None:
        """Keep changes until a chunk has them, or has their rows without them."""
        self._held.append(_Held(rows, keyed))

    def place(self) -> tuple[int, dict[str, _Gap]]:
        """Return what to return to with :meth:`return_to`."""
        return len(self._held), dict(self._gaps)

    def return_to(self, place: tuple[int, dict[str, _Gap]]) -> None:
        """Forget what was held back since."""
        del self._held[place[0] :]
        self._gaps = dict(place[1])

    def forget(self, visible: Visible) -> None:
        """Forget changes that every later chunk shows, from what a transaction sees now."""
        left = (each.only(~visible.shows(each.keyed.transactions)) for each in self._held)
        self._held = [each for each in left if len(each.keyed.transactions)]

    def complete(self, chunk: Chunk, version: int) -> list[pa.RecordBatch]:
        """Return the rows of a chunk, with later changes of them, as those of a commit.

        All changes in the log before the chunk's position have to be read, and those that it shows
        forgotten. Rows after these are held back from then on.
        """
        if self.again:
            parts = [self._unchanged(chunk)]
            self._fill(chunk)
            self._note_lacking(chunk)
            self._is_at_end |= not chunk.more
            self.is_complete = self._is_at_end and not self._gaps
        else:
            filled = self._fill(chunk)
            lacks = any((each.keyed.needs >= 0).any() for each in self._held)
            self.is_complete = not (chunk.more or self._gaps or lacks)
            parts = [self._filled(chunk, filled), *self._later_changes(chunk)]
        self.after = chunk.last or self.after
        if self.is_complete:
            self._held = []
        batches, sequence = [], 0
        for part in parts:
            if part is not None and part.num_rows:
                batches.append(as_commit(part, version, chunk.timestamp, sequence))
                sequence += part.num_rows
        return batches

    def _note_lacking(self, chunk: Chunk) -> None:
        """Make gaps of rows that a chunk was to bring, and whose later changes lack some of their values."""
        for each in self._held:
            keyed = each.keyed
            if not keyed.lacks.any():
                continue
            mine = self._unread(keyed.keys)
            if chunk.more:
                mine &= ~self.order.after(self._server, chunk.last, keyed.keys)
            mine |= _is_in(_joined(keyed.keys), list(map(_SEPARATOR.join, chunk.gaps)))
            for place in np.flatnonzero(keyed.lacks & mine).tolist():
                self._make_gap(keyed, place)

    def _fill(self, chunk: Chunk) -> list[str]:
        """Close the gaps whose rows a chunk has, as they are now; return their keys as text."""
        filled = []
        for key in map(_SEPARATOR.join, chunk.gaps):
            gap = self._gaps.get(key)
            if gap is None:
                continue
            if gap.transaction is None or chunk.visible.shows(np.array([gap.transaction])).all():
                filled.append(key)
                del self._gaps[key]
        return filled

    def _filled(self, chunk: Chunk, filled: Sequence[str]) -> pa.RecordBatch | None:
        """Return the rows of a chunk without those of gaps that stay."""
        if chunk.rows is None or not chunk.gaps:
            return chunk.rows
        keep = np.arange(chunk.rows.num_rows) < chunk.count
        keep |= _is_in(_joined(chunk.keys), filled)
        return chunk.rows.filter(pa.array(keep))

    def _later_changes(self, chunk: Chunk) -> list[pa.RecordBatch]:
        """Return the held changes of rows that a chunk has, and keep the others."""
        bound = chunk.last or self.after
        found, kept = [], []
        for each in self._held:
            held = (
                np.zeros(len(each.keyed.transactions), bool)
                if self.is_complete
                else self._not_had(each.keyed, bound)
            )
            found.append(each.only(~held).rows)
            if held.any():
                kept.append(each.only(held))
        self._held = kept
        return [rows for rows in found if rows is not None]

    def _not_had(self, rows: KeyedRows, bound: Key | None) -> Mask:
        """Return the mask of the changes of rows that no chunk has had, or that are to be read again."""
        held = self.order.after(self._server, bound, rows.keys)
        joined = _joined(rows.keys)
        held |= _is_in(joined, list(self._gaps))
        self._hold_lacking(rows, joined, held)
        return held

    def _unchanged(self, chunk: Chunk) -> pa.RecordBatch | None:
        """Return the rows of a chunk of which the log has not had newer values, as updates."""
        rows = chunk.rows
        if rows is None:
            return None
        place = rows.schema.get_field_index(CHANGE_TYPE)
        rows = rows.set_column(place, rows.schema.field(place), pa.repeat(POSTIMAGE, rows.num_rows))
        if not self._held:
            return rows
        changed = pa.concat_arrays([_joined(each.keyed.keys) for each in self._held])
        return rows.filter(pc.invert(pc.is_in(_joined(chunk.keys), value_set=changed)))


def _joined(keys: Sequence[pa.StringArray]) -> pa.StringArray:
    """Return keys of several columns as one text each."""
    return keys[0] if len(keys) == 1 else pc.binary_join_element_wise(*keys, _SEPARATOR)


def _needed(rows: KeyedRows, joined: pa.StringArray) -> list[str]:
    """Return the keys of the rows that others need, in the order of those."""
    keys: list[str] = joined.take(pa.array(rows.needs[rows.needs >= 0])).to_pylist()
    return keys


def _is_in(texts: pa.StringArray, values: Sequence[str]) -> Mask:
    found: Mask = pc.is_in(texts, value_set=pa.array(values, pa.string())).to_numpy(zero_copy_only=False)
    return found


def as_commit(rows: pa.RecordBatch, version: int, timestamp: int, sequence: int) -> pa.RecordBatch:
    """Return rows as those of a commit, from a place in it on."""
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
