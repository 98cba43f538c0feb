"""The columns of a queue, current and earlier.

Users can later add columns at the end of a queue, and give a column a wider type. Each of these changes has a
random id, and each segment stores the id of the last change that its writer knew. That id says how to decode
the segment, so stored segments are never rewritten. A restored store lacks the ids of changes that were made
after the backup, even if the same columns have been added to it again. So Penstock recognises rows whose
writer knew such columns.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from penstock.arrow.coerce import same_type
from penstock.arrow.schema import fields_from_bytes, is_wider, schema_from_bytes, schema_to_bytes
from penstock.json_text import unreadable_record

FIRST_COLUMNS = 0
"""The id of the columns that a queue was created with."""
_ID_KEY = b"penstock.columns_id"
"""The metadata key under which the field of a change has its id, as 16 hexadecimal digits."""


@dataclass(frozen=True)
class QueueColumns:
    """The columns of a queue.

    Parameters
    ----------
    first
        The columns that the queue was created with, as an Arrow schema message.
    later
        The later changes, also as an Arrow schema message: new columns, and existing columns with wider
        types. None if there are none.
    """

    first: bytes
    later: bytes | None = None

    @property
    def schema(self) -> pa.Schema:
        """All current columns, with their current types."""
        return _columns(self.first, self.later, self.id)

    @property
    def id(self) -> int:
        """The id of the current columns."""
        return self.ids[-1]

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the columns that the queue was created with and of all changes, in order."""
        return _ids(self.later)

    def of(self, columns_id: int) -> pa.Schema:
        """Return the columns that belong to one of the queue's ids."""
        return _columns(self.first, self.later, columns_id)

    def latest(self, ids: Iterable[int]) -> int:
        """Return the latest of some of the queue's ids."""
        return max(ids, key=self.ids.index)

    def id_of(self, schema: pa.Schema) -> int | None:
        """Return the id of a current or earlier schema of the queue; None if it never had these columns."""
        if schema.equals(self.schema):
            return self.id
        return next(
            (
                columns_id
                for columns_id in reversed(self.ids)
                if _have_same_types(self.of(columns_id), schema)
            ),
            None,
        )

    def extended_with(self, fields: Sequence[pa.Field]) -> bytes:
        """Return ``later`` extended by new or widened columns."""
        new = [(secrets.randbits(62) | 1, field) for field in fields]
        return schema_to_bytes(
            pa.schema(
                [
                    field.with_metadata({**(field.metadata or {}), _ID_KEY: id_text(columns_id)})
                    for columns_id, field in [*_later(self.later), *new]
                ]
            )
        )


def id_text(columns_id: int) -> bytes:
    """Return an id as stored in a queue's ``added_columns``."""
    return b"%016x" % columns_id


def _have_same_types(left: pa.Schema, right: pa.Schema) -> bool:
    return len(left) == len(right) and all(map(same_type, left.types, right.types))


@lru_cache(maxsize=256)
def _later(data: bytes | None) -> tuple[tuple[int, pa.Field], ...]:
    """Return the id and the field of each change."""
    if data is None:
        return ()
    fields, texts = fields_from_bytes(data, _ID_KEY)
    try:
        return tuple((int(text, 16), field) for text, field in zip(texts, fields, strict=True))
    except ValueError as error:
        raise unreadable_record("the schema of a queue", error) from None


@lru_cache(maxsize=256)
def _ids(data: bytes | None) -> tuple[int, ...]:
    return (FIRST_COLUMNS, *(columns_id for columns_id, _ in _later(data)))


@lru_cache(maxsize=1024)
def _columns(first: bytes, later: bytes | None, columns_id: int) -> pa.Schema:
    columns = list(schema_from_bytes(first))
    changes = _later(later)[: _ids(later).index(columns_id)]
    positions = {column.name.lower(): position for position, column in enumerate(columns)}
    for _, field in changes:
        position = positions.setdefault(field.name.lower(), len(columns))
        if position == len(columns):
            columns.append(field)
        elif columns[position].name == field.name and is_wider(field.type, columns[position].type):
            columns[position] = field
        else:
            raise unreadable_record("the schema of a queue", ValueError(f"it has {field.name!r} twice"))
    return pa.schema(columns)
