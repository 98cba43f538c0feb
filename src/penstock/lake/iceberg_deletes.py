"""Position delete files of Iceberg tables: which data files they list rows of, as their bounds say."""

from __future__ import annotations

from pyiceberg.manifest import DataFile, DataFileContent

PATH_FIELD = 2147483546
"""The column of a position delete file that names the data file; the table format reserves its id."""


def path_bounds(deletes: DataFile) -> tuple[bytes | None, bytes | None]:
    """Return the least and the greatest path of a data file that a delete file lists; None if unknown."""
    low, high = ((each or {}).get(PATH_FIELD) for each in (deletes.lower_bounds, deletes.upper_bounds))
    return low, high


def only_data_file(deletes: DataFile) -> str | None:
    """Return the data file whose rows a delete file lists; None if they may be of several."""
    low, high = path_bounds(deletes)
    is_one = deletes.content == DataFileContent.POSITION_DELETES and low is not None and low == high
    return low.decode(errors="replace") if is_one and low is not None else None
