"""Deletion vectors of a table's data files: a few bytes that say which rows of a file are gone, instead of a
copy of the file without them.

For a copy all columns of the file are read and written, for a vector its keys are read. A vector replaces the
file's earlier one, so readers never have to read more than one; once a file has lost a share of its rows, it
is copied.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from penstock.json_text import parse_json_object
from penstock.lake.deletion_vectors import DeletionVector, Positions, encode, file_of
from penstock.lake.new_files import can_create
from penstock.lake.storage import DeltaPlace

if TYPE_CHECKING:
    from deltalake import DeltaTable

_FEATURE = "deletionVectors"
PROPERTY = "delta.enableDeletionVectors"
FOLDER = "_penstock_vectors"
"""The folder of vectors: deltalake's ``vacuum(full=True)`` would delete those in the table's own folder."""
_LEAST_BYTES = 4 << 20
"""Smaller files are copied soon enough."""
_LARGEST_SHARE = 0.1
_INLINE_BYTES = 1 << 10
"""Vectors of so many bytes are in the log, which all readers read, and larger ones in files."""


def may_have_vectors(table: DeltaTable) -> bool:
    """Whether files of a table may have deletion vectors."""
    return _FEATURE in (table.protocol().writer_features or ())


def gets_vectors(table: DeltaTable, place: DeltaPlace) -> bool:
    """Whether a table's owner wants deletion vectors for changes, and its storage allows them."""
    properties = table.metadata().configuration.items()
    wanted = any(
        name.lower() == PROPERTY.lower() and (value or "").lower() == "true" for name, value in properties
    )
    return wanted and may_have_vectors(table) and can_create(place)


def is_worth_a_vector(add: dict[str, Any] | None, rows: int, gone: int) -> bool:
    """Whether a file with so many rows, of which some are gone in sum, gets a vector; else it is copied."""
    if add is None or add["size"] < _LEAST_BYTES or gone > _LARGEST_SHARE * rows:
        return False
    return _wide(add.get("stats") or "", rows) is not None


def written_vector(place: DeltaPlace, positions: Positions) -> DeletionVector:
    """Return a vector of rows that are gone, after writing its file if it needs one."""
    data = encode(positions)
    if len(data) <= _INLINE_BYTES:
        return DeletionVector.inline(data, len(positions))
    vector = DeletionVector.in_file(FOLDER, uuid.uuid4(), data, len(positions))
    assert vector.path is not None
    content = file_of(data)
    # What does not fit into the buffer arrives at deltalake in a type that it does not take.
    with place.files().open_output_stream(vector.path, buffer_size=len(content) + 1) as out:
        out.write(content)
    return vector


def vector_of(add: dict[str, Any]) -> DeletionVector | None:
    """Return the vector of an add action."""
    action = add.get("deletionVector")
    return None if action is None else DeletionVector.of(action)


def remove_action(add: dict[str, Any]) -> dict[str, Any]:
    """Return the action that removes the file that an action has added."""
    same = {name: add[name] for name in ("path", "partitionValues", "size", "tags") if name in add}
    vector = {} if "deletionVector" not in add else {"deletionVector": add["deletionVector"]}
    now = time.time_ns() // 1_000_000
    more = {"deletionTimestamp": now, "dataChange": True, "extendedFileMetadata": True}
    return {"remove": {**same, **more, **vector}}


def add_with_vector(add: dict[str, Any], vector: DeletionVector) -> dict[str, Any]:
    """Return the action that adds a file again, with another vector.

    The bounds of its columns are those of all its rows, as the statistics then say.
    """
    stats = _wide(add["stats"])
    assert stats is not None
    return {"add": {**add, "stats": stats, "dataChange": True, "deletionVector": vector.action}}


def _wide(statistics: str, rows: int | None = None) -> str | None:
    """Return statistics whose bounds need not be those of a row that is left; None if they cannot be.

    A vector needs the number of ``rows``. The text stays otherwise as it is: a number that is parsed may lose
    digits.
    """
    try:
        parsed = parse_json_object(statistics)
    except ValueError:
        return None
    if rows is not None and parsed.get("numRecords") != rows:
        return None
    tight = parsed.get("tightBounds")
    if tight is False:
        return statistics
    if tight is None:
        return f'{{"tightBounds":false,{statistics.lstrip()[1:]}'
    before, _, after = statistics.partition('"tightBounds"')
    is_clear = '"tightBounds"' not in after
    return f'{before}"tightBounds"{after.replace("true", "false", 1)}' if is_clear else None
