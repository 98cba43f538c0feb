"""A table of format 3, built by hand according to the format's specification: pyiceberg reads such
tables, but does not write them.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.manifest import (
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from pyiceberg.types import StructType
from pyroaring import BitMap64

from penstock.json_text import Json
from tests.feeds.iceberg.lake import SCHEMA, Lake

LINEAGE = {"_row_id": 2147483540, "_last_updated_sequence_number": 2147483539}
_FIELD_ID = b"PARQUET:field_id"
NumberedRow = tuple[object, ...]
"""Data, row id and version; the latter two are None where they are inherited."""


@dataclass(frozen=True)
class HandFile:
    """A data file, or a deletion vector for one."""

    path: str
    rows: int
    first_row_id: int | None = None
    sequence: int | None = None
    snapshot: int | None = None
    of: str | None = None
    place: tuple[int, int] = (0, 0)
    status: ManifestEntryStatus = ManifestEntryStatus.ADDED

    def entry(self) -> ManifestEntry:
        vector = self.of is not None
        file = DataFile.from_args(
            3,
            content=DataFileContent.POSITION_DELETES if vector else DataFileContent.DATA,
            file_path=self.path,
            file_format=FileFormat.PUFFIN if vector else FileFormat.PARQUET,
            partition=Record(),
            record_count=self.rows,
            file_size_in_bytes=Path(self.path).stat().st_size,
            first_row_id=self.first_row_id,
            referenced_data_file=self.of,
            content_offset=self.place[0] if vector else None,
            content_size_in_bytes=self.place[1] if vector else None,
        )
        return ManifestEntry.from_args(
            3,
            status=self.status,
            snapshot_id=self.snapshot,
            sequence_number=self.sequence,
            file_sequence_number=self.sequence,
            data_file=file,
        )


@dataclass
class _Manifest:
    path: str
    files: list[HandFile]
    vectors: bool
    snapshot: int
    sequence: int
    first_row_id: int | None = None

    def of(self, status: ManifestEntryStatus) -> list[HandFile]:
        return [each for each in self.files if each.status == status]

    @property
    def live(self) -> list[HandFile]:
        return [each for each in self.files if each.status != ManifestEntryStatus.DELETED]

    def read(self) -> list[HandFile]:
        """The live files, with what they inherit."""
        first, found = self.first_row_id, []
        for each in self.live:
            if each.first_row_id is None and first is not None:
                each, first = replace(each, first_row_id=first), first + each.rows
            sequence = self.sequence if each.sequence is None else each.sequence
            found.append(replace(each, sequence=sequence, snapshot=each.snapshot or self.snapshot))
        return found

    def as_record(self) -> ManifestFile:
        def counts(status: ManifestEntryStatus) -> tuple[int, int]:
            return len(self.of(status)), sum(each.rows for each in self.of(status))

        added, existing, deleted = map(counts, (ManifestEntryStatus(place) for place in (1, 0, 2)))
        return ManifestFile.from_args(
            3,
            manifest_path=self.path,
            manifest_length=Path(self.path).stat().st_size,
            partition_spec_id=0,
            content=ManifestContent.DELETES if self.vectors else ManifestContent.DATA,
            sequence_number=self.sequence,
            min_sequence_number=1,
            added_snapshot_id=self.snapshot,
            added_files_count=added[0],
            existing_files_count=existing[0],
            deleted_files_count=deleted[0],
            added_rows_count=added[1],
            existing_rows_count=existing[1],
            deleted_rows_count=deleted[1],
            first_row_id=self.first_row_id,
        )


@dataclass
class Numbered:
    """The table, and the commits that change it."""

    lake: Lake
    metadata: Json
    manifests: list[_Manifest] = field(default_factory=list)
    folder: Path = field(init=False)

    @classmethod
    def create(cls, lake: Lake, name: str = "orders") -> Numbered:
        return cls.upgraded(lake, lake.table(name))

    @classmethod
    def upgraded(cls, lake: Lake, table: Table) -> Numbered:
        """A table of format 2 that has been brought to format 3."""
        metadata = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
        metadata.update({"format-version": 3, "next-row-id": 0})
        found = cls(lake, metadata)
        snapshot = table.current_snapshot()
        for each in snapshot.manifests(table.io) if snapshot is not None else ():
            files = [
                HandFile(
                    entry.data_file.file_path.removeprefix("file://"),
                    entry.data_file.record_count,
                    sequence=entry.sequence_number,
                    snapshot=entry.snapshot_id,
                    status=entry.status,
                )
                for entry in each.fetch_manifest_entry(table.io)
            ]
            path = each.manifest_path.removeprefix("file://")
            sequence, made_by = each.sequence_number, each.added_snapshot_id or 0
            found.manifests.append(_Manifest(path, files, False, made_by, sequence))
        found._publish()
        return found

    def __post_init__(self) -> None:
        self.folder = Path(self.metadata["location"].removeprefix("file://"))
        for each in ("data", "metadata"):
            (self.folder / each).mkdir(parents=True, exist_ok=True)

    def write(self, *rows: NumberedRow, stored: bool = True) -> HandFile:
        """Write a data file; its columns of row lineage too, where it is to have them."""
        names = [*SCHEMA.names, *(LINEAGE if stored else ())]
        ids = [1, 2, 3, *LINEAGE.values()]
        types = [*SCHEMA.types, pa.int64(), pa.int64()]
        fields = [
            pa.field(name, kind, metadata={_FIELD_ID: str(number)})
            for name, kind, number in zip(names, types, ids, strict=False)
        ]
        values = [dict(zip(names, row, strict=False)) for row in rows]
        path = self.folder / "data" / f"{uuid4()}.parquet"
        pq.write_table(pa.Table.from_pylist(values, schema=pa.schema(fields)), path, row_group_size=3)
        return HandFile(str(path), len(rows))

    def vectors(self, deleted: dict[str, Sequence[int]]) -> list[HandFile]:
        """Write deletion vectors for data files, all into one Puffin file."""
        path = self.folder / "data" / f"{uuid4()}-deletes.puffin"
        content, places = b"PFA1", []
        for positions in deleted.values():
            vector = bytes.fromhex("d1d33964") + BitMap64(positions).serialize()
            blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
            places.append((len(content), len(blob)))
            content += blob
        blobs = [
            {
                "type": "deletion-vector-v1",
                "fields": [2147483645],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": offset,
                "length": length,
                "properties": {"referenced-data-file": of, "cardinality": str(len(positions))},
            }
            for (offset, length), (of, positions) in zip(places, deleted.items(), strict=True)
        ]
        footer = json.dumps({"blobs": blobs}).encode()
        path.write_bytes(content + b"PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1")
        return [
            HandFile(str(path), len(positions), of=of, place=place)
            for place, (of, positions) in zip(places, deleted.items(), strict=True)
        ]

    @property
    def files(self) -> list[HandFile]:
        """The live data files and deletion vectors."""
        return [file for manifest in self.manifests for file in manifest.read()]

    @property
    def version(self) -> int:
        return int(self.metadata["last-sequence-number"])

    def commit(
        self,
        *added: HandFile,
        removed: Iterable[str] = (),
        operation: str = "overwrite",
        forgetful: bool = False,
    ) -> int:
        """Add files, and remove others and their deletion vectors; gives the version.

        Parameters
        ----------
        removed
            Paths of data files; with "vectors:" before it, only the deletion vectors of one go.
        forgetful
            Whether the row ids of removed files are not written down.
        """
        sequence, snapshot = self.version + 1, uuid4().int % 2**62
        gone = set(removed)
        kept = [self._without(each, gone, snapshot, sequence, forgetful) for each in self.manifests]
        for vectors in (False, True):
            files = [each for each in added if (each.of is not None) == vectors]
            if files:
                kept.append(self._written(files, vectors, snapshot, sequence))
        first = self.metadata["next-row-id"]
        self._number(kept)
        self.manifests = [each for each in kept if each.live]
        self._log(self._listed(kept, snapshot, sequence), snapshot, sequence, first, operation)
        return sequence

    def _without(
        self, manifest: _Manifest, gone: set[str], snapshot: int, sequence: int, forgetful: bool
    ) -> _Manifest:
        def goes(file: HandFile) -> bool:
            return file.path in gone or file.of in gone or f"vectors:{file.of}" in gone

        def without(file: HandFile) -> HandFile:
            first = None if forgetful else file.first_row_id
            return replace(file, status=ManifestEntryStatus.DELETED, snapshot=snapshot, first_row_id=first)

        files = manifest.read()
        if not any(map(goes, files)):
            return manifest
        changed = [
            without(each) if goes(each) else replace(each, status=ManifestEntryStatus.EXISTING)
            for each in files
        ]
        return self._written(changed, manifest.vectors, snapshot, sequence)

    def _written(self, files: list[HandFile], vectors: bool, snapshot: int, sequence: int) -> _Manifest:
        path = str(self.folder / "metadata" / f"{uuid4()}.avro")
        schema = manifest_entry_schema_with_data_file(3, data_file_with_partition(StructType(), 3))
        self._avro(path, schema, "manifest_entry", [each.entry() for each in files])
        return _Manifest(path, files, vectors, snapshot, sequence)

    def _number(self, manifests: list[_Manifest]) -> None:
        for each in manifests:
            if not each.vectors and each.first_row_id is None:
                each.first_row_id = self.metadata["next-row-id"]
                self.metadata["next-row-id"] += sum(file.rows for file in each.live)

    def _listed(self, manifests: list[_Manifest], snapshot: int, sequence: int) -> str:
        path = str(self.folder / "metadata" / f"snap-{snapshot}.avro")
        parent = self.metadata.get("current-snapshot-id")
        told = {
            "snapshot-id": str(snapshot),
            "parent-snapshot-id": "null" if parent is None else str(parent),
            "sequence-number": str(sequence),
        }
        records = [each.as_record() for each in manifests]
        self._avro(path, MANIFEST_LIST_FILE_SCHEMAS[3], "manifest_file", records, **told)
        return path

    def _avro(self, path: str, schema: Any, name: str, records: list[Any], **told: str) -> None:
        io = self.lake.catalog._load_file_io({}, path)
        metadata = {"format-version": "3", "avro.codec": "null", **told}
        with AvroOutputFile[Any](io.new_output(path), schema, name, metadata=metadata) as writer:
            writer.write_block(records)

    def _log(self, listed: str, snapshot: int, sequence: int, first: int, operation: str) -> None:
        now = max(self.metadata["last-updated-ms"], 1_700_000_000_000) + 1
        made = {
            "snapshot-id": snapshot,
            "sequence-number": sequence,
            "timestamp-ms": now,
            "manifest-list": listed,
            "summary": {"operation": operation},
            "schema-id": 0,
            "first-row-id": first,
            "added-rows": self.metadata["next-row-id"] - first,
        }
        parent = self.metadata.get("current-snapshot-id")
        if parent is not None:
            made["parent-snapshot-id"] = parent
        self.metadata.setdefault("snapshots", []).append(made)
        self.metadata.setdefault("snapshot-log", []).append({"snapshot-id": snapshot, "timestamp-ms": now})
        self.metadata.update(
            {
                "current-snapshot-id": snapshot,
                "last-sequence-number": sequence,
                "last-updated-ms": now,
                "refs": {"main": {"snapshot-id": snapshot, "type": "branch"}},
            }
        )
        self._publish()

    def _publish(self) -> None:
        path = self.folder / "metadata" / f"{uuid4()}.metadata.json"
        path.write_text(json.dumps(self.metadata))
        database = self.lake.properties["uri"].removeprefix("sqlite:///")
        with sqlite3.connect(database) as connection:
            connection.execute(
                "update iceberg_tables set metadata_location = ? where table_name = ?",
                (f"file://{path}", self.folder.name),
            )
        connection.close()
