"""Applied events of an Iceberg table: a branch of the data table, which queries of the table do not see.

For SCD type 1 it has the last event of every key so far, for type 2 the deletes. Its data files have the
table's key columns, and two columns that the table lacks. A commit moves this branch and the main branch in
one change of the table's metadata, so the recorded events are always the applied ones. Other engines keep the
newest snapshot of a branch when they expire snapshots, and its files when they delete orphan files.

A property of the table names the matching snapshots of both branches. So a table is refused if the branch was
dropped or moved, or if the table was rolled back, since its applied events would not match its rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent
from pyiceberg.schema import Schema, sanitize_column_names
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update.snapshot import ManageSnapshots, _MergeAppendFiles
from pyiceberg.typedef import Record as Partition
from pyiceberg.types import BooleanType, IcebergType, IntegerType, NestedField, PrimitiveType

from penstock.errors import SchemaMismatchError, TableRefusedError
from penstock.tables.changes.events import PRESENT, SEQUENCE
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.keys import column_bounds
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.rollback import is_rolled_back
from penstock.tables.iceberg.row_delta import RowDelta
from penstock.tables.iceberg.schema import TableLayout
from penstock.tables.iceberg.transactions import CommitConflict, disable_commit_retries

BRANCH, STATE_PROPERTY = "penstock_applied", "penstock.changes"
_SEQUENCE_ID, _PRESENT_ID = 2_000_000_001, 2_000_000_002
"""Field ids that no column of the table has, since tables number their columns from 1."""
_ATTEMPTS = 10
_NEVER_EXPIRE_MS = 1 << 60
"""In milliseconds."""
_MAX_BOUND_BYTES = 64


@dataclass(frozen=True)
class AppliedEventsState:
    """The value of the table property `STATE_PROPERTY`."""

    keys: list[list[Any]]
    """The field id, the name and the type of each key column."""
    sequence: str
    """The type of the column that orders the events of a key."""
    history: bool
    snapshot: int
    """The newest snapshot of the branch."""
    main: int
    """The table's snapshot from the same commit."""
    number: int
    """The sequence number of that snapshot."""


@dataclass(frozen=True)
class AppliedEvents:
    """The applied events of a table, in the branch `BRANCH`."""

    location: IcebergLocation
    keys: tuple[NestedField, ...]
    sequence_type: IcebergType
    keeps_history: bool

    @classmethod
    def of(
        cls, location: IcebergLocation, layout: TableLayout, sequence: IcebergType, history: bool
    ) -> AppliedEvents:
        return cls(location, tuple(layout.key_schema.fields), sequence, history)

    @property
    def schema(self) -> Schema:
        """The columns of the branch's data files."""
        return Schema(
            *(NestedField(key.field_id, key.name, key.field_type, required=False) for key in self.keys),
            NestedField(_SEQUENCE_ID, SEQUENCE, self.sequence_type, required=False),
            NestedField(_PRESENT_ID, PRESENT, IntegerType(), required=False),
        )

    def prepare(self) -> Table:
        """Create the branch if the table has none, or check that it matches; return the loaded table."""
        location = self.location
        for _ in range(_ATTEMPTS):
            table = location.open()
            if STATE_PROPERTY in table.properties or BRANCH in table.metadata.refs:
                break
            # Another process may create the branch at the same time.
            with (
                suppress(CommitConflict),
                location.translating_errors("the commit failed", untranslated=(CommitConflict,)),
            ):
                self._create_branch(table)
        table = location.open()
        self.require_consistent(table.metadata)
        return table

    def _create_branch(self, table: Table) -> None:
        disable_commit_retries(table)
        transaction = table.transaction()
        # The first snapshot of a table must be on its main branch.
        main = transaction.update_snapshot().fast_append()
        main.commit()
        change = AppliedEventsChange(self)
        branch_snapshot = change.commit(transaction)
        transaction.set_properties(change.properties(transaction, branch_snapshot, main.snapshot_id))
        transaction.commit_transaction()

    def require_consistent(self, metadata: TableMetadata) -> None:
        """Refuse a table whose applied events do not match its rows."""
        state, branch = self._read_state(metadata), metadata.refs.get(BRANCH)
        if branch is None:
            raise self._events_lost_error(
                f"its branch {BRANCH} is gone: it was dropped, or not kept by the catalog"
            )
        if branch.snapshot_id != state.snapshot:
            raise self._events_lost_error(f"its branch {BRANCH} was moved")
        if is_rolled_back(metadata, state.main, state.number):
            raise TableRefusedError(
                f"the Iceberg table {self.location.label} was rolled back, but its applied changes were "
                f"not: go back to snapshot {state.main}, or drop the table to start over",
                condition="TABLE_REFUSED.ROLLED_BACK",
                table=self.location.label,
                snapshot=state.main,
            )
        self._require_same_settings(state)

    def _read_state(self, metadata: TableMetadata) -> AppliedEventsState:
        text = metadata.properties.get(STATE_PROPERTY)
        if text is None:
            raise self._events_lost_error(f"its property {STATE_PROPERTY} was removed")
        try:
            return AppliedEventsState(**json.loads(text))
        except (ValueError, TypeError):
            raise self._events_lost_error(f"its property {STATE_PROPERTY} cannot be read") from None

    def _events_lost_error(self, reason: str) -> TableRefusedError:
        return TableRefusedError(
            f"the Iceberg table {self.location.label} has lost the record of applied changes: {reason}. "
            "Restore it, or drop the table to start over",
            condition="TABLE_REFUSED.CHANGES_FORGOTTEN",
            table=self.location.label,
        )

    def _require_same_settings(self, state: AppliedEventsState) -> None:
        """Refuse keys, a sequence type or an SCD type that differ from those of the applied events."""
        ids = [key[0] for key in state.keys]
        same_keys = ids == [key[0] for key in self._key_descriptions] and _types(state.keys) == _types(
            self._key_descriptions
        )
        if not same_keys or state.sequence != str(self.sequence_type):
            raise SchemaMismatchError(
                f"earlier changes of the Iceberg table {self.location.label} were ordered by "
                f"{state.sequence} with the keys {_keys_for_messages(state.keys)}, and these are ordered by "
                f"{self.sequence_type} with {_keys_for_messages(self._key_descriptions)}: keep keys and "
                "sequence_by, or drop the table to start over",
                condition="SCHEMA_MISMATCH.KEYS_CHANGED",
                table=self.location.label,
            )
        if state.history != self.keeps_history:
            raise SchemaMismatchError(
                f"changes were applied to the Iceberg table {self.location.label} with "
                f"scd_type={2 if state.history else 1}: keep it, or use another table",
                condition="SCHEMA_MISMATCH.TABLE_DIFFERS",
                table=self.location.label,
            )

    @property
    def _key_descriptions(self) -> list[list[Any]]:
        return [[key.field_id, key.name, str(key.field_type)] for key in self.keys]

    def files(self, table: Table) -> list[FileScanTask]:
        """Return the branch's data files in a loaded table."""
        with self.location.translating_errors("its manifests cannot be read"):
            snapshot = table.metadata.snapshot_by_name(BRANCH)
            return [
                FileScanTask(entry.data_file)
                for manifest in ([] if snapshot is None else snapshot.manifests(table.io))
                if manifest.content == ManifestContent.DATA
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            ]

    def files_with_keys(self, files: Sequence[FileScanTask], keys: pa.Table) -> list[FileScanTask]:
        """Return the files that may have one of the keys by their bounds; keys have the table's types."""
        ranges = [column_bounds(column) for column in keys.columns]
        return [file for file in files if not self._excludes_keys(file.file, ranges)]

    def _excludes_keys(self, file: DataFile, ranges: Sequence[tuple[Any, Any]]) -> bool:
        for key, (low, high) in zip(self.keys, ranges, strict=True):
            file_bounds = (file.lower_bounds, file.upper_bounds)
            minimum, maximum = ((bounds_by_field or {}).get(key.field_id) for bounds_by_field in file_bounds)
            kind = key.field_type
            if minimum is None or maximum is None or not isinstance(kind, PrimitiveType):
                continue
            if from_bytes(kind, maximum) < low or high < from_bytes(kind, minimum):
                return True
        return False


@dataclass(frozen=True)
class AppliedEventsChange:
    """The files that a commit removes from the applied-events branch and adds to it."""

    applied_events: AppliedEvents
    removed: Sequence[DataFile] = ()
    added: Sequence[DataFile] = ()

    def commit(self, transaction: Transaction) -> int:
        """Add a snapshot to the branch in a transaction, if anything changes; return the newest snapshot."""
        branch = transaction.table_metadata.refs.get(BRANCH)
        if branch is not None and not self.removed and not self.added:
            return branch.snapshot_id
        producer: RowDelta | _MergeAppendFiles
        if self.removed:
            producer = RowDelta(transaction, branch=BRANCH)
        else:
            producer = transaction.update_snapshot(branch=BRANCH).merge_append()
        for file in self.removed:
            producer.delete_data_file(file)
        for file in self.added:
            producer.append_data_file(file)
        producer.commit()
        # Keep only the newest snapshot, but keep it however long the table's queries are down.
        manage = ManageSnapshots(transaction).create_branch(
            producer.snapshot_id,
            BRANCH,
            max_ref_age_ms=_NEVER_EXPIRE_MS,
            max_snapshot_age_ms=1,
            min_snapshots_to_keep=1,
        )
        manage.commit()
        return producer.snapshot_id

    def properties(
        self, transaction: Transaction, branch_snapshot: int, main_snapshot: int
    ) -> dict[str, str]:
        """Return `STATE_PROPERTY` for the snapshots of both branches in the transaction."""
        applied_events, snapshot = (
            self.applied_events,
            transaction.table_metadata.snapshot_by_id(main_snapshot),
        )
        sequence_number = 0 if snapshot is None else snapshot.sequence_number or 0
        state = AppliedEventsState(
            applied_events._key_descriptions,
            str(applied_events.sequence_type),
            applied_events.keeps_history,
            branch_snapshot,
            main_snapshot,
            sequence_number,
        )
        return {STATE_PROPERTY: json.dumps(asdict(state))}


def write_events(target: FileTarget, columns: Schema, events: pa.Table) -> DataFile:
    """Write events, in the column order of the branch, to a data file that no snapshot has yet."""
    schema = sanitize_column_names(columns)
    arrow = schema_to_pyarrow(schema)
    rows = events.rename_columns(arrow.names).cast(arrow)
    path = target.new_path()
    with target.io.new_output(path).create(overwrite=True) as out:
        pq.write_table(rows, out, compression="zstd")
        size = out.tell()
    lows, highs = _bounds(schema, rows)
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        # Events have no partition values, even if the table is partitioned by a key.
        partition=Partition(*[None] * len(target.metadata.spec().fields)),
        record_count=rows.num_rows,
        file_size_in_bytes=size,
        lower_bounds=lows,
        upper_bounds=highs,
        sort_order_id=None,
        spec_id=target.metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
    )


def _bounds(schema: Schema, rows: pa.Table) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the lower and upper bounds of the columns with short values."""
    lows, highs = {}, {}
    for column in schema.fields:
        kind = column.field_type
        if not rows.num_rows or not isinstance(kind, PrimitiveType) or isinstance(kind, BooleanType):
            continue
        low, high = (to_bytes(kind, value) for value in column_bounds(rows[column.name]))
        if max(len(low), len(high)) <= _MAX_BOUND_BYTES:
            lows[column.field_id], highs[column.field_id] = low, high
    return lows, highs


def _types(keys: Sequence[Sequence[Any]]) -> list[Any]:
    return [key[2] for key in keys]


def _keys_for_messages(keys: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} {kind}" for _, name, kind in keys)
