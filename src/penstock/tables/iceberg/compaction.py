"""Compaction of an Iceberg table: small data files replaced by large ones with the same rows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.manifest import DataFile

from penstock.tables.compaction import TableCompaction, given_up, not_found
from penstock.tables.iceberg.attempts import Attempt, delete_abandoned, spoiled
from penstock.tables.iceberg.data_files import FileTarget, gathered, in_schema, written
from penstock.tables.iceberg.keys import all_files
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.iceberg.reading import StoredFile
from penstock.tables.iceberg.row_delta import RowDelta
from penstock.tables.iceberg.transactions import CommitConflict, commit_once
from penstock.tables.iceberg.writer import require_writable

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

_SIZE = "write.target-file-size-bytes"
_ATTEMPTS = 10
_MOST_FILES, _MOST_BYTES = 256, 4 << 30
"""The limits of what one commit merges, and thus of the work that is repeated after a crash."""


def compact(place: IcebergPlace, file_bytes: int, fewest: int) -> TableCompaction:
    """Merge the small files of each partition that has ``fewest`` of them, or enough for a large file.

    Files added in the meantime are left to the next compaction; otherwise queries that keep writing could
    prevent this one from ending.
    """
    table = place.find()
    if table is None:
        raise not_found(f"Iceberg table {place.shown}", place.shown)
    require_writable(place, table)
    delete_abandoned(place, table)
    done, conflicts = TableCompaction(), 0
    among = {task.file.file_path for task in _listed(place, table)}
    while files := small_files(place, table, file_bytes * 3 // 4, file_bytes, fewest, among):
        try:
            new = merge(place, table, files, file_bytes)
            done += TableCompaction(len(files), len(new), 1)
            among |= {file.file_path for file in new}
            conflicts = 0
        except CommitConflict as error:
            conflicts += 1
            if conflicts == _ATTEMPTS:
                shown = f"the Iceberg table {place.shown}"
                raise given_up(shown, place.shown, _ATTEMPTS, str(error)) from None
        table = place.open()
    return done


def small_files(
    place: IcebergPlace,
    table: Table,
    small_bytes: int,
    file_bytes: int,
    fewest: int,
    among: Container[str] | None = None,
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
    for file in _listed(place, table):
        if file.file.file_size_in_bytes < small_bytes and (among is None or file.file.file_path in among):
            partitions.setdefault((file.file.spec_id, file.file.partition), []).append(file)
    chosen: list[FileScanTask] = []
    for small in partitions.values():
        for group in _groups(small, file_bytes):
            if chosen and (len(chosen) + len(group) > _MOST_FILES or _size([*chosen, *group]) > _MOST_BYTES):
                return chosen
            if len(group) >= fewest or (len(group) > 1 and _size(group) >= file_bytes):
                chosen += group
    return chosen


def _listed(place: IcebergPlace, table: Table) -> list[FileScanTask]:
    with place.translating_errors("its manifests cannot be read"):
        return list(all_files(table))


def merge(
    place: IcebergPlace, table: Table, files: Sequence[FileScanTask], file_bytes: int
) -> list[DataFile]:
    """Replace data files of a loaded table by fewer ones with the same rows, in one commit; return the new
    files.

    Once the catalog was asked to commit the new files, they are not deleted here, since it may have committed
    them whatever its reply was. A clean-up deletes them a day later, unless a snapshot has them.

    Raises
    ------
    CommitConflict
        When another writer has changed the files, or committed first each time.
    """
    attempt = Attempt.alone()
    attempt.begin(place, table)
    size = {_SIZE: str(file_bytes)}
    metadata = table.metadata.model_copy(update={"properties": {**table.metadata.properties, **size}})
    target = FileTarget.of(place.shown, table.io, metadata, attempt.token)
    try:
        new = written(target, (in_schema(target, part.columns) for part in _rows(table, files)))
    except BaseException:
        # The failed write has deleted its files.
        attempt.end(place, table)
        raise
    sent: list[int] = []
    for _ in range(_ATTEMPTS):
        now = place.open()
        if _has(now, sent):
            # A component between the client and the catalog repeated the request.
            attempt.end(place, table)
            return new
        if reason := spoiled(place, attempt, new, table, now) or _changed(place, table, now, files):
            raise CommitConflict(reason)
        with suppress(CommitConflict):
            _commit(place, now, files, new, sent)
            attempt.end(place, table)
            return new
    raise CommitConflict(f"other writers were faster {_ATTEMPTS} times")


def _changed(place: IcebergPlace, before: Table, now: Table, files: Sequence[FileScanTask]) -> str | None:
    """Return how files have changed since a table was loaded, if a merge would restore deleted rows."""
    if before.metadata.current_snapshot_id == now.metadata.current_snapshot_id:
        return None
    current = {task.file.file_path: _deletes(task) for task in _listed(place, now)}
    if any(current.get(task.file.file_path) != _deletes(task) for task in files):
        return "rows of the files were deleted, or the files merged by another"
    return None


def _deletes(task: FileScanTask) -> set[str]:
    return {file.file_path for file in task.delete_files}


def _has(table: Table, sent: Sequence[int]) -> bool:
    return any(table.snapshot_by_id(snapshot) is not None for snapshot in sent)


def _commit(
    place: IcebergPlace,
    table: Table,
    old: Sequence[FileScanTask],
    new: Sequence[DataFile],
    sent: list[int],
) -> None:
    """Try to commit once, and add the snapshot's id to ``sent``."""
    commit_once(table)
    with place.translating_errors("the commit failed", beside=(CommitConflict,)):
        transaction = table.transaction()
        with RowDelta(transaction) as update:
            for task in old:
                update.delete_data_file(task.file)
            for file in new:
                update.append_data_file(file)
        sent.append(update.snapshot_id)
        transaction.commit_transaction()


def _rows(table: Table, files: Sequence[FileScanTask]) -> Iterator[pa.Table]:
    stored = (StoredFile(table.io, table.metadata, file) for file in files)
    return gathered(batch for file in stored for batch in file.live_rows(table.schema()))


def _groups(small: Sequence[FileScanTask], file_bytes: int) -> Iterator[list[FileScanTask]]:
    """Divide files into groups, each of about the target size of a file."""
    group: list[FileScanTask] = []
    for file in small:
        group.append(file)
        if _size(group) >= file_bytes or len(group) == _MOST_FILES:
            yield group
            group = []
    if group:
        yield group


def _size(files: Sequence[FileScanTask]) -> int:
    return sum(each.file.file_size_in_bytes for each in files)
