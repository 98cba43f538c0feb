"""Position delete files of Iceberg tables: find their data files from their bounds."""

from __future__ import annotations

from pyiceberg.manifest import DataFile, DataFileContent

PATH_FIELD = 2147483546
"""The column of a position delete file that names the data file; the table format reserves its id."""


def path_bounds(deletes: DataFile) -> tuple[bytes | None, bytes | None]:
    """Return the smallest and largest path of the data files in a delete file; None if unknown."""
    low, high = ((each or {}).get(PATH_FIELD) for each in (deletes.lower_bounds, deletes.upper_bounds))
    return low, high


def only_data_file(deletes: DataFile) -> str | None:
    """Return the only data file whose rows a delete file lists; None if there may be several."""
    low, high = path_bounds(deletes)
    is_one = deletes.content == DataFileContent.POSITION_DELETES and low is not None and low == high
    return low.decode(errors="replace") if is_one and low is not None else None
