"""Compaction of Delta and Iceberg tables: small data files are rewritten into fewer large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import CommitRefusedError, InvalidInputError, InvalidUrlError, TableRefusedError
from penstock.extras import load
from penstock.lake.storage import DeltaLocation, is_delta
from penstock.tables.iceberg.location import IcebergLocation, is_iceberg

_MIN_SMALL_FILES = 5
"""The number of small files from which a partition is compacted, even if they do not fill a new file."""


@dataclass(frozen=True)
class TableCompaction:
    """The result of :func:`compact_table`."""

    merged_files: int = 0
    """The number of replaced files."""
    new_files: int = 0
    """The number of files that replaced them."""
    commits: int = 0

    def __add__(self, other: TableCompaction) -> TableCompaction:
        return TableCompaction(
            self.merged_files + other.merged_files,
            self.new_files + other.new_files,
            self.commits + other.commits,
        )


def compact_table(name: str, url: str | None = None, *, file_bytes: int = 128 << 20) -> TableCompaction:
    """Merge the small files of a Delta or Iceberg table. Its rows do not change.

    Files are merged within their partitions: in a Delta table whenever two are small, and in an Iceberg table
    when at least five are small, or when fewer fill a file. Queries and other programs can write and read the
    table in the meantime. The replaced files are kept for readers of earlier versions, until a VACUUM or
    until the snapshots expire.

    Parameters
    ----------
    name
        The table's name in the folder or catalog, or ``iceberg:catalog.namespace.table``.
    url
        ``delta:///folder``, ``delta:s3://bucket/folder`` or ``iceberg:CATALOG``, as for ``TableSink``.
    file_bytes
        The target size of the new files, in bytes.

    Raises
    ------
    InvalidUrlError, InvalidNameError
    TableRefusedError
        When there is no such table, or when its files cannot be rewritten without losing something.
    CommitRefusedError
        When other writers committed first at each attempt. No row is lost or repeated.
    StoreUnavailableError
        When the storage or the catalog does not answer; the call can be repeated.
    """
    if type(file_bytes) is not int or file_bytes < 1 << 10:
        raise InvalidInputError(
            f"file_bytes must be 1,024 or more, not {file_bytes!r}", parameter="file_bytes"
        )
    if is_iceberg(url or name):
        iceberg: Callable[..., TableCompaction] = load(
            "penstock.tables.iceberg.compaction", "compact", "an Iceberg table"
        )
        return iceberg(IcebergLocation.of(url or name, name), file_bytes, _MIN_SMALL_FILES)
    if url is not None and is_delta(url):
        delta: Callable[..., TableCompaction] = load(
            "penstock.tables.delta.compaction", "compact", "a Delta table"
        )
        return delta(DeltaLocation.of(url, name), file_bytes)
    raise InvalidUrlError(
        "only Delta and Iceberg tables can be compacted: give the URL of a folder of Delta tables, "
        "delta:///folder or delta:s3://bucket/folder, or of an Iceberg catalog, iceberg:CATALOG",
        condition="INVALID_URL.UNKNOWN_KIND",
    )


def table_not_found_error(kind: str, table: str) -> TableRefusedError:
    return TableRefusedError(
        f"there is no {kind}: check the name and the URL",
        condition="TABLE_REFUSED.NOT_FOUND",
        table=table,
    )


def attempts_exhausted_error(kind: str, table: str, attempts: int, reason: str) -> CommitRefusedError:
    return CommitRefusedError(
        f"other writers changed {kind} at each of {attempts} attempts to merge files ({reason}). No row is "
        "lost or repeated: compact the table when fewer writers are active",
        condition="COMMIT_REFUSED.TABLE_CHANGED",
        table=table,
    )
