"""Tables of many rows in one file, and what another writer does while a query is about to commit to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.tables.delta.copy_on_write import CopyOnWrite, Replacement
from tests.tables.delta.row_queries import RowQuery
from tests.tables.delta.vectors import create

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string()), ("v", pa.int64())])
MANY = 100


def table_of(rows: dict[Any, int]) -> pa.Table:
    return pa.Table.from_pylist([{"a": a, "b": b, "v": v} for (a, b), v in rows.items()], SCHEMA)


def filled(folder: Path, properties: dict[str, str], keys: Sequence[str] = ("a",)) -> RowQuery:
    """A table with one file of many rows."""
    create(folder, SCHEMA, properties)
    query = RowQuery(folder, SCHEMA, "update", keys)
    query.write(0, table_of({(n, "x"): 0 for n in range(MANY)}))
    return query


class Hook:
    """What another writer does after a query has planned its commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Callable[[], object]] = []
        self.planned: list[Replacement] = []
        replacement = CopyOnWrite.replacement

        def hooked(copies: CopyOnWrite, *arguments: Any) -> Replacement:
            planned = replacement(copies, *arguments)
            self.planned.append(planned)
            if self.calls:
                self.calls.pop()()
            return planned

        monkeypatch.setattr(CopyOnWrite, "replacement", hooked)
