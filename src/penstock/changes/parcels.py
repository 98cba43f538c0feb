"""Change rows on their way through a shuffle: rows with equal row ids go to one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.arrow.key_hash import check_key, key_hash
from penstock.changes.rows import Path, column_at
from penstock.errors import UnsupportedType
from penstock.spark.shuffle_batches import pack


@dataclass(frozen=True)
class Packing:
    """Which rows go into one parcel, and where it goes."""

    row_id: tuple[Path, ...]
    places: tuple[int, ...]

    def pack(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """The rows in parcels; rows with equal row ids go to one place."""
        if table.num_rows:
            yield from pack(table, self._targets(table), self.places)

    def _targets(self, table: pa.Table) -> Any:
        names = [str(number) for number in range(len(self.row_id))]
        ids = pa.RecordBatch.from_arrays([column_at(table, path) for path in self.row_id], names)
        hashes = key_hash(ids, names).to_numpy()
        kind = np.uint16 if len(self.places) <= 1 << 16 else np.uint32
        return (hashes % np.uint32(len(self.places))).astype(kind)


def hashable(types: Iterable[pa.DataType]) -> bool:
    """Whether row ids of these types can be told where to go."""
    fields = [pa.field(str(number), kind) for number, kind in enumerate(types)]
    try:
        check_key(pa.schema(fields), [field.name for field in fields])
    except UnsupportedType:
        return False
    return True
