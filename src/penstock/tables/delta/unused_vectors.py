"""Deletion of vector files that a table no longer uses, after the retention time of ``VACUUM``.

The log does not tell when a vector became unused. So once a day a note lists the unused vector files, and a
file is deleted if it is in a note older than the retention time and in every later one.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem

from penstock.json_text import parse_json
from penstock.lake.deletion_vectors import DeletionVector
from penstock.lake.storage import DeltaLocation
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.log_files import checkpoint_path, file_actions
from penstock.tables.delta.vectors import VECTORS_FOLDER, vector_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

NOTES_FOLDER = f"{VECTORS_FOLDER}_unneeded"
_DAY_MS = 86_400_000
_MIN_RETENTION_DAYS = 7
_RETENTION_PROPERTY = "delta.deletedFileRetentionDuration"
_UNITS = {
    "week": 7 * _DAY_MS,
    "day": _DAY_MS,
    "hour": _DAY_MS // 24,
    "minute": 60_000,
    "second": 1000,
    "millisecond": 1,
    "microsecond": 0,
    "nanosecond": 0,
}
_INTERVAL_PART = rf"\s*(\d+)\s+({'|'.join(_UNITS)})s?(?:\s|$)"
_INTERVAL = re.compile(rf"\s*(?:interval\s)?((?:{_INTERVAL_PART})+)", re.IGNORECASE)
_NOTE_NAME = re.compile(r"(\d+)-[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class UnusedVectorsNote:
    path: str
    written_ms: int
    """In milliseconds since 1970."""


def delete_unused_vectors(location: DeltaLocation, table: DeltaTable) -> None:
    """Write a note of the unused vector files, and delete those unused for the retention time.

    The table's version must have a checkpoint.
    """
    files, now = location.files(), time.time_ns() // 1_000_000
    notes, vector_files = _list_notes(files), _list_vector_files(files)
    if notes and now - notes[-1].written_ms < _DAY_MS:
        return
    try:
        in_use = _vectors_in_use(files, table.version()) | _vectors_added_since(
            location, files, table.version()
        )
    except UnreadableFile:
        # The log was cleaned up in the meantime, as the driver was suspended.
        return
    unused = vector_files - in_use
    if not unused and not notes:
        return
    retention = _retention(table.metadata().configuration)
    expired = [] if retention is None else [note for note in notes if note.written_ms <= now - retention]
    if expired:
        unused_by_note = (_read_note(files, note) for note in notes[len(expired) - 1 :])
        for path in unused.intersection(*unused_by_note):
            _delete(files, path)
            unused = unused - {path}
        for note in expired[:-1]:
            _delete(files, note.path)
    text = json.dumps(sorted(unused)).encode()
    with files.open_output_stream(
        f"{NOTES_FOLDER}/{now}-{uuid.uuid4().hex}.json", buffer_size=len(text) + 1
    ) as out:
        out.write(text)


def _list_notes(files: FileSystem) -> list[UnusedVectorsNote]:
    """List the notes, oldest first."""
    infos = files.get_file_info(FileSelector(NOTES_FOLDER, allow_not_found=True))
    matches = ((info.base_name, _NOTE_NAME.fullmatch(info.base_name)) for info in infos)
    notes = [UnusedVectorsNote(f"{NOTES_FOLDER}/{name}", int(match[1])) for name, match in matches if match]
    return sorted(notes, key=lambda note: note.written_ms)


def _read_note(files: FileSystem, note: UnusedVectorsNote) -> set[str]:
    try:
        with files.open_input_file(note.path) as file:
            return set(parse_json(file.readall()))
    except ValueError:
        # The writer died while writing, on a file system whose writes are not atomic.
        return set()


def _list_vector_files(files: FileSystem) -> set[str]:
    infos = files.get_file_info(FileSelector(VECTORS_FOLDER, allow_not_found=True))
    return {f"{VECTORS_FOLDER}/{info.base_name}" for info in infos if info.base_name.endswith(".bin")}


def _vectors_in_use(files: FileSystem, version: int) -> set[str]:
    """Return the vector files of a version, from its checkpoint."""
    with files.open_input_file(checkpoint_path(version)) as file:
        # This name selects all fields of the struct.
        adds = pq.ParquetFile(file).read(columns=["add.deletionVector"])
    paths: set[str] = set()
    for chunk in adds["add"].chunks if adds.num_columns else ():
        vectors = pc.struct_field(chunk, "deletionVector").drop_null()
        # Other vectors are inline in the log.
        in_files = vectors.filter(pc.equal(pc.struct_field(vectors, "storageType").cast(pa.string()), "u"))
        paths.update(DeletionVector.of(descriptor).path or "" for descriptor in in_files.to_pylist())
    return paths


def _vectors_added_since(location: DeltaLocation, files: FileSystem, version: int) -> set[str]:
    """Return the vector files that commits after a version add, for example by restoring a version."""
    actions = (file_actions(files, number) for number in range(version + 1, location.open().version() + 1))
    vectors = (vector_of(action["add"]) for commit in actions for action in commit if "add" in action)
    in_files = (vector for vector in vectors if vector is not None and vector.storage == "u")
    return {vector.path or "" for vector in in_files}


def _retention(properties: Mapping[str, str | None]) -> int | None:
    """Return how long unused vectors are kept, in milliseconds; None if the property cannot be parsed."""
    minimum = _MIN_RETENTION_DAYS * _DAY_MS
    text = next(
        (value for name, value in properties.items() if name.lower() == _RETENTION_PROPERTY.lower()), None
    )
    if not text:
        return minimum
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return None
    parts = re.findall(_INTERVAL_PART, match[1].lower())
    return max(minimum, sum(int(number) * _UNITS[unit] for number, unit in parts))


def _delete(files: FileSystem, path: str) -> None:
    try:
        files.delete_file(path)
    except FileNotFoundError:
        # Another process has deleted it.
        return
