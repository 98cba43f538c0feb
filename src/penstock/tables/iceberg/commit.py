"""Commit of a micro-batch to an Iceberg table: the driver adds one snapshot, and reads no rows."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Table, Transaction
from pyiceberg.table.update.snapshot import _MergeAppendFiles

from penstock.errors import CommitRefusedError, PenstockError
from penstock.lake.storage import without_secrets
from penstock.parallel import in_parallel
from penstock.tables.iceberg.applied_events import AppliedEventsChange
from penstock.tables.iceberg.attempts import delete_files
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.keys import files_with_keys, filter_for_files
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.rewriting import Rewriter, RewrittenFile
from penstock.tables.iceberg.row_delta import RowDelta
from penstock.tables.iceberg.schema import RowLayout, TableLayout, match_table, replace_columns
from penstock.tables.iceberg.transactions import CommitConflict, MicroBatch, disable_commit_retries

_ATTEMPTS = 10
_OLD_SECONDS = 1800.0
_MIN_BACKOFF, _MAX_BACKOFF = 0.05, 5.0


@dataclass(frozen=True)
class Target:
    """A table, and the columns that a query writes to it."""

    location: IcebergLocation
    rows: RowLayout
    mode: str

    def layout(self, transaction: Transaction) -> TableLayout:
        """Return the table's columns; in output mode complete they are replaced by the rows' columns."""
        with self.location.translating_errors("its columns cannot be replaced"):
            if self.mode == "complete":
                replace_columns(self.rows, transaction)
            metadata = transaction.table_metadata
        return match_table(self.location, self.rows, metadata.schema(), metadata.default_spec_id)

    def files(self, table: Table, transaction: Transaction, token: str) -> FileTarget:
        return FileTarget.of(self.location.label, table.io, transaction.table_metadata, token)

    def refuse_rollback(self, table: Table, batch: MicroBatch | None) -> None:
        """Refuse a table that has lost commits of the query; mode complete replaces all rows in any case."""
        if batch is not None and self.mode != "complete":
            batch.refuse_rollback(table, self.location.label)


@dataclass(frozen=True)
class FileChanges:
    """The files that a commit adds and removes."""

    removed: Sequence[DataFile]
    """The data files that are removed from the table."""
    added: Sequence[DataFile]
    deletes: Sequence[DataFile] = ()
    """New delete files."""
    merged_deletes: Sequence[DataFile] = ()
    """Old delete files, whose positions are merged into the new ones."""
    applied_events_change: AppliedEventsChange | None = None
    """The change of the applied-events branch."""

    @classmethod
    def of(
        cls,
        rewritten: Sequence[RewrittenFile],
        added: Sequence[DataFile],
        applied_events_change: AppliedEventsChange | None = None,
    ) -> FileChanges:
        """Return the changes that add files and rewrite stored ones."""
        removed = [rewrite.old_file for rewrite in rewritten if rewrite.delete_file is None]
        new = [file for rewrite in rewritten for file in rewrite.new_files]
        deletes = [rewrite.delete_file for rewrite in rewritten if rewrite.delete_file is not None]
        merged = [file for rewrite in rewritten for file in rewrite.merged_deletes]
        return cls(removed, [*added, *new], deletes, merged, applied_events_change)

    @property
    def is_append(self) -> bool:
        return not self.removed and not self.deletes

    @property
    def new_files(self) -> list[DataFile]:
        return [
            *self.added,
            *self.deletes,
            *(self.applied_events_change.added if self.applied_events_change is not None else []),
        ]


@dataclass
class Commit:
    """The commit of data files that tasks have written, retried after conflicts with other writers."""

    target: Target
    layout: TableLayout
    """The columns that the tasks wrote."""
    staged_files: Sequence[DataFile]
    io: FileIO
    """The table's ``FileIO``."""
    token: str
    """The attempt's token."""
    batch_id: int
    batch: MicroBatch | None
    """None if the table does not record micro-batches."""
    rewriter: Rewriter | None = None
    """Rewrites stored files in output mode update."""
    started_at: float = field(default_factory=time.time)
    _sent_snapshots: dict[int, set[str]] = field(default_factory=dict)
    """The data files of each snapshot that was sent to the catalog."""
    _committed_files: set[str] = field(default_factory=set)
    """The files of this commit that the table has."""
    _outcome_known: bool = True
    """Whether it is certain which files of this commit the table has."""

    def run(self) -> None:
        """Commit the files, unless there are none or another run has committed the micro-batch."""
        if not self._has_changes:
            return
        self._committed_files = self._commit_with_retries()
        self._outcome_known = True

    @property
    def _has_changes(self) -> bool:
        return bool(self.staged_files) or self.target.mode == "complete"

    @property
    def tasks_retried(self) -> bool:
        """Whether a task was retried, so that its earlier attempt may have left a file."""
        return self.rewriter is not None and self.rewriter.tasks_retried

    def delete_unused(self) -> None:
        """Delete the files that the table does not have.

        If the outcome of a commit is unknown, its data files are left to a later clean-up, which checks
        whether a snapshot has them.
        """
        in_use = self._committed_files if self._outcome_known else self._written_table_paths()
        unused = [path for path in self._written_paths() if path not in in_use]
        if unused:
            delete_files(self.target.location, self.io, unused)

    def _commit_with_retries(self) -> set[str]:
        """Commit with retries; return the committed files, or an empty set if another run committed them."""
        location = self.target.location
        last_conflict = ""
        for attempt in range(_ATTEMPTS + 1):
            if attempt:
                time.sleep(random.uniform(0, min(_MAX_BACKOFF, _MIN_BACKOFF * 2**attempt)))
            table = location.open()
            committed_files = self._files_if_committed(table)
            if committed_files is not None:
                return committed_files
            if attempt == _ATTEMPTS:
                break
            try:
                return self._try_commit(table)
            except CommitConflict as error:
                last_conflict = without_secrets(error.__cause__ or error, *location.secrets)
            except PenstockError:
                # The catalog may have committed, and only the reply was lost.
                if (
                    not self._sent_snapshots
                    or (committed_files := self._files_if_committed(location.open())) is None
                ):
                    raise
                return committed_files
        raise CommitRefusedError(
            f"other writers changed the Iceberg table {location.label} at each of the {_ATTEMPTS} times that "
            f"batch {self.batch_id} was committed ({last_conflict}). Nothing of the batch is visible: "
            "restart the query, it repeats the micro-batch",
            condition="COMMIT_REFUSED.TABLE_CHANGED",
            table=location.label,
            batch_id=self.batch_id,
        )

    def _files_if_committed(self, table: Table) -> set[str] | None:
        """Return which of the files the table has; None if it does not have the micro-batch."""
        for snapshot_id, paths in self._sent_snapshots.items():
            if table.snapshot_by_id(snapshot_id) is not None:
                return paths
        committed = None if self.batch is None else self.batch.committed(table)
        if committed is None:
            return None
        # The snapshot of this attempt may already have expired.
        return self._written_table_paths() if committed.attempt == self.token else set()

    def _try_commit(self, table: Table) -> set[str]:
        disable_commit_retries(table)
        self.target.refuse_rollback(table, self.batch)
        transaction = table.transaction()
        self._require_same_columns(self.target.layout(transaction))
        self._require_files(table, self._staged_paths())
        changes = self._changes(table, transaction)
        if changes is None:
            # An earlier attempt that ended with a conflict may still have committed all of the changes.
            return self._written_table_paths() if self._sent_snapshots else set()
        if time.time() - self.started_at > _OLD_SECONDS:
            # If the driver was suspended, a clean-up may have deleted the files of the seemingly dead query.
            self._require_files(table, [file.file_path for file in changes.new_files])
        with self.target.location.translating_errors("the commit failed", untranslated=(CommitConflict,)):
            return self._commit_changes(transaction, changes)

    def _commit_changes(self, transaction: Transaction, changes: FileChanges) -> set[str]:
        """Commit changes once, and return the paths of the added files."""
        summary = {} if self.batch is None else self.batch.summary(self.token)
        branch_snapshot = (
            None
            if changes.applied_events_change is None
            else changes.applied_events_change.commit(transaction)
        )
        producer: RowDelta | _MergeAppendFiles
        if changes.is_append and self.target.mode != "complete":
            producer = transaction.update_snapshot(snapshot_properties=summary).merge_append()
        else:
            producer = RowDelta(transaction, summary)
            for file in changes.removed:
                producer.delete_data_file(file)
            for file in changes.deletes:
                producer.append_delete_file(file)
            for file in changes.merged_deletes:
                producer.remove_delete_file(file)
        for file in changes.added:
            producer.append_data_file(file)
        producer.commit()
        properties = self._properties(transaction, producer.snapshot_id)
        if changes.applied_events_change is not None and branch_snapshot is not None:
            properties |= changes.applied_events_change.properties(
                transaction, branch_snapshot, producer.snapshot_id
            )
        transaction.set_properties(properties)
        self._sent_snapshots[producer.snapshot_id] = {file.file_path for file in changes.new_files}
        self._outcome_known = False
        transaction.commit_transaction()
        return self._sent_snapshots[producer.snapshot_id]

    def _properties(self, transaction: Transaction, snapshot_id: int) -> dict[str, str]:
        """Return the table properties that record the micro-batch."""
        snapshot = transaction.table_metadata.snapshot_by_id(snapshot_id)
        return {} if self.batch is None or snapshot is None else self.batch.properties(self.token, snapshot)

    def _changes(self, table: Table, transaction: Transaction) -> FileChanges | None:
        """Return the changes to a loaded table; None if there are none."""
        if self.target.mode == "complete":
            with self.target.location.translating_errors("its manifests cannot be read"):
                return FileChanges(list(_data_files(table)), self.staged_files)
        if self.rewriter is None:
            return FileChanges([], self.staged_files)
        ranges = filter_for_files(table.schema(), self.layout.key_schema, self.staged_files)
        files = files_with_keys(self.target.location, table, ranges)
        rewritten = self.rewriter.rewrite(self.target.files(table, transaction, self.token), files)
        return FileChanges.of(rewritten, self.staged_files)

    def _staged_paths(self) -> list[str]:
        """Return the files that tasks have written with the micro-batch's rows."""
        return [file.file_path for file in self.staged_files]

    def _written_paths(self) -> set[str]:
        """Return all files that were written."""
        return self._written_table_paths()

    def _written_table_paths(self) -> set[str]:
        """Return all files that were written for the table."""
        rewritten = self.rewriter.paths if self.rewriter is not None else []
        return {*self._staged_paths(), *rewritten}

    def _require_files(self, table: Table, paths: Sequence[str]) -> None:
        """Refuse to commit when data files are missing."""
        with self.target.location.translating_errors("its data files cannot be found"):
            files_exist = in_parallel(lambda path: table.io.new_input(path).exists(), paths)
        if not all(files_exist):
            raise CommitRefusedError(
                f"some data files that the tasks wrote for batch {self.batch_id} are missing in the location "
                f"of the Iceberg table {self.target.location.label} on the driver: use a location that all "
                "machines share. Nothing of the batch is visible: restart the query, it repeats the "
                "micro-batch",
                condition="COMMIT_REFUSED.STAGED_FILES_MISSING",
                batch_id=self.batch_id,
            )

    def _require_same_columns(self, layout: TableLayout) -> None:
        """Refuse data files that were written for columns that the table no longer has."""
        current_columns = {column.field_id: column for column in layout.schema.fields}
        written_columns = {column.field_id: column for column in self.layout.schema.fields}
        are_unchanged = all(
            current_columns.get(field_id) == column for field_id, column in written_columns.items()
        )
        has_new_required = any(
            column.required for field_id, column in current_columns.items() if field_id not in written_columns
        )
        if not are_unchanged or has_new_required or layout.spec_id != self.layout.spec_id:
            raise CommitRefusedError(
                f"the columns or the partitioning of the Iceberg table {self.target.location.label} changed "
                f"while batch {self.batch_id} was written. Nothing of the batch is visible: restart the "
                "query, it repeats the micro-batch",
                condition="COMMIT_REFUSED.TABLE_CHANGED",
                table=self.target.location.label,
                batch_id=self.batch_id,
            )


def _data_files(table: Table) -> Iterator[DataFile]:
    """Yield all data files of the table."""
    snapshot = table.current_snapshot()
    for manifest in [] if snapshot is None else snapshot.manifests(table.io):
        if manifest.content == ManifestContent.DATA:
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                yield entry.data_file
