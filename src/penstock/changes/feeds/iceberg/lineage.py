"""Row lineage, which tables have from format 3 on: a number for each row, and the version that last updated it.

A file has both as columns where its rows were written before, such as by a copy-on-write update. Elsewhere, and where the columns
are null, a row's number is that of the file's first row plus its position, and its version the one that added the file
(https://iceberg.apache.org/spec, "Row Lineage").
"""

from __future__ import annotations

import pyarrow as pa

ROW_ID, UPDATED = "_row_id", "_last_updated_sequence_number"
FIELDS = (
    pa.field(ROW_ID, pa.int64(), nullable=False),
    pa.field(UPDATED, pa.int64(), nullable=False),
)
NAMES = (ROW_ID, UPDATED)
FIELD_IDS = {ROW_ID: 2147483540, UPDATED: 2147483539}
"""Which the table format reserves."""
FORMAT_VERSION = 3
