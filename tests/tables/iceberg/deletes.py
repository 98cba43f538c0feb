"""Delete files of an Iceberg table, as merge-on-read writers commit them and pyiceberg does not."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.types import LongType

from penstock.tables.iceberg.row_delta import DeleteManifest


class _RowDelta(_FastAppendFiles):
    deletes: list[DataFile]

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        with DeleteManifest(
            metadata.spec(),
            metadata.schema(),
            self.new_manifest_output(),
            self._snapshot_id,
            self._compression,
        ) as writer:
            for file in self.deletes:
                writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file))
        return [*manifests, writer.to_manifest_file()]


def delete_rows(
    table: Table,
    gone: Callable[[dict[str, Any]], bool],
    content: DataFileContent = DataFileContent.POSITION_DELETES,
) -> None:
    """Delete the rows for which a function is true, of an unpartitioned table."""
    deletes = []
    for task in table.scan().plan_files():
        stored = pq.read_table(Path(task.file.file_path.removeprefix("file://")))
        places = [place for place, row in enumerate(stored.to_pylist()) if gone(row)]
        if places:
            equality = content == DataFileContent.EQUALITY_DELETES
            listed = (
                stored.select(["k"]).take(places)
                if equality
                else pa.table({"file_path": [task.file.file_path] * len(places), "pos": places})
            )
            deletes.append(_file(table, listed, content))
    if deletes:
        with table.transaction() as transaction:
            producer = _RowDelta(operation=Operation.DELETE, transaction=transaction, io=table.io)
            producer.deletes = deletes
            producer.commit()


def delete_listed(table: Table, positions: dict[str, list[int]]) -> None:
    """Delete rows by the positions in their data files, with one delete file for all."""
    pairs = [(path, place) for path in sorted(positions) for place in positions[path]]
    paths, places = zip(*pairs, strict=True)
    listed = pa.table({"file_path": paths, "pos": places})
    with table.transaction() as transaction:
        producer = _RowDelta(operation=Operation.DELETE, transaction=transaction, io=table.io)
        producer.deletes = [_file(table, listed, DataFileContent.POSITION_DELETES)]
        producer.commit()


def _file(table: Table, listed: pa.Table, content: DataFileContent) -> DataFile:
    path = f"{table.location()}/data/deletes-{uuid.uuid4()}.parquet"
    local = Path(path.removeprefix("file://"))
    pq.write_table(listed, local)
    bounds: dict[str, dict[int, bytes]] = {}
    if content == DataFileContent.EQUALITY_DELETES:
        keys = listed["k"].to_pylist()
        bounds = {
            "lower_bounds": {1: to_bytes(LongType(), min(keys))},
            "upper_bounds": {1: to_bytes(LongType(), max(keys))},
        }
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        record_count=listed.num_rows,
        file_size_in_bytes=local.stat().st_size,
        equality_ids=[1] if content == DataFileContent.EQUALITY_DELETES else None,
        **bounds,
    )
    file.spec_id = table.spec().spec_id
    return file
