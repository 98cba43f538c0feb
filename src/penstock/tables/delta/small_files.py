"""Merging of a micro-batch's small data files before they are committed.

A query with a shuffle has 200 tasks by default, and each of them writes a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.tables.delta.data_files import REPORT, DataFile, files_in, reported
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.stage import DeltaStage

_SMALL_BYTES, _JOINED_BYTES = 8 << 20, 64 << 20
_FEW = 8
"""The number of small files up to which a micro-batch's files are left as they are."""


def joined(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    """Return the files of a micro-batch, with new ones in place of many small ones."""
    small = [file for file in files if file.size < _SMALL_BYTES]
    if stage.indexed is None or len(small) <= _FEW:
        return list(files)
    new = _rewritten(spark, stage, small)
    stage.delete(small)
    return [*(file for file in files if file.size >= _SMALL_BYTES), *new]


def copied(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    """Return files with the same rows, fewer if there are many; the given ones are kept for a retry."""
    return list(files) if len(files) <= _FEW else _rewritten(spark, stage, files)


def _rewritten(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    groups = grouped_files(files)
    new = files_in(JoinTask(stage, groups).job(spark, len(groups), REPORT).collect())
    stage.require_files(new)
    return new


def grouped_files(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Divide files into groups, each to be merged into one file."""
    groups: list[list[DataFile]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size > _JOINED_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


@dataclass
class JoinTask(FileTask):
    """Task that takes the numbers of groups of files, and writes and reports a file for each."""

    stage: DeltaStage = field(repr=False)
    groups: list[list[DataFile]]

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        schema = self.stage.layout.schema
        yield reported(self.stage.write(self.stage.chunks(self.groups[number], schema)), None)
