"""Attempts to write a micro-batch to an Iceberg table, and deletion of the files of abandoned attempts.

Tasks write data files next to the table's own, so the files of an attempt that is never committed stay in the
same folder. Each attempt has a pending file from before its tasks start until it has ended: an empty file in
``penstock-pending`` in the table's data folder. If the driver dies, the pending file is left, and a day later
the start of a query deletes the attempt's files that no snapshot refers to. The clean-up of other engines
also finds both as orphan files, since no name begins with an underscore or a dot, which they skip.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyarrow.fs import FileSelector, FileType
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from penstock.errors import condition_of
from penstock.parallel import in_parallel
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.names import digest

log = logging.getLogger("penstock.tables")

PENDING_FOLDER = "penstock-pending"
_DAY_SECONDS = 86_400.0
_MAX_ATTEMPT_SECONDS = 3600.0
"""The time after which a standalone attempt's files are not committed, as a clean-up may soon delete them."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at one micro-batch."""

    app_digest: str
    """A digest of the app id."""
    started_at: int
    """In seconds since 1970."""
    token: str
    """Part of the names of all data files of the attempt."""

    @classmethod
    def new(cls, app_id: str) -> Attempt:
        return cls(digest(app_id), int(time.time()), uuid.uuid4().hex)

    @classmethod
    def standalone(cls) -> Attempt:
        """Return an attempt with an app id of its own, so no later attempt protects it from clean-up."""
        return cls.new(f"run:{uuid.uuid4()}")

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """Return the attempt that a pending file names."""
        parts = name.split("-")
        if len(parts) != 3 or not parts[1].isdigit():
            return None
        return cls(parts[0], int(parts[1]), parts[2])

    @property
    def file_name(self) -> str:
        return f"{self.app_digest}-{self.started_at}-{self.token}"

    def write_pending_file(self, location: IcebergLocation, table: Table) -> None:
        """Write the pending file."""
        with (
            location.translating_errors("a file cannot be written"),
            table.io.new_output(_pending_file(table, self)).create(overwrite=True),
        ):
            pass

    def delete_pending_file(self, location: IcebergLocation, table: Table) -> None:
        """Delete the pending file; after an error, a later clean-up deletes it."""
        delete_files(location, table.io, [_pending_file(table, self)])


def reason_not_to_commit(
    location: IcebergLocation, attempt: Attempt, files: Sequence[DataFile], written_for: Table, current: Table
) -> str | None:
    """Return why files written for an earlier version of a table must not be committed to the current one."""
    old_metadata, new_metadata = written_for.metadata, current.metadata
    if (old_metadata.current_schema_id, old_metadata.default_spec_id) != (
        new_metadata.current_schema_id,
        new_metadata.default_spec_id,
    ):
        return "its columns or its partitioning have changed"
    if time.time() - attempt.started_at > _MAX_ATTEMPT_SECONDS:
        return "writing the files took too long"
    with location.translating_errors("its data files cannot be found"):
        files_exist = in_parallel(lambda file: current.io.new_input(file.file_path).exists(), files)
    return None if all(files_exist) else "its data files were deleted in the meantime"


def delete_pending_file_of(location: IcebergLocation, table: Table, app_id: str, token: str) -> None:
    """Delete the pending file of an attempt whose driver died after its commit."""
    with suppress(Exception):
        for attempt in _list_attempts(table):
            if attempt.token == token and attempt.app_digest == digest(app_id):
                attempt.delete_pending_file(location, table)


def delete_files(location: IcebergLocation, io: FileIO, paths: Iterable[str]) -> None:
    """Delete files that no snapshot refers to; after errors, a later clean-up deletes them."""
    for path in paths:
        try:
            with location.translating_errors("a file cannot be deleted", untranslated=(FileNotFoundError,)):
                io.delete(path)
        except FileNotFoundError:
            continue
        except Exception as error:
            log.warning(
                "files of an uncommitted micro-batch stay in %s: %s",
                location.label,
                error,
                extra={"action": "staged_stay", "table": location.label, "error": condition_of(error)},
            )
            return


def delete_abandoned(location: IcebergLocation, table: Table) -> None:
    """Delete the files of attempts that started over a day ago, if their app has started no other since."""
    cutoff = time.time() - _DAY_SECONDS
    with location.translating_errors("the files of dead queries cannot be listed"):
        attempts = list(_list_attempts(table))
        live_apps = {attempt.app_digest for attempt in attempts if attempt.started_at >= cutoff}
        abandoned = {attempt.token: attempt for attempt in attempts if attempt.app_digest not in live_apps}
        if not abandoned:
            return
        files = [
            path
            for path in _list_files(table.io, table.location_provider().data_path)
            if _token_of(path) in abandoned
        ]
        referenced = _referenced_files(table) if files else set()
    delete_files(location, table.io, [path for path in files if _file_name(path) not in referenced])
    for attempt in abandoned.values():
        attempt.delete_pending_file(location, table)


def _pending_file(table: Table, attempt: Attempt) -> str:
    return f"{table.location_provider().data_path}/{PENDING_FOLDER}/{attempt.file_name}"


def _list_attempts(table: Table) -> Iterator[Attempt]:
    for path in _list_files(table.io, f"{table.location_provider().data_path}/{PENDING_FOLDER}"):
        attempt = Attempt.parse(_file_name(path))
        if attempt is not None:
            yield attempt


def _list_files(io: FileIO, folder: str) -> Iterator[str]:
    """List the files below a folder, as locations in the table's form.

    Only pyiceberg's default ``FileIO`` can list files; with another one, other engines' tools have to clean
    up.
    """
    if not isinstance(io, PyArrowFileIO):
        return
    scheme, netloc, path = PyArrowFileIO.parse_location(folder, io.properties)
    files = io.fs_by_scheme(scheme, netloc)
    for info in files.get_file_info(FileSelector(path, allow_not_found=True, recursive=True)):
        if info.type == FileType.File:
            yield f"{folder}{info.path.partition(path.rstrip('/'))[2]}"


def _referenced_files(table: Table) -> set[str]:
    """Return the names of all data and delete files of the snapshots; they contain random numbers."""
    manifests = {
        manifest.manifest_path: manifest
        for snapshot in table.metadata.snapshots
        for manifest in snapshot.manifests(table.io)
    }
    return {
        _file_name(entry.data_file.file_path)
        for manifest in manifests.values()
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    }


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def _token_of(path: str) -> str:
    """Return the token in the name of a data file; object storage layouts may put hashes before it."""
    parts = _file_name(path).split("-")
    return parts[-2] if len(parts) > 1 else ""
