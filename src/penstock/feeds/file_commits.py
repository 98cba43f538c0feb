"""Commits that consist of data files: dividing them into tasks, checking planned columns, and reading rows.

A query reads the columns that its table had when the query was planned. The plan is metadata of the read's
schema. Spark does not preserve schema metadata, so the data source also has the plan as an option.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import CHANGE_TYPE
from penstock.feeds.protocol import METADATA_NAMES, PLAN, OpenFeed, change_rows
from penstock.json_text import parse_json
from penstock.lake.parquet import FileSplit, cast_to_schema, count_rows, read_split, split_file
from penstock.parallel import in_parallel

_BYTES_PER_ROW = 32
"""Assumed size of a row if no file of the range has a row count."""
_PARTS_PER_TASK = 1_000
_COUNTED_IN_PARALLEL = 16
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table in one version."""

    name: str
    type: str
    id: int | None = None
    """The column's id, if the table format identifies columns by id rather than by name."""

    @property
    def key(self) -> object:
        return self.name.lower() if self.id is None else self.id


@lru_cache(maxsize=64)
def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Return the data columns of a schema."""
    return tuple(Column(field.name, str(field.type)) for field in schema if field.name not in METADATA_NAMES)


@dataclass(frozen=True, slots=True)
class Planned:
    """The table when a query was planned: its version and number of columns."""

    version: int
    """The newest version then."""
    columns: int
    """The number of columns then; a read of fewer columns ignores added columns."""
    only_changes: bool = False
    """Whether every row is a change, so that no pass drops carry-over rows."""

    @classmethod
    def of(cls, schema: pa.Schema) -> Planned:
        """Return the plan in a read's schema; without one, a plan that accepts every version."""
        plan = (schema.metadata or {}).get(PLAN)
        return cls(sys.maxsize, 0) if plan is None else cls(**parse_json(plan))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def check(self, name: str, version: int, read: Iterable[Column], now: Sequence[Column]) -> None:
        """Refuse a version after the planned one if its columns differ from those of the query.

        Parameters
        ----------
        name
            The table, for messages.
        read
            The columns to read.
        now
            All columns of the version; empty if unknown.
        """
        if version <= self.version or not now:
            return
        wanted = {column.key: column for column in read}
        current = {column.key: column for column in now}
        dropped = [column.name for key, column in wanted.items() if key not in current]
        added = [column.name for key, column in current.items() if key not in wanted]
        retyped = [
            f"{in_quotes(column.name)} is {current[key].type} now, not {column.type}"
            for key, column in wanted.items()
            if key in current and current[key].type != column.type
        ]
        changes = [f"{in_quotes(name)} was dropped" for name in dropped] + retyped
        if len(wanted) >= self.columns:
            changes += [f"{in_quotes(name)} was added" for name in added]
        if changes:
            raise FeedUnavailableError(
                f"the columns of {name} have changed in version {version}, after this query was planned: "
                f"{', '.join(changes[:5])}. Read the feed again and start the query again: it resumes before "
                "that version, with the new columns",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=version,
                added=added,
                dropped=dropped,
            )


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file with rows of a table."""

    path: str
    """The path in the table's folder; the full URL of a file outside it."""
    size: int
    rows: int | None = None
    values: tuple[tuple[str, str | None], ...] = ()
    """The values of the partition columns, as text."""
    deletion_vector: bool = False

    @property
    def is_outside_table(self) -> bool:
        return self.path.startswith(("/", "file:")) or "://" in self.path


@dataclass(frozen=True)
class FileCommit:
    """A commit and the files that have its change rows."""

    version: int
    timestamp: int
    files: tuple[tuple[str | None, DataFile], ...]
    """Files, each with the change type of its rows; None if the file has a column for it."""
    rewritten: bool = False
    """Whether there may be carry-over rows."""
    columns: tuple[Column, ...] = ()
    """The columns of the table in this version; empty if unknown."""


@dataclass(frozen=True)
class Slice:
    """A part of one file of one commit."""

    commit: FileCommit
    """Without its files."""
    file: DataFile
    change_type: str | None
    """None if the file has a column with the change type of each row."""
    split: FileSplit


Task: TypeAlias = tuple[Slice, ...]
"""The parts of files that one Spark task reads."""


def cut(commits: Iterable[FileCommit], rows_per_task: int) -> list[Task]:
    """Divide commits into tasks of about ``rows_per_task`` rows: combine small files, split large ones."""
    commits = list(commits)
    estimate = Estimate(file for commit in commits for _, file in commit.files)

    def slices() -> Iterator[tuple[Slice, int]]:
        for commit in commits:
            without_files = replace(commit, files=())
            for kind, file in commit.files:
                rows = estimate.rows(file)
                cuts = split_file(rows, rows_per_task)
                for split in cuts:
                    yield Slice(without_files, file, kind, split), rows // len(cuts)

    return list(grouped(slices(), rows_per_task))


def grouped(parts: Iterable[tuple[Part, int]], rows_per_task: int) -> Iterator[tuple[Part, ...]]:
    """Group parts of files, each with its number of rows, into tasks of about ``rows_per_task`` rows."""
    group: list[Part] = []
    total = 0
    for part, rows in parts:
        if group and (total + rows > rows_per_task or len(group) == _PARTS_PER_TASK):
            yield tuple(group)
            group, total = [], 0
        group.append(part)
        total += rows
    if group:
        yield tuple(group)


class Estimate:
    """Estimator of the rows of files without a row count, from the size of rows in files that have one."""

    def __init__(self, files: Iterable[DataFile] = ()) -> None:
        size = rows = 0
        for file in files:
            if file.rows:
                size, rows = size + file.size, rows + file.rows
        self._bytes = max(size / rows, 1.0) if rows else _BYTES_PER_ROW

    def rows(self, file: DataFile) -> int:
        """Return the number of rows of a file, at least one."""
        return max(1, file.rows if file.rows is not None else int(file.size / self._bytes))


class FileFeed(OpenFeed):
    """An open feed whose commits consist of Parquet files; a subclass plans the tasks."""

    table: str
    """The table for messages, such as "the Delta table /data/orders"."""

    @abstractmethod
    def _open_file(self, file: DataFile, version: int) -> AbstractContextManager[pa.NativeFile]:
        """Open a file of a commit, and translate errors of reading it."""

    @abstractmethod
    def _refused(self, part: Slice, reason: str) -> FeedUnavailableError:
        """Return the error for a file whose columns do not match the schema of the read."""

    def _constants(self, part: Slice, schema: pa.Schema) -> dict[str, pa.Scalar]:
        """Return the values of columns that a file does not store (partition columns); none by default."""
        return {}

    def _check(self, part: Slice, planned: Planned, columns: tuple[Column, ...]) -> None:
        """Refuse a commit that the query was not planned for."""
        planned.check(self.table, part.commit.version, columns, part.commit.columns)

    def _count_rows(self, version: int, files: Sequence[DataFile], enough: int | None) -> int:
        """Count the rows of files until ``enough`` are found; estimate the count if it is None."""
        if enough is None:
            return sum(map(Estimate().rows, files))

        def count_in(file: DataFile) -> int:
            with self._open_file(file, version) as opened:
                return count_rows(opened)

        count = sum(file.rows or 0 for file in files)
        unknown = [file for file in files if file.rows is None]
        while unknown and count <= enough:
            count += sum(in_parallel(count_in, unknown[:_COUNTED_IN_PARALLEL]))
            del unknown[:_COUNTED_IN_PARALLEL]
        return count

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        planned, columns = Planned.of(schema), columns_of(schema)
        for part in task:
            self._check(part, planned, columns)
            yield from self._rows(part, schema)

    def _rows(self, part: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        constants = self._constants(part, schema)
        stored = [name for name in schema.names if name not in constants and name not in METADATA_NAMES]
        wanted = [*stored, CHANGE_TYPE] if part.change_type is None else stored
        with self._open_file(part.file, part.commit.version) as file:
            for batch in read_split(file, part.split, wanted):
                data = cast_to_schema(batch, schema, lambda reason: self._refused(part, reason))
                for name, value in constants.items():
                    data = data.append_column(name, pa.repeat(value, data.num_rows))
                yield change_rows(
                    data,
                    schema,
                    change_type=part.change_type or data.column(CHANGE_TYPE),
                    version=part.commit.version,
                    timestamp=part.commit.timestamp,
                )
