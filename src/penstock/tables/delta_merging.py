"""Merges of rows into a Delta table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from penstock.tables.names import quoted

TARGET, SOURCE = "target", "source"


def merging(table: Any, rows: pa.RecordBatchReader | pa.Table, keys: Iterable[str], properties: Any) -> Any:
    """A merge that finds rows by keys, deltalake's ``TableMerger``, which is told next what to do with them."""
    same = " and ".join(f"{TARGET}.{quoted(key)} = {SOURCE}.{quoted(key)}" for key in keys)
    return table.merge(rows, same, source_alias=SOURCE, target_alias=TARGET, commit_properties=properties)


def assigned(names: Iterable[str]) -> dict[str, str]:
    """The columns that take the values of the source."""
    return {quoted(name): f"{SOURCE}.{quoted(name)}" for name in names}
