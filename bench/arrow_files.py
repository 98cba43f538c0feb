"""Peer of reads: a minimal Python data source over Arrow files, with one task for each file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType


class ArrowFiles(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bench_arrow_files"

    def schema(self) -> str:
        return "id bigint, amount double, name string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return ArrowFilesReader(self.options["path"])


class ArrowFilesReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(str(file)) for file in sorted(Path(self._folder).glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(partition.value) as file, pa.ipc.open_file(file) as reader:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)


def write_files(table: pa.Table, folder: Path, files: int, batch_rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = -(-table.num_rows // files)
    for number in range(files):
        part = table.slice(number * rows, rows).combine_chunks()
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
        with pa.ipc.new_file(str(folder / f"{number}.arrow"), table.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=batch_rows)
