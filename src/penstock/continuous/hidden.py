"""The columns that every row of a continuous query carries besides its own, and what is no row."""

from __future__ import annotations

import pyarrow as pa

KIND, EPOCH = "__penstock_kind", "__penstock_epoch"
ROW, MARKER, FILLER = 0, 1, 2
"""What a row of a batch is: one of the source's; the end of an epoch; or one that only pushes those before it through the
buffers between Spark and its Python workers."""

HIDDEN = pa.schema([pa.field(KIND, pa.int8(), nullable=False), pa.field(EPOCH, pa.int64(), nullable=False)])
