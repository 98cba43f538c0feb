"""Attempts to write a micro-batch to an Iceberg table, and deletion of the files of abandoned ones.

Tasks write data files next to the table's own, so the files of an attempt that is never committed stay in the
same folder. A pending file, an empty file in ``penstock-pending`` in the table's data folder, names each
attempt from before its tasks start until it has ended. If the driver dies, the pending file is left, and a
day later the start of a query deletes the attempt's files that no snapshot refers to. The clean-up of other
engines also recognizes both as orphans, since no name begins with an underscore or a dot, which they skip.
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
from penstock.tables.iceberg.place import IcebergPlace
from penstock.tables.names import digest

log = logging.getLogger("penstock.tables")

FOLDER = "penstock-pending"
_DAY_SECONDS = 86_400.0
_LONGEST_SECONDS = 3600.0
"""The time after which files of an attempt that runs alone are not committed, as they may soon be deleted."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at one micro-batch."""

    app: str
    """A digest of the app id."""
    started: int
    """In seconds since 1970."""
    token: str
    """Part of the names of all data files of the attempt."""

    @classmethod
    def new(cls, app_id: str) -> Attempt:
        return cls(digest(app_id), int(time.time()), uuid.uuid4().hex)

    @classmethod
    def alone(cls) -> Attempt:
        """Return an attempt with its own app id, which no later attempt protects from clean-up."""
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
        return f"{self.app}-{self.started}-{self.token}"

    def begin(self, place: IcebergPlace, table: Table) -> None:
        """Write the pending file."""
        with (
            place.translating_errors("a file cannot be written"),
            table.io.new_output(_pending(table, self)).create(overwrite=True),
        ):
            pass

    def end(self, place: IcebergPlace, table: Table) -> None:
        """Delete the pending file; after an error, a later clean-up deletes it."""
        delete_files(place, table.io, [_pending(table, self)])


def spoiled(
    place: IcebergPlace, attempt: Attempt, files: Sequence[DataFile], before: Table, now: Table
) -> str | None:
    """Return why files written for an earlier version of a table must not be committed to it now."""
    old, new = before.metadata, now.metadata
    if (old.current_schema_id, old.default_spec_id) != (new.current_schema_id, new.default_spec_id):
        return "its columns or its partitioning have changed"
    if time.time() - attempt.started > _LONGEST_SECONDS:
        return "writing the files took too long"
    with place.translating_errors("its data files cannot be found"):
        exist = in_parallel(lambda file: now.io.new_input(file.file_path).exists(), files)
    return None if all(exist) else "its data files were deleted in the meantime"


def end_committed(place: IcebergPlace, table: Table, app_id: str, token: str) -> None:
    """Delete the pending file of an attempt whose driver died after its commit."""
    with suppress(Exception):
        for attempt in _listed(table):
            if attempt.token == token and attempt.app == digest(app_id):
                attempt.end(place, table)


def delete_files(place: IcebergPlace, io: FileIO, paths: Iterable[str]) -> None:
    """Delete files that no snapshot refers to; after errors, a later clean-up deletes them."""
    for path in paths:
        try:
            with place.translating_errors("a file cannot be deleted", beside=(FileNotFoundError,)):
                io.delete(path)
        except FileNotFoundError:
            continue
        except Exception as error:
            log.warning(
                "files of an uncommitted micro-batch stay in %s: %s",
                place.shown,
                error,
                extra={"action": "staged_stay", "table": place.shown, "error": condition_of(error)},
            )
            return


def delete_abandoned(place: IcebergPlace, table: Table) -> None:
    """Delete the files of attempts that began over a day ago, if the app has begun no other attempt since."""
    before = time.time() - _DAY_SECONDS
    with place.translating_errors("the files of dead queries cannot be listed"):
        attempts = list(_listed(table))
        running = {attempt.app for attempt in attempts if attempt.started >= before}
        abandoned = {attempt.token: attempt for attempt in attempts if attempt.app not in running}
        if not abandoned:
            return
        files = [
            path
            for path in _files(table.io, table.location_provider().data_path)
            if _token(path) in abandoned
        ]
        referred = _referred_files(table) if files else set()
    delete_files(place, table.io, [path for path in files if _name(path) not in referred])
    for attempt in abandoned.values():
        attempt.end(place, table)


def _pending(table: Table, attempt: Attempt) -> str:
    return f"{table.location_provider().data_path}/{FOLDER}/{attempt.file_name}"


def _listed(table: Table) -> Iterator[Attempt]:
    for path in _files(table.io, f"{table.location_provider().data_path}/{FOLDER}"):
        attempt = Attempt.parse(_name(path))
        if attempt is not None:
            yield attempt


def _files(io: FileIO, folder: str) -> Iterator[str]:
    """List the files below a folder, as locations of the table.

    Only pyiceberg's default file system can list files; with another one, other engines' tools have to clean
    up.
    """
    if not isinstance(io, PyArrowFileIO):
        return
    scheme, netloc, path = PyArrowFileIO.parse_location(folder, io.properties)
    files = io.fs_by_scheme(scheme, netloc)
    for info in files.get_file_info(FileSelector(path, allow_not_found=True, recursive=True)):
        if info.type == FileType.File:
            yield f"{folder}{info.path.partition(path.rstrip('/'))[2]}"


def _referred_files(table: Table) -> set[str]:
    """Return the names of all data and delete files of the snapshots; they contain random numbers."""
    manifests = {
        manifest.manifest_path: manifest
        for snapshot in table.metadata.snapshots
        for manifest in snapshot.manifests(table.io)
    }
    return {
        _name(entry.data_file.file_path)
        for manifest in manifests.values()
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    }


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _token(path: str) -> str:
    """Return the token in the name of a data file; object storage layouts may put hashes in front of it."""
    parts = _name(path).split("-")
    return parts[-2] if len(parts) > 1 else ""
