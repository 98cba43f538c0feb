"""Commits that consist of data files, divided into tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.feeds.planned_schema import Column
from penstock.lake.parquet import Piece, pieces

_BYTES_PER_ROW = 32
"""Assumed if no file of the range has a row count."""
_FILES_PER_TASK = 1_000


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file with rows of a table."""

    path: str
    """The path in the table's folder; a whole URL for a file outside it."""
    size: int
    rows: int | None = None
    values: tuple[tuple[str, str | None], ...] = ()
    """The values of the partition columns, as text."""
    deletion_vector: bool = False


@dataclass(frozen=True)
class FileCommit:
    """The files that hold the change rows of a commit."""

    version: int
    timestamp: int
    files: tuple[tuple[str | None, DataFile], ...]
    """Each with the change type of its rows; None if each row has its own."""
    rewritten: bool = False
    """Whether unchanged rows may be among them, as a delete and an insert."""
    columns: tuple[Column, ...] = ()
    """The columns of the table in that version, if known."""


@dataclass(frozen=True)
class Slice:
    """A piece of one file of one commit."""

    path: str
    piece: Piece
    change_type: str | None
    """None if each row has its own."""
    values: tuple[tuple[str, str | None], ...]
    version: int
    timestamp: int
    rewritten: bool
    """As for its commit."""
    columns: tuple[Column, ...] = ()
    """As for its commit."""


@dataclass(frozen=True)
class Task:
    """The pieces that one Spark task reads."""

    slices: tuple[Slice, ...]


def cut(commits: Iterable[FileCommit], rows_per_task: int) -> list[Task]:
    """Divide commits into tasks of about that many rows."""
    commits = list(commits)
    estimate = Estimate(file for commit in commits for _, file in commit.files)
    tasks: list[Task] = []
    slices: list[Slice] = []
    rows = 0
    for piece, count in _slices(commits, estimate, rows_per_task):
        if slices and (rows + count > rows_per_task or len(slices) == _FILES_PER_TASK):
            tasks.append(Task(tuple(slices)))
            slices, rows = [], 0
        slices.append(piece)
        rows += count
    return [*tasks, Task(tuple(slices))] if slices else tasks


def _slices(
    commits: Iterable[FileCommit], estimate: Estimate, rows_per_task: int
) -> Iterator[tuple[Slice, int]]:
    for commit in commits:
        for kind, file in commit.files:
            rows = estimate.rows(file)
            cuts = pieces(rows, rows_per_task)
            for piece in cuts:
                part = Slice(
                    file.path,
                    piece,
                    kind,
                    file.values,
                    commit.version,
                    commit.timestamp,
                    commit.rewritten,
                    commit.columns,
                )
                yield part, rows // len(cuts)


class Estimate:
    """Estimates the rows of files without a row count from those that have one."""

    def __init__(self, files: Iterable[DataFile]) -> None:
        size = rows = 0
        for file in files:
            if file.rows:
                size, rows = size + file.size, rows + file.rows
        self._bytes = max(size / rows, 1.0) if rows else _BYTES_PER_ROW

    def rows(self, file: DataFile) -> int:
        """Return the number of rows of a file, at least one."""
        return max(1, file.rows if file.rows is not None else int(file.size / self._bytes))
