"""Vectorized decoder of ``pgoutput`` messages (protocol version 1, values as text).

The format is described in the PostgreSQL manual, "Logical Replication Message Formats". A buffer of messages
is decoded column by column, for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import ChangelogContractViolationError
from penstock.json_text import Json

BEGIN, COMMIT, RELATION, TRUNCATE = b"BCRT"
INSERT, UPDATE, DELETE = b"IUD"
NEW, OLD, KEY = b"NOK"
TEXT, NULL, UNCHANGED = b"tnu"
_KINDS = np.isin(np.arange(256), list(b"BCRTIUDOYM"))
"""Whether a first byte belongs to a known message. Origins, types and logical messages (OYM) have no rows."""
_EPOCH = 946_684_800_000_000
"""Microseconds from 1970 to 2000, the epoch of PostgreSQL."""
_MAX_BYTES = 2**31 - 64
_IN_IDENTITY = 1
Item = TypeVar("Item", bound=np.generic)
Integers: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """A column as described by a Relation message or the catalog."""

    name: str
    type: int
    """The object id of the type."""
    modifier: int = -1
    key: bool = False
    """Whether the column belongs to the replica identity; with ``full``, all columns do."""


@dataclass(frozen=True)
class Relation:
    """A table, as described by a Relation message for the rows after it."""

    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]
    identity: str = "d"
    """The first letter of the replica identity: default, index, full or nothing."""

    @cached_property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def identifying(self) -> tuple[str, ...]:
        """The names of the columns in the replica identity."""
        return tuple(column.name for column in self.columns if column.key)

    @classmethod
    def from_json(cls, value: Json) -> Relation:
        return cls(**{**value, "columns": tuple(Column(**column) for column in value["columns"])})

    @classmethod
    def of(cls, message: bytes) -> Relation:
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
        # The protocol sends pg_catalog as an empty name.
        return cls(oid, schema or "pg_catalog", table, tuple(columns), identity)


def _text(message: bytes, start: int) -> tuple[str, int]:
    end = message.index(0, start)
    return message[start:end].decode(), end + 1


def _require_known(kinds: Bytes) -> None:
    """Refuse messages of other versions of the protocol, whose rows would get the commit before them."""
    unknown = kinds[~_KINDS[kinds]]
    if len(unknown):
        raise ChangelogContractViolationError(f"pgoutput sent a message of unknown kind {chr(unknown[0])!r}")


def truncated_relations(message: bytes) -> list[int]:
    oids: list[int] = np.frombuffer(message, ">u4", offset=6).tolist()
    return oids


class Buffer:
    """Concatenated messages, with vectorized access to integers at any offset."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        # With this padding, an integer can be read at any offset of the last message.
        self.data = b"".join((*messages, bytes(8)))
        if len(self.data) > _MAX_BYTES:
            raise ChangelogContractViolationError(
                f"{len(messages)} messages have {len(self.data)} bytes in total"
            )
        sizes = np.fromiter(map(len, messages), np.int64, len(messages))
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.bytes = np.frombuffer(self.data, np.uint8)
        self._int32: NDArray[np.int32] = np.ndarray((len(self.data) - 3,), ">i4", self.data, strides=(1,))
        self._int64: Integers = np.ndarray((len(self.data) - 7,), ">i8", self.data, strides=(1,))

    def message(self, index: int) -> bytes:
        return self.data[self.starts[index] : self.ends[index]]

    def int32(self, places: Integers) -> Integers:
        return self._int32[places].astype(np.int64)

    def int64(self, places: Integers) -> Integers:
        return self._int64[places].astype(np.int64)


@dataclass(frozen=True)
class Truncation:
    """A TRUNCATE of relations in a transaction."""

    relations: list[Relation]
    version: int


class Values(NamedTuple):
    """One column of tuples: the kind of each value, and its start and end in the buffer."""

    kinds: Bytes
    starts: Integers
    ends: Integers


class Changes:
    """The tuples of one relation in log order; an update with an old tuple has two.

    ``place`` orders the tuples of all relations in a buffer. ``partner`` is the index of the old tuple for a
    new tuple, or -1.
    """

    def __init__(self, buffer: Buffer, relation: Relation, starts: Integers) -> None:
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
        self.transaction = self.version
        """The lower 32 bits of the transaction ids."""

    def __len__(self) -> int:
        return len(self.message)

    @cached_property
    def _columns(self) -> list[Values]:
        width = len(self.relation.columns)
        first, ends = self._walk(self._starts + 6, width)
        if not len(self._second):
            return first
        # Another marker follows the old tuple.
        second, _ = self._walk(ends[self._paired] + 1, width)
        return [self._interleaved(one, other) for one, other in zip(first, second, strict=True)]

    def _walk(self, place: Integers, width: int) -> tuple[list[Values], Integers]:
        """Locate the columns of tuples that start at the given offsets; return them and the tuples' ends."""
        place = place + 2
        columns = []
        for _ in range(width):
            kinds = self._buffer.bytes[place]
            sized = kinds == TEXT
            if sized.all():
                starts = place + 5
                place = starts + self._buffer.int32(place + 1)
            else:
                starts = place + np.where(sized, 5, 1)
                place = starts + np.where(sized, self._buffer.int32(place + 1), 0)
            columns.append(Values(kinds, starts, place))
        return columns, place

    def _interleaved(self, one: Values, other: Values) -> Values:
        def interleaved(left: NDArray[Item], right: NDArray[Item]) -> NDArray[Item]:
            interleaved_values = np.empty(len(self), left.dtype)
            interleaved_values[self._first], interleaved_values[self._second] = left, right
            return interleaved_values

        return Values(
            interleaved(one.kinds, other.kinds),
            interleaved(one.starts, other.starts),
            interleaved(one.ends, other.ends),
        )

    def text(self, column: int) -> pa.StringArray:
        """Return a column as text; unchanged TOAST values are taken from the old tuple, or null."""
        values = self._columns[column]
        # Every second element of the array is a value; the others are the bytes between values.
        bounds = np.empty(2 * len(self), np.int32)
        bounds[0::2], bounds[1::2] = values.starts, values.ends
        parts = pa.Array.from_buffers(
            pa.string(),
            max(len(bounds) - 1, 0),
            [None, pa.py_buffer(bounds), pa.py_buffer(self._buffer.data)],
        )
        rows = np.arange(len(self), dtype=np.int32)
        known = values.kinds == TEXT
        if not known.all():
            in_old_tuple = self._in_old_tuple(values)
            rows = np.where(in_old_tuple, self.partner, rows).astype(np.int32)
            known = known | in_old_tuple
        return parts.take(pa.array(rows * np.int32(2), mask=None if known.all() else ~known))

    def unchanged(self, column: int) -> Mask:
        """Return the mask of unchanged TOAST values that are not in the old tuple either."""
        values = self._columns[column]
        unchanged: Mask = (values.kinds == UNCHANGED) & ~self._in_old_tuple(values)
        return unchanged

    def _in_old_tuple(self, values: Values) -> Mask:
        partner = values.kinds[self.partner]
        in_old_tuple: Mask = (values.kinds == UNCHANGED) & (self.partner >= 0) & (partner == TEXT)
        return in_old_tuple


class Decoder:
    """Decoder of a range of a slot's transactions, without skipped ones. It keeps the current relations.

    ``wanted`` is called with each relation and the transaction of its first row. It returns whether to decode
    the rows, and raises if they cannot be read. Rows that are not decoded have no sequence number.
    """

    def __init__(
        self, after: int, upto: int, wanted: Callable[[Relation, int], bool], skipped: Collection[int] = ()
    ) -> None:
        self._after, self._upto, self._wanted = after, upto, wanted
        self._skipped = np.array(sorted(skipped), np.int64)
        self._relations: dict[int, Relation] = {}
        self._version = self._timestamp = self._transaction = self._sequence = 0

    def begin(self, version: int, timestamp: int, sequence: int, relation: Relation) -> None:
        """Begin inside a transaction, for rows of a snapshot, which have no Begin and Relation messages."""
        self._version, self._timestamp, self._sequence = version, timestamp, sequence
        self._relations[relation.oid] = relation

    def fork(self) -> Decoder:
        """Return a copy of the decoder in its current state."""
        other = Decoder(self._after, self._upto, self._wanted)
        other._skipped, other._relations = self._skipped, dict(self._relations)
        other._version, other._timestamp = self._version, self._timestamp
        other._transaction = self._transaction
        other._sequence = self._sequence
        return other

    @property
    def version(self) -> int:
        """The last transaction that began."""
        return self._version

    @property
    def rows(self) -> int:
        """Number of decoded tuples of that transaction, including old tuples that are not rows."""
        return self._sequence

    def decode(self, messages: Sequence[bytes]) -> Iterator[list[Changes] | Truncation]:
        """Yield changes in parts without a change of a relation, and the truncations between the parts."""
        buffer = Buffer(messages)
        kinds = buffer.bytes[buffer.starts]
        _require_known(kinds)
        start = 0
        for index in np.flatnonzero((kinds == RELATION) | (kinds == TRUNCATE)).tolist():
            message = buffer.message(index)
            if kinds[index] == TRUNCATE:
                yield self._part(buffer, kinds, start, index)
                start = index
                if self._in_range(np.array([self._version]))[0]:
                    oids = truncated_relations(message)
                    relations = [self._relations[oid] for oid in oids if oid in self._relations]
                    yield Truncation(relations, self._version)
                continue
            relation = Relation.of(message)
            if self._relations.get(relation.oid, relation) != relation:
                yield self._part(buffer, kinds, start, index)
                start = index
            self._relations[relation.oid] = relation
        yield self._part(buffer, kinds, start, len(messages))

    def _in_range(self, versions: Integers) -> Mask:
        in_range = (versions > self._after) & (versions <= self._upto)
        return in_range & ~np.isin(versions, self._skipped) if len(self._skipped) else in_range

    def _part(self, buffer: Buffer, all_kinds: Bytes, low: int, high: int) -> list[Changes]:
        starts, kinds = buffer.starts[low:high], all_kinds[low:high]
        begins = np.flatnonzero(kinds == BEGIN)
        versions = np.r_[self._version, buffer.int64(starts[begins] + 1)]
        timestamps = np.r_[self._timestamp, buffer.int64(starts[begins] + 9) + _EPOCH]
        numbers = np.r_[self._transaction, buffer.int32(starts[begins] + 17) & 0xFFFFFFFF]
        self._version, self._timestamp = int(versions[-1]), int(timestamps[-1])
        self._transaction = int(numbers[-1])
        rows = np.flatnonzero((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE))
        transaction = np.searchsorted(begins, rows)
        in_range = self._in_range(versions)[transaction]
        rows, transaction = rows[in_range], transaction[in_range]
        oids, firsts, relation_index = np.unique(
            buffer.int32(starts[rows] + 1) & 0xFFFFFFFF, return_index=True, return_inverse=True
        )
        relations = [self._relation(oid) for oid in oids.tolist()]
        versions_of_first = versions[transaction[firsts]].tolist()
        wanted = np.array(list(map(self._wanted, relations, versions_of_first)), bool)
        if not wanted.all():
            keep = wanted[relation_index]
            rows, transaction, relation_index = rows[keep], transaction[keep], relation_index[keep]
        by_relation = []
        for group in np.flatnonzero(wanted).tolist():
            places = np.flatnonzero(relation_index == group)
            by_relation.append((Changes(buffer, relations[group], starts[rows[places]]), places))
        width = np.ones(len(rows), np.int64)
        for changes, places in by_relation:
            width[places] += np.bincount(changes.message, minlength=len(places)) - 1
        last = np.cumsum(width)
        sequence = self._sequences(transaction, last - width, len(begins), int(width.sum()))
        for changes, places in by_relation:
            # The second tuple of a message directly follows the first one.
            second = (changes.partner >= 0).astype(np.int64)
            message = places[changes.message]
            changes.place = (last - width)[message] + second
            changes.sequence = sequence[message] + second
            changes.version = versions[transaction[message]]
            changes.timestamp = timestamps[transaction[message]]
            changes.transaction = numbers[transaction[message]]
        return [changes for changes, _ in by_relation]

    def _relation(self, oid: int) -> Relation:
        if oid not in self._relations:
            raise ChangelogContractViolationError(
                f"pgoutput sent a row of relation {oid} before its Relation message"
            )
        return self._relations[oid]

    def _sequences(self, transaction: Integers, first: Integers, begin_count: int, total: int) -> Integers:
        """Return the position of each message in its transaction, continued from the previous buffer."""
        base = np.full(begin_count + 1, total, np.int64)
        starts = np.flatnonzero(np.r_[True, transaction[1:] != transaction[:-1]]) if len(first) else first
        base[transaction[starts]] = first[starts]
        base[0] = -self._sequence
        self._sequence = total - int(base[-1])
        return first - base[transaction]
