"""Use of deletion vectors: a data file gets a list of its deleted rows instead of a copy without them.

A copy reads and writes all columns of the file, while a vector only needs the keys. A vector replaces the
file's earlier one, so readers read at most one per file. Once a certain share of its rows is deleted, a file
is copied.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from penstock.json_text import parse_json_object
from penstock.lake.deletion_vectors import DeletionVector, Positions, encode, vector_file_content
from penstock.lake.new_files import supports_conditional_put
from penstock.lake.storage import DeltaLocation

if TYPE_CHECKING:
    from deltalake import DeltaTable

_VECTORS_FEATURE = "deletionVectors"
VECTORS_PROPERTY = "delta.enableDeletionVectors"
VECTORS_FOLDER = "_penstock_vectors"
"""The folder of vector files; deltalake's ``vacuum(full=True)`` deletes those in the table's own folder."""
_MIN_FILE_BYTES = 4 << 20
"""The minimum size of files that get vectors; smaller files are copied quickly enough."""
_MAX_DELETED_SHARE = 0.1
_INLINE_BYTES = 1 << 10
"""The size up to which vectors are inline in the log, which every reader reads; larger ones are in files."""


def may_have_vectors(table: DeltaTable) -> bool:
    """Whether a table's files may have deletion vectors."""
    return _VECTORS_FEATURE in (table.protocol().writer_features or ())


def vectors_enabled(table: DeltaTable, location: DeltaLocation) -> bool:
    """Whether deletion vectors are enabled for a table and its storage allows them."""
    properties = table.metadata().configuration.items()
    is_enabled = any(
        name.lower() == VECTORS_PROPERTY.lower() and (value or "").lower() == "true"
        for name, value in properties
    )
    return is_enabled and may_have_vectors(table) and supports_conditional_put(location)


def should_use_vector(add: dict[str, Any] | None, rows: int, deleted: int) -> bool:
    """Whether a file of which ``deleted`` of ``rows`` rows are deleted gets a vector instead of a copy."""
    if add is None or add["size"] < _MIN_FILE_BYTES or deleted > _MAX_DELETED_SHARE * rows:
        return False
    return _with_wide_bounds(add.get("stats") or "", rows) is not None


def write_vector(location: DeltaLocation, positions: Positions) -> DeletionVector:
    """Return a vector of deleted rows; write its file unless it is small enough to be inline."""
    data = encode(positions)
    if len(data) <= _INLINE_BYTES:
        return DeletionVector.inline(data, len(positions))
    vector = DeletionVector.in_file(VECTORS_FOLDER, uuid.uuid4(), data, len(positions))
    assert vector.path is not None
    content = vector_file_content(data)
    # deltalake does not accept the type in which pyarrow passes content larger than the buffer.
    with location.files().open_output_stream(vector.path, buffer_size=len(content) + 1) as out:
        out.write(content)
    return vector


def vector_of(add: dict[str, Any]) -> DeletionVector | None:
    """Return the vector of an add action."""
    action = add.get("deletionVector")
    return None if action is None else DeletionVector.of(action)


def remove_action(add: dict[str, Any]) -> dict[str, Any]:
    """Return the remove action for an add action."""
    copied_fields = {name: add[name] for name in ("path", "partitionValues", "size", "tags") if name in add}
    vector = {} if "deletionVector" not in add else {"deletionVector": add["deletionVector"]}
    now = time.time_ns() // 1_000_000
    removal_fields = {"deletionTimestamp": now, "dataChange": True, "extendedFileMetadata": True}
    return {"remove": {**copied_fields, **removal_fields, **vector}}


def add_with_vector(add: dict[str, Any], vector: DeletionVector) -> dict[str, Any]:
    """Return the action that adds a file again, with another vector and wide bounds in its statistics."""
    stats = _with_wide_bounds(add["stats"])
    assert stats is not None
    return {"add": {**add, "stats": stats, "dataChange": True, "deletionVector": vector.action}}


def _with_wide_bounds(statistics: str, rows: int | None = None) -> str | None:
    """Return statistics with ``tightBounds`` false, as deleted rows count for the bounds; None if impossible.

    A file with a vector must have ``numRecords``, checked against ``rows``. The rest of the text is kept,
    since parsing numbers may lose digits.
    """
    try:
        parsed = parse_json_object(statistics)
    except ValueError:
        return None
    if rows is not None and parsed.get("numRecords") != rows:
        return None
    tight_bounds = parsed.get("tightBounds")
    if tight_bounds is False:
        return statistics
    if tight_bounds is None:
        return f'{{"tightBounds":false,{statistics.lstrip()[1:]}'
    before, _, after = statistics.partition('"tightBounds"')
    is_unambiguous = '"tightBounds"' not in after
    return f'{before}"tightBounds"{after.replace("true", "false", 1)}' if is_unambiguous else None
