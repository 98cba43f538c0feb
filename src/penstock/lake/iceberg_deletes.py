"""Position delete files of Iceberg tables: the data files they apply to, from their column bounds."""

from __future__ import annotations

from pyiceberg.manifest import DataFile, DataFileContent

FILE_PATH_FIELD_ID = 2147483546
"""Reserved field id of ``file_path`` in position delete files, the column that names the data file."""


def path_bounds(deletes: DataFile) -> tuple[bytes | None, bytes | None]:
    """Return the smallest and largest data file path in a delete file; None for unknown bounds."""
    low, high = (
        (bounds or {}).get(FILE_PATH_FIELD_ID) for bounds in (deletes.lower_bounds, deletes.upper_bounds)
    )
    return low, high


def only_data_file(deletes: DataFile) -> str | None:
    """Return the data file that a position delete file applies to; None if there may be several."""
    low, high = path_bounds(deletes)
    has_one_data_file = (
        deletes.content == DataFileContent.POSITION_DELETES and low is not None and low == high
    )
    return low.decode(errors="replace") if has_one_data_file and low is not None else None
