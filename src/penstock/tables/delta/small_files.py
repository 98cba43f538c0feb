"""Merging of a micro-batch's small data files before they are committed.

A query with a shuffle has 200 tasks by default, and each of them writes a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.tables.delta.data_files import REPORT_DDL, DataFile, file_report, files_from_reports
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.stage import DeltaStage

_SMALL_BYTES, _MERGED_BYTES = 8 << 20, 64 << 20
_MAX_UNMERGED_FILES = 8
"""The number of small files up to which a micro-batch's files are not merged."""


def merge_small_files(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    """Merge the small files of a micro-batch if there are many; return its files."""
    small = [file for file in files if file.size < _SMALL_BYTES]
    if stage.indexed is None or len(small) <= _MAX_UNMERGED_FILES:
        return list(files)
    new = _rewrite(spark, stage, small)
    stage.delete_uncommitted(small)
    return [*(file for file in files if file.size >= _SMALL_BYTES), *new]


def merge_if_many(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    """Return files with the same rows, merged if there are many; the given files are kept for a retry."""
    return list(files) if len(files) <= _MAX_UNMERGED_FILES else _rewrite(spark, stage, files)


def _rewrite(spark: SparkSession, stage: DeltaStage, files: Sequence[DataFile]) -> list[DataFile]:
    groups = group_files(files)
    new = files_from_reports(MergeFilesTask(stage, groups).job(spark, len(groups), REPORT_DDL).collect())
    stage.require_files(new)
    return new


def group_files(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Divide files into groups, each to be merged into one file."""
    groups: list[list[DataFile]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size > _MERGED_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


@dataclass
class MergeFilesTask(FileTask):
    """Task that merges each numbered group of files into one file, and reports it."""

    stage: DeltaStage = field(repr=False)
    groups: list[list[DataFile]]

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        schema = self.stage.layout.schema
        yield file_report(self.stage.write(self.stage.chunks(self.groups[number], schema)), None)
