"""The schema of a dead letter queue, without Spark."""

from __future__ import annotations

import pyarrow as pa

REASON = "reason"
VALUE = "value"
COORDINATES = ("topic", "partition", "offset")
DEAD_LETTERS = pa.schema(
    [
        pa.field(REASON, pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field(VALUE, pa.string()),
    ]
)
"""The schema of a dead letter queue: the reason, where the event came from, and the event itself."""
