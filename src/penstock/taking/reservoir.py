"""A uniform sample without replacement of rows that come in batches, in parts that can be merged.

Each row gets a random key, and the rows with the smallest keys stay. As all rows have the same weight, this is the reservoir of
Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97(5), 2006, algorithm A-Res.
The rows with the smallest keys of a whole are among those of its parts (Cohen and Kaplan, "Summarizing data using bottom-k
sketches", PODC 2007), so tasks sample for themselves, and what they keep is merged.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Keys = NDArray[np.float64]
_SLACK = 2
"""A reservoir is thinned out when it holds so many times the rows that it is for."""


class Reservoir:
    """The rows with the smallest keys of all that it was given.

    Parameters
    ----------
    rows
        How many stay.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bound = np.inf
        self._parts: list[tuple[pa.Table, Keys]] = []
        self._held = 0

    def add(self, table: pa.Table, keys: Keys) -> None:
        """Take rows with their keys."""
        places = np.flatnonzero(keys < self._bound)
        if not places.size:
            return
        # A copy, which holds on to nothing of a large batch.
        self._parts.append((table.take(pa.array(places)), keys[places]))
        self._held += int(places.size)
        if self._held >= _SLACK * self._rows:
            self._thin_out()

    def kept(self) -> tuple[pa.Table, Keys] | None:
        """The sample in the order of its keys, which is a random one; None when nothing came."""
        if not self._parts:
            return None
        self._thin_out()
        ((table, keys),) = self._parts
        order = np.argsort(keys)
        return table.take(pa.array(order)), keys[order]

    def _thin_out(self) -> None:
        table = pa.concat_tables([part for part, _ in self._parts])
        keys = np.concatenate([part for _, part in self._parts])
        if keys.size > self._rows:
            places = np.argpartition(keys, self._rows - 1)[: self._rows]
            table, keys = table.take(pa.array(places)), keys[places]
        if keys.size == self._rows:
            self._bound = float(keys.max())
        self._parts, self._held = [(table, keys)], int(keys.size)
