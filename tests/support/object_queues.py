"""Helpers for queues whose large appends are stored as objects in a folder."""

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
    """Return rows that do not compress."""
    return pa.table({"n": values, "text": [os.urandom(80 << 10).hex() for _ in values]})


def small(*values: int) -> pa.Table:
    return pa.table({"n": values, "text": [""] * len(values)})


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.segments"))


def date_back(store: penstock.Store, microseconds: int) -> None:
    """Backdate the records of clean-ups."""
    run_sql(
        store.database,
        f"update penstock.cleaning set begun_at = begun_at - {microseconds}, "
        f"settled_at = settled_at - {microseconds}",
    )


def age(store: penstock.Store, folder: Path, *, days: int = 2) -> None:
    """Backdate all objects and their records, as if clean-ups had run in the meantime and just now."""
    store.clean_up_objects()
    date_back(store, days * DAY - DAY // 2)
    store.clean_up_objects()
    for path in objects(folder):
        modified = time.time() - days * 86_400
        os.utime(path, (modified, modified))
    run_sql(store.database, f"update penstock.object set unused_at = unused_at - {days * DAY}")
    run_sql(store.database, f"update penstock.location set cleaned_at = cleaned_at - {days * DAY}")
