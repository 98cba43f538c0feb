"""Compaction of an Iceberg table: small data files are replaced by large ones with the same rows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.manifest import DataFile

from penstock.tables.compaction import TableCompaction, attempts_exhausted_error, table_not_found_error
from penstock.tables.iceberg.attempts import Attempt, delete_abandoned, reason_not_to_commit
from penstock.tables.iceberg.data_files import (
    FileTarget,
    cast_to_file_schema,
    to_row_groups,
    write_data_files,
)
from penstock.tables.iceberg.keys import all_files
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.reading import StoredFile
from penstock.tables.iceberg.row_delta import RowDelta
from penstock.tables.iceberg.transactions import CommitConflict, disable_commit_retries
from penstock.tables.iceberg.writer import require_writable

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

_TARGET_SIZE_PROPERTY = "write.target-file-size-bytes"
_ATTEMPTS = 10
_MAX_FILES, _MAX_BYTES = 256, 4 << 30
"""The limits of one commit, and thus of the work that is repeated after a crash."""


def compact(location: IcebergLocation, file_bytes: int, min_files: int) -> TableCompaction:
    """Merge the small files of each partition that has ``min_files`` of them, or enough for a large file.

    Files added in the meantime are left to the next compaction; otherwise queries that keep writing could
    prevent this one from ending.
    """
    table = location.find()
    if table is None:
        raise table_not_found_error(f"Iceberg table {location.label}", location.label)
    require_writable(location, table)
    delete_abandoned(location, table)
    result, conflicts = TableCompaction(), 0
    candidates = {task.file.file_path for task in _list_files(location, table)}
    while files := small_files(location, table, file_bytes * 3 // 4, file_bytes, min_files, candidates):
        try:
            new = merge_files(location, table, files, file_bytes)
            result += TableCompaction(len(files), len(new), 1)
            candidates |= {file.file_path for file in new}
            conflicts = 0
        except CommitConflict as error:
            conflicts += 1
            if conflicts == _ATTEMPTS:
                table_name = f"the Iceberg table {location.label}"
                raise attempts_exhausted_error(table_name, location.label, _ATTEMPTS, str(error)) from None
        table = location.open()
    return result


def small_files(
    location: IcebergLocation,
    table: Table,
    small_bytes: int,
    file_bytes: int,
    min_files: int,
    candidates: Container[str] | None = None,
) -> list[FileScanTask]:
    """Return the files for one commit of a compaction, grouped by partition.

    Parameters
    ----------
    small_bytes
        The size below which files are merged.
    file_bytes
        A partition's files are merged if they are enough for a file of this size.
    fewest
        A partition's files are also merged if it has at least this many small ones.
    among
        The paths of the files to choose from; by default all files of the table.
    """
    partitions: dict[object, list[FileScanTask]] = {}
    for file in _list_files(location, table):
        if file.file.file_size_in_bytes < small_bytes and (
            candidates is None or file.file.file_path in candidates
        ):
            partitions.setdefault((file.file.spec_id, file.file.partition), []).append(file)
    selected: list[FileScanTask] = []
    for small in partitions.values():
        for group in _group_files(small, file_bytes):
            if selected and (
                len(selected) + len(group) > _MAX_FILES or _total_size([*selected, *group]) > _MAX_BYTES
            ):
                return selected
            if len(group) >= min_files or (len(group) > 1 and _total_size(group) >= file_bytes):
                selected += group
    return selected


def _list_files(location: IcebergLocation, table: Table) -> list[FileScanTask]:
    with location.translating_errors("its manifests cannot be read"):
        return list(all_files(table))


def merge_files(
    location: IcebergLocation, table: Table, files: Sequence[FileScanTask], file_bytes: int
) -> list[DataFile]:
    """Replace data files of a loaded table by fewer ones with the same rows, in one commit; return the new
    files.

    New files that were sent to the catalog are not deleted here, since it may have committed them whatever it
    replied. A clean-up deletes them a day later, unless a snapshot has them.

    Raises
    ------
    CommitConflict
        When another writer has changed the files, or committed first each time.
    """
    attempt = Attempt.standalone()
    attempt.write_pending_file(location, table)
    target_size = {_TARGET_SIZE_PROPERTY: str(file_bytes)}
    metadata = table.metadata.model_copy(update={"properties": {**table.metadata.properties, **target_size}})
    target = FileTarget.of(location.label, table.io, metadata, attempt.token)
    try:
        new_files = write_data_files(
            target, (cast_to_file_schema(target, part.columns) for part in _read_rows(table, files))
        )
    except BaseException:
        # The failed write has deleted its files.
        attempt.delete_pending_file(location, table)
        raise
    sent_snapshots: list[int] = []
    for _ in range(_ATTEMPTS):
        current = location.open()
        if _has_any_snapshot(current, sent_snapshots):
            # The commit succeeded although it was reported as a conflict: something retried the request.
            attempt.delete_pending_file(location, table)
            return new_files
        if reason := reason_not_to_commit(
            location, attempt, new_files, table, current
        ) or _reason_files_changed(location, table, current, files):
            raise CommitConflict(reason)
        with suppress(CommitConflict):
            _commit(location, current, files, new_files, sent_snapshots)
            attempt.delete_pending_file(location, table)
            return new_files
    raise CommitConflict(f"other writers were faster {_ATTEMPTS} times")


def _reason_files_changed(
    location: IcebergLocation, loaded: Table, reloaded: Table, files: Sequence[FileScanTask]
) -> str | None:
    """Return how files have changed since a table was loaded, if compaction would restore deleted rows."""
    if loaded.metadata.current_snapshot_id == reloaded.metadata.current_snapshot_id:
        return None
    delete_files = {task.file.file_path: _delete_file_paths(task) for task in _list_files(location, reloaded)}
    if any(delete_files.get(task.file.file_path) != _delete_file_paths(task) for task in files):
        return "rows of the files were deleted, or the files merged by another"
    return None


def _delete_file_paths(task: FileScanTask) -> set[str]:
    return {file.file_path for file in task.delete_files}


def _has_any_snapshot(table: Table, sent_snapshots: Sequence[int]) -> bool:
    return any(table.snapshot_by_id(snapshot) is not None for snapshot in sent_snapshots)


def _commit(
    location: IcebergLocation,
    table: Table,
    old_files: Sequence[FileScanTask],
    new_files: Sequence[DataFile],
    sent_snapshots: list[int],
) -> None:
    """Try to commit once, and add the snapshot's id to ``sent_snapshots``."""
    disable_commit_retries(table)
    with location.translating_errors("the commit failed", untranslated=(CommitConflict,)):
        transaction = table.transaction()
        with RowDelta(transaction) as update:
            for task in old_files:
                update.delete_data_file(task.file)
            for file in new_files:
                update.append_data_file(file)
        sent_snapshots.append(update.snapshot_id)
        transaction.commit_transaction()


def _read_rows(table: Table, files: Sequence[FileScanTask]) -> Iterator[pa.Table]:
    stored = (StoredFile(table.io, table.metadata, file) for file in files)
    return to_row_groups(batch for file in stored for batch in file.live_rows(table.schema()))


def _group_files(files: Sequence[FileScanTask], file_bytes: int) -> Iterator[list[FileScanTask]]:
    """Divide files into groups, each of about the target size of a file."""
    group: list[FileScanTask] = []
    for file in files:
        group.append(file)
        if _total_size(group) >= file_bytes or len(group) == _MAX_FILES:
            yield group
            group = []
    if group:
        yield group


def _total_size(files: Sequence[FileScanTask]) -> int:
    return sum(task.file.file_size_in_bytes for task in files)
