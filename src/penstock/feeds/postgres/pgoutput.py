"""PostgreSQL's ``pgoutput`` messages (protocol version 1, values as text), many at once.

The format is that of the PostgreSQL manual, "Logical Replication Message Formats". A buffer of messages is decoded column by
column: each step looks at one column of all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ChangelogContractViolation

BEGIN, COMMIT, RELATION, TRUNCATE = b"BCRT"
INSERT, UPDATE, DELETE = b"IUD"
NEW, OLD, KEY = b"NOK"
TEXT, NULL, UNCHANGED = b"tnu"
_EPOCH = 946_684_800_000_000
"""Microseconds from 1970 to 2000, where PostgreSQL's time begins."""
_MOST_BYTES = 2**31 - 64
_IN_IDENTITY = 1


@dataclass(frozen=True)
class Column:
    """A column as a Relation message or the catalog describes it."""

    name: str
    type: int
    """The type's object id."""
    modifier: int = -1
    key: bool = False
    """Whether the replica identity has it; with ``full``, each column."""


@dataclass(frozen=True)
class Relation:
    """A table as the rows that follow were written."""

    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]
    identity: str = "d"
    """The replica identity: default, index, full or nothing, by the first letter."""

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @classmethod
    def of(cls, message: bytes) -> Relation:
        """Parse a Relation message."""
        oid = int.from_bytes(message[1:5], "big")
        schema, place = _text(message, 5)
        table, place = _text(message, place)
        identity = chr(message[place])
        count = int.from_bytes(message[place + 1 : place + 3], "big")
        place += 3
        columns = []
        for _ in range(count):
            key = bool(message[place] & _IN_IDENTITY)
            name, place = _text(message, place + 1)
            kind = int.from_bytes(message[place : place + 4], "big")
            modifier = int.from_bytes(message[place + 4 : place + 8], "big", signed=True)
            columns.append(Column(name, kind, modifier, key))
            place += 8
        # The protocol writes pg_catalog as nothing.
        return cls(oid, schema or "pg_catalog", table, tuple(columns), identity)


def _text(message: bytes, start: int) -> tuple[str, int]:
    end = message.index(0, start)
    return message[start:end].decode(), end + 1


def truncated_relations(message: bytes) -> list[int]:
    """The object ids in a Truncate message."""
    oids: list[int] = np.frombuffer(message, ">u4", offset=6).tolist()
    return oids


class Buffer:
    """Messages end to end, and numbers at any place in them."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        # The bytes at the end let a number be read at any place of the last message.
        self.data = b"".join((*messages, bytes(8)))
        if len(self.data) > _MOST_BYTES:
            raise ChangelogContractViolation(f"{len(messages)} messages have {len(self.data)} bytes together")
        sizes = np.fromiter(map(len, messages), np.int64, len(messages))
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.bytes = np.frombuffer(self.data, np.uint8)
        self._int32: Any = np.ndarray((len(self.data) - 3,), ">i4", self.data, strides=(1,))
        self._int64: Any = np.ndarray((len(self.data) - 7,), ">i8", self.data, strides=(1,))

    def message(self, index: int) -> bytes:
        return self.data[self.starts[index] : self.ends[index]]

    def int32(self, places: Any) -> Any:
        return self._int32[places].astype(np.int64)

    def int64(self, places: Any) -> Any:
        return self._int64[places].astype(np.int64)


@dataclass(frozen=True)
class Values:
    """One column of some tuples: where each value is in the buffer, and of what kind."""

    kinds: Any
    starts: Any
    ends: Any


class Changes:
    """The tuples of one relation in the order of the log; an update that tells what was before has two.

    ``place`` orders the tuples of all relations of a buffer; ``partner`` is the index of the tuple from before, or -1.
    """

    def __init__(self, buffer: Buffer, relation: Relation, starts: Any) -> None:
        self.relation = relation
        self._buffer = buffer
        self.kind = buffer.bytes[starts]
        self.marker = buffer.bytes[starts + 5]
        paired = (self.kind == UPDATE) & (self.marker != NEW)
        count = 1 + paired
        self.message = np.repeat(np.arange(len(starts)), count)
        first = np.cumsum(count) - count
        self._first, self._second = first, first[paired] + 1
        self.partner = np.full(len(self.message), -1)
        self.partner[self._second] = first[paired]
        self._starts = starts
        self._paired = paired
        self.place = self.version = self.timestamp = self.sequence = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.message)

    @cached_property
    def _columns(self) -> list[Values]:
        width = len(self.relation.columns)
        found, ends = self._walk(self._starts + 6, width)
        if not len(self._second):
            return found
        # Behind the tuple from before comes one more marker.
        after, _ = self._walk(ends[self._paired] + 1, width)
        return [self._woven(one, other) for one, other in zip(found, after, strict=True)]

    def _walk(self, place: Any, width: int) -> tuple[list[Values], Any]:
        place = place + 2
        found = []
        for _ in range(width):
            kinds = self._buffer.bytes[place]
            sized = kinds == TEXT
            if sized.all():
                starts = place + 5
                place = starts + self._buffer.int32(place + 1)
            else:
                starts = place + np.where(sized, 5, 1)
                place = starts + np.where(sized, self._buffer.int32(place + 1), 0)
            found.append(Values(kinds, starts, place))
        return found, place

    def _woven(self, one: Values, other: Values) -> Values:
        def woven(left: Any, right: Any) -> Any:
            both = np.empty(len(self), left.dtype)
            both[self._first], both[self._second] = left, right
            return both

        return Values(
            woven(one.kinds, other.kinds), woven(one.starts, other.starts), woven(one.ends, other.ends)
        )

    def text(self, column: int) -> pa.StringArray:
        """The values of a column as text; those that were not sent come from the tuple from before, or are null."""
        values = self._columns[column]
        # Every second element is a value, those between are what lies between two values.
        bounds = np.empty(2 * len(self), np.int32)
        bounds[0::2], bounds[1::2] = values.starts, values.ends
        spread = pa.Array.from_buffers(
            pa.string(),
            max(len(bounds) - 1, 0),
            [None, pa.py_buffer(bounds), pa.py_buffer(self._buffer.data)],
        )
        rows = np.arange(len(self), dtype=np.int32)
        there = values.kinds == TEXT
        if not there.all():
            filled = self._filled(values)
            rows = np.where(filled, self.partner, rows).astype(np.int32)
            there = there | filled
        return spread.take(pa.array(rows * np.int32(2), mask=None if there.all() else ~there))

    def unknown(self, column: int) -> Any:
        """Where a value was not sent, and the tuple from before does not tell it either."""
        values = self._columns[column]
        return (values.kinds == UNCHANGED) & ~self._filled(values)

    def _filled(self, values: Values) -> Any:
        return (values.kinds == UNCHANGED) & (self.partner >= 0) & (values.kinds[self.partner] == TEXT)


class Decoder:
    """Follows the messages of a slot through transactions and relations.

    Parameters
    ----------
    after, upto
        The transactions that count.
    wanted
        Called with each relation, and the transaction, when the first row comes that was written with it; False leaves its rows
        out. It raises where the rows cannot be read.
    truncated
        Called with the relations that a transaction that counts has emptied, and the transaction.
    skipped
        Transactions that do not count.
    """

    def __init__(
        self,
        after: int,
        upto: int,
        wanted: Callable[[Relation, int], bool],
        truncated: Callable[[Sequence[Relation], int], None],
        skipped: Collection[int] = (),
    ) -> None:
        self._after, self._upto = after, upto
        self._wanted, self._truncated = wanted, truncated
        self._skipped = np.array(sorted(skipped), np.int64)
        self._relations: dict[int, Relation] = {}
        self._judged: dict[Relation, bool] = {}
        self._version = self._timestamp = self._sequence = 0

    def begin(self, version: int, timestamp: int, sequence: int, relation: Relation) -> None:
        """Go on in the middle of a transaction, as a snapshot's rows have no messages of their own around them."""
        self._version, self._timestamp, self._sequence = version, timestamp, sequence
        self._relations[relation.oid] = relation

    def decode(self, messages: Sequence[bytes]) -> list[list[Changes]]:
        """The changes in some messages, cut where a relation changes its form."""
        buffer = Buffer(messages)
        kinds = buffer.bytes[buffer.starts]
        found, start = [], 0
        for index in np.flatnonzero((kinds == RELATION) | (kinds == TRUNCATE)).tolist():
            message = buffer.message(index)
            if kinds[index] == TRUNCATE:
                found.append(self._part(buffer, kinds, start, index))
                self._empty(message)
                start = index
                continue
            relation = Relation.of(message)
            if self._relations.get(relation.oid, relation) != relation:
                found.append(self._part(buffer, kinds, start, index))
                start = index
            self._relations[relation.oid] = relation
        found.append(self._part(buffer, kinds, start, len(messages)))
        return [part for part in found if part]

    def _counts(self, versions: Any) -> Any:
        counts = (versions > self._after) & (versions <= self._upto)
        return counts & ~np.isin(versions, self._skipped) if len(self._skipped) else counts

    def _empty(self, message: bytes) -> None:
        oids = truncated_relations(message)
        if self._counts(np.array([self._version]))[0]:
            self._truncated([self._relations[oid] for oid in oids if oid in self._relations], self._version)

    def _part(self, buffer: Buffer, all_kinds: Any, low: int, high: int) -> list[Changes]:
        starts, kinds = buffer.starts[low:high], all_kinds[low:high]
        begins = np.flatnonzero(kinds == BEGIN)
        versions = np.r_[self._version, buffer.int64(starts[begins] + 1)]
        stamps = np.r_[self._timestamp, buffer.int64(starts[begins] + 9) + _EPOCH]
        self._version, self._timestamp = int(versions[-1]), int(stamps[-1])
        rows = np.flatnonzero((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE))
        transaction = np.searchsorted(begins, rows)
        counts = self._counts(versions)
        rows, transaction = rows[counts[transaction]], transaction[counts[transaction]]
        oids, firsts, which = np.unique(
            buffer.int32(starts[rows] + 1) & 0xFFFFFFFF, return_index=True, return_inverse=True
        )
        known = [
            self._relation(oid, int(versions[transaction[first]]))
            for oid, first in zip(oids.tolist(), firsts.tolist(), strict=True)
        ]
        wanted = np.array([counted for _, counted in known], bool)
        if not wanted.all():
            keep = wanted[which]
            rows, transaction, which = rows[keep], transaction[keep], which[keep]
        found = [
            (Changes(buffer, relation, starts[rows[which == place]]), np.flatnonzero(which == place))
            for place, (relation, counted) in enumerate(known)
            if counted
        ]
        width = np.ones(len(rows), np.int64)
        for changes, places in found:
            width[places] += np.bincount(changes.message, minlength=len(places)) - 1
        last = np.cumsum(width)
        sequence = self._sequences(transaction, last - width, len(begins), int(width.sum()))
        for changes, places in found:
            # A message's second tuple comes one behind its first.
            second = (changes.partner >= 0).astype(np.int64)
            message = places[changes.message]
            changes.place = (last - width)[message] + second
            changes.sequence = sequence[message] + second
            changes.version = versions[transaction[message]]
            changes.timestamp = stamps[transaction[message]]
        return [changes for changes, _ in found if len(changes)]

    def _relation(self, oid: int, version: int) -> tuple[Relation, bool]:
        if oid not in self._relations:
            raise ChangelogContractViolation(f"pgoutput sent a row of relation {oid} before the relation")
        relation = self._relations[oid]
        if relation not in self._judged:
            self._judged[relation] = self._wanted(relation, version)
        return relation, self._judged[relation]

    def _sequences(self, transaction: Any, first: Any, begun: int, total: int) -> Any:
        """The position of each message's first tuple in its transaction, counted on from the buffer before."""
        base = np.full(begun + 1, total, np.int64)
        starts = np.flatnonzero(np.r_[True, transaction[1:] != transaction[:-1]]) if len(first) else first
        base[transaction[starts]] = first[starts]
        base[0] = -self._sequence
        self._sequence = total - int(base[-1])
        return first - base[transaction]
