"""A table of a store to which changes are applied."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tests.tables.targets import Table

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


def change(number: int, name: str | None, kind: str, version: int) -> dict[str, Any]:
    return {"id": number, "name": name, "_change_type": kind, "_commit_version": version}


class ChangeTable(Table):
    """A table of changes, without Spark."""

    CHANGES = "_commit_version"

    def apply(self, batch_id: int, changes: list[tuple[str, int, int, int]]) -> None:
        stage = self.stage(batch_id=batch_id)
        self.write(stage, "changes", self.put(stage, *changes))
