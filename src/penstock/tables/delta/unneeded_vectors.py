"""Deletion of vector files that a table no longer uses, after the retention time that ``VACUUM`` has.

The log does not say since when a vector has been unused. So once a day a note lists the unused vector files,
and a file is deleted once every note since one that is old enough lists it.
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
from penstock.lake.storage import DeltaPlace
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.log_files import checkpoint_path, file_actions
from penstock.tables.delta.vectors import FOLDER, vector_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

NOTES = f"{FOLDER}_unneeded"
_DAY = 86_400_000
_LEAST_DAYS = 7
_RETENTION = "delta.deletedFileRetentionDuration"
_UNITS = {
    "week": 7 * _DAY,
    "day": _DAY,
    "hour": _DAY // 24,
    "minute": 60_000,
    "second": 1000,
    "millisecond": 1,
    "microsecond": 0,
    "nanosecond": 0,
}
_PART = rf"\s*(\d+)\s+({'|'.join(_UNITS)})s?(?:\s|$)"
_INTERVAL = re.compile(rf"\s*(?:interval\s)?((?:{_PART})+)", re.IGNORECASE)
_NAME = re.compile(r"(\d+)-[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class Note:
    path: str
    at: int
    """In milliseconds since 1970."""


def delete_unneeded_vectors(place: DeltaPlace, table: DeltaTable) -> None:
    """Note the vectors that a table does not use, and delete those unused for the retention time.

    The table's version must have a checkpoint.
    """
    files, now = place.files(), time.time_ns() // 1_000_000
    notes, stored = _notes(files), _stored(files)
    if notes and now - notes[-1].at < _DAY:
        return
    try:
        live = _live(files, table.version()) | _added_since(place, files, table.version())
    except UnreadableFile:
        # The log was cleaned up in the meantime: the driver had been suspended.
        return
    unneeded = stored - live
    if not unneeded and not notes:
        return
    kept = _retention(table.metadata().configuration)
    old = [] if kept is None else [note for note in notes if note.at <= now - kept]
    if old:
        lists = (_listed(files, note) for note in notes[len(old) - 1 :])
        for path in unneeded.intersection(*lists):
            _delete(files, path)
            unneeded = unneeded - {path}
        for note in old[:-1]:
            _delete(files, note.path)
    text = json.dumps(sorted(unneeded)).encode()
    with files.open_output_stream(f"{NOTES}/{now}-{uuid.uuid4().hex}.json", buffer_size=len(text) + 1) as out:
        out.write(text)


def _notes(files: FileSystem) -> list[Note]:
    """List the notes, the oldest first."""
    infos = files.get_file_info(FileSelector(NOTES, allow_not_found=True))
    named = ((info.base_name, _NAME.fullmatch(info.base_name)) for info in infos)
    notes = [Note(f"{NOTES}/{name}", int(found[1])) for name, found in named if found]
    return sorted(notes, key=lambda note: note.at)


def _listed(files: FileSystem, note: Note) -> set[str]:
    try:
        with files.open_input_file(note.path) as file:
            return set(parse_json(file.readall()))
    except ValueError:
        # The writer died, on a file system whose writes are not atomic.
        return set()


def _stored(files: FileSystem) -> set[str]:
    infos = files.get_file_info(FileSelector(FOLDER, allow_not_found=True))
    return {f"{FOLDER}/{info.base_name}" for info in infos if info.base_name.endswith(".bin")}


def _live(files: FileSystem, version: int) -> set[str]:
    """Return the vector files of a version, from its checkpoint."""
    with files.open_input_file(checkpoint_path(version)) as file:
        # This name selects a group of columns.
        adds = pq.ParquetFile(file).read(columns=["add.deletionVector"])
    found: set[str] = set()
    for chunk in adds["add"].chunks if adds.num_columns else ():
        vectors = pc.struct_field(chunk, "deletionVector").drop_null()
        # Other vectors are stored as bytes in the log.
        in_files = vectors.filter(pc.equal(pc.struct_field(vectors, "storageType").cast(pa.string()), "u"))
        found.update(DeletionVector.of(each).path or "" for each in in_files.to_pylist())
    return found


def _added_since(place: DeltaPlace, files: FileSystem, version: int) -> set[str]:
    """Return the vector files that commits after a version have added, for example by restoring a version."""
    actions = (file_actions(files, number) for number in range(version + 1, place.open().version() + 1))
    vectors = (vector_of(action["add"]) for each in actions for action in each if "add" in action)
    in_files = (vector for vector in vectors if vector is not None and vector.storage == "u")
    return {vector.path or "" for vector in in_files}


def _retention(properties: Mapping[str, str | None]) -> int | None:
    """Return how long unused vectors are kept, in milliseconds; None if the property cannot be parsed."""
    least = _LEAST_DAYS * _DAY
    text = next((value for name, value in properties.items() if name.lower() == _RETENTION.lower()), None)
    if not text:
        return least
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return None
    parts = re.findall(_PART, found[1].lower())
    return max(least, sum(int(number) * _UNITS[unit] for number, unit in parts))


def _delete(files: FileSystem, path: str) -> None:
    try:
        files.delete_file(path)
    except FileNotFoundError:
        # Another process has deleted it.
        return
