"""``DeltaCopy``: a Delta table as a copy."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.arrow.arrays import grouped
from penstock.errors import CommitRefusedError, TableRefusedError
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.reconciliation.copies import SourceRows, has_history, require_columns
from penstock.reconciliation.rows import Key, key_table, keys_of, stale_keys
from penstock.reconciliation.values import convert_columns, single_array
from penstock.tables.changes.events import PRESENT
from penstock.tables.columns import VALID_TO
from penstock.tables.delta.applied_table import rows_with_keys, stored_rows
from penstock.tables.delta.schema import (
    partition_columns,
    require_partition_values,
    require_partitioning,
)
from penstock.tables.delta.transactions import SOURCE, merge_by_keys, source_columns
from penstock.tables.names import quoted

_PAGE_BYTES = 16 << 20
_MAX_KEYS = 10_000
_ATTEMPTS = 10
_COMMIT_TOKEN = "penstock.repair"
"""A part of the information on a repair's commit."""
_HISTORY = 100
"""The number of commits among which a repair looks for its own."""


@dataclass(frozen=True)
class DeltaCopy:
    """A Delta table; ``names`` maps the columns of the source to its columns."""

    location: DeltaLocation
    schema: pa.Schema
    key: tuple[str, ...]
    names: Mapping[str, str]
    history: bool
    nan_as_null: bool = False

    @classmethod
    def of(cls, url: str, name: str, schema: pa.Schema, key: tuple[str, ...]) -> DeltaCopy:
        location = DeltaLocation.of(url, name)
        table = location.find()
        if table is None:
            raise TableRefusedError(
                f"there is no Delta table {location.label}: check the name and the URL of the folder",
                condition="TABLE_REFUSED.NOT_FOUND",
                table=location.label,
            )
        require_partitioning(location, table)
        existing = {field.name.lower(): field.name for field in table.schema().fields}
        names = {name: existing[name.lower()] for name in schema.names if name.lower() in existing}
        extra_columns = [name for name in existing.values() if name not in names.values()]
        require_columns(schema, [*names, *extra_columns], location.label)
        return cls(location, schema, key, names, has_history(schema, [*names, *extra_columns]))

    @property
    def label(self) -> str:
        return self.location.label

    def pages(self, rows: int) -> Iterator[pa.Table]:
        columns = ", ".join(f"{quoted(self.names[name])} AS {quoted(name)}" for name in self.schema.names)
        where = f" WHERE {quoted(VALID_TO)} IS NULL" if self.history else ""
        table = self.location.open()
        with self.location.translating_errors():
            batches = stored_rows(table, f"SELECT {columns} FROM stored{where}", small_batches=True)
            for group in grouped(batches, rows, _PAGE_BYTES):
                yield self._typed(pa.Table.from_batches(group))

    def _typed(self, rows: pa.Table) -> pa.Table:
        columns = {name: single_array(rows[name]) for name in self.schema.names}
        return convert_columns(
            columns, self.schema, lambda values, kind: values.cast(kind), self.key, self.label
        )

    def find(self, keys: Sequence[Key]) -> Iterator[pa.Table]:
        """Yield the rows with the given keys; this reads the whole table."""
        yield self._rows_with_keys(self.location.open(), keys)

    def _rows_with_keys(self, table: Any, keys: Sequence[Key]) -> pa.Table:
        stored_schema = pa.schema(table.schema().to_arrow())
        history_columns = [VALID_TO] if self.history else []
        fields = [stored_schema.field(name) for name in [*self.names.values(), *history_columns]]
        plain_schema = pa.schema([_without_views(field) for field in fields])
        key_rows = key_table(self._key_schema, keys).rename_columns([self.names[name] for name in self.key])
        key_rows = key_rows.cast(pa.schema([plain_schema.field(self.names[name]) for name in self.key]))
        rows = rows_with_keys(self.location, table, key_rows, plain_schema, part_bytes=_PAGE_BYTES)
        if self.history:
            rows = rows.filter(rows[VALID_TO].is_null())
        return self._typed(rows.select(list(self.names.values())).rename_columns(list(self.names)))

    @property
    def _key_schema(self) -> pa.Schema:
        return pa.schema([self.schema.field(name) for name in self.key])

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def repair(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        """Commit rows of the source, but only if no other writer has committed since the copy was read."""
        parts = [keys[first : first + _MAX_KEYS] for first in range(0, len(keys), _MAX_KEYS)]
        return sum(self._repair_keys(part, source_rows) for part in parts)

    def _repair_keys(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        conflict = import_deltalake("deltalake.exceptions").CommitFailedError
        token, repaired = uuid.uuid4().hex, 0
        for _ in range(_ATTEMPTS):
            table = self.location.open()
            copied = self._rows_with_keys(table, keys)
            rows = source_rows(keys)
            stale = stale_keys(rows, copied, self.key)
            if not stale:
                return repaired
            try:
                with self.location.translating_errors(untranslated=(conflict,)):
                    self._merge(table, rows, stale, token)
                return repaired + len(stale)
            except conflict:
                # Another writer committed first, and may have written newer rows. Or this repair did, and the
                # reply of the storage was lost.
                if self._has_commit(token):
                    repaired += len(stale)
                    token = uuid.uuid4().hex
        raise CommitRefusedError(
            f"other writers changed the Delta table {self.label} during all {_ATTEMPTS} attempts to repair "
            "it: try again when they write less",
            condition="COMMIT_REFUSED.REPAIR_CONFLICT",
            table=self.label,
        )

    def _has_commit(self, token: str) -> bool:
        table = self.location.open()
        with self.location.translating_errors():
            return any(commit.get(_COMMIT_TOKEN) == token for commit in table.history(_HISTORY))

    def _merge(self, table: Any, rows: pa.Table, stale: Sequence[Key], token: str) -> None:
        names = [self.names[name] for name in self.schema.names]
        changes = repair_rows(rows, stale, self.key).rename_columns([*names, PRESENT])
        require_partition_values(changes, partition_columns(table), self.label)
        properties = import_deltalake("deltalake").CommitProperties(
            custom_metadata={_COMMIT_TOKEN: token}, max_commit_retries=0
        )
        is_write, is_delete = (f"{SOURCE}.{quoted(PRESENT)} = {present}" for present in (1, 0))
        merge = merge_by_keys(table, changes, [self.names[name] for name in self.key], properties)
        columns = source_columns(names)
        merge.when_matched_delete(is_delete).when_matched_update(columns, is_write).when_not_matched_insert(
            columns, is_write
        ).execute()


def repair_rows(rows: pa.Table, stale: Sequence[Key], key: Sequence[str]) -> pa.Table:
    """Return the rows to write and the keys to delete, with the column PRESENT (1 or 0)."""
    to_repair = set(stale)
    source_keys = keys_of(rows.select(list(key)))
    writes = rows.filter(pa.array([key_values in to_repair for key_values in source_keys], pa.bool_()))
    deleted = sorted(to_repair - set(source_keys), key=repr)
    keys = key_table(pa.schema([rows.schema.field(name) for name in key]), deleted)
    deletes = [
        keys[field.name] if field.name in key else pa.nulls(len(deleted), field.type) for field in rows.schema
    ]
    nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
    changes = pa.concat_tables(
        [pa.table(writes.columns, schema=nullable), pa.table(deletes, schema=nullable)]
    )
    present = pa.array([1] * writes.num_rows + [0] * len(deleted), pa.int32())
    return changes.append_column(PRESENT, present)


def _without_views(field: pa.Field) -> pa.Field:
    """Replace the view and large types that deltalake uses for text and binary values."""
    kind = field.type
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        kind = pa.string()
    elif pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        kind = pa.binary()
    return pa.field(field.name, kind)
