"""Queues whose large appends are in objects in a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

import penstock
from penstock.store.log import payloads
from tests.support.raw_sql import run_sql

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
DAY = payloads.ORPHAN_AGE


def large(*values: int) -> pa.Table:
    """Rows that do not compress."""
    return pa.table({"n": values, "text": [os.urandom(80 << 10).hex() for _ in values]})


def small(*values: int) -> pa.Table:
    return pa.table({"n": values, "text": [""] * len(values)})


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.segments"))


def date_back(store: penstock.Store, microseconds: int) -> None:
    """Make the tokens of cleanings older."""
    run_sql(
        store.database,
        f"update penstock.cleaning set begun_at = begun_at - {microseconds}, "
        f"settled_at = settled_at - {microseconds}",
    )


def age(store: penstock.Store, folder: Path, *, days: int = 2) -> None:
    """Make everything that is in the storage or marked in the store older; it was cleaned up meanwhile, and
    just now.
    """
    store.clean_up_objects()
    date_back(store, days * DAY - DAY // 2)
    store.clean_up_objects()
    for path in objects(folder):
        then = time.time() - days * 86_400
        os.utime(path, (then, then))
    run_sql(store.database, f"update penstock.object set unused_at = unused_at - {days * DAY}")
    run_sql(store.database, f"update penstock.location set cleaned_at = cleaned_at - {days * DAY}")
