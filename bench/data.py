"""Rows of the benchmarks: bigint, double, string."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa

ROWS = 2_000_000
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.float64()), ("name", pa.string())])


@cache
def rows(count: int = ROWS) -> pa.Table:
    random = np.random.default_rng(7)
    ids = np.arange(count, dtype=np.int64)
    names = pa.array([f"name-{number % 5000}-{number}" for number in range(count)])
    return pa.table([ids, random.random(count), names], schema=SCHEMA)
