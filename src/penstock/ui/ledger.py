"""The newest commits on the page."""

from __future__ import annotations

from typing import Any

from penstock.ui.reading import Seen
from penstock.ui.times import iso


def told(seen: Seen) -> list[dict[str, Any]]:
    """The newest commits of the ledger as the page gets them, newest first."""
    names = seen.names
    return [
        {
            "sink": _sink(row.sink),
            "app_id": row.app_id,
            "query": names.get(row.app_id),
            "batch": row.batch_id,
            "rows": row.row_count,
            "committed_at": iso(row.committed_at),
        }
        for row in seen.commits
    ]


def _sink(name: str) -> str:
    """What people call a sink: the ledger has ``queue:name:generation``, or ``table:"schema"."name"``."""
    kind, _, rest = name.partition(":")
    if kind == "queue":
        return rest.rpartition(":")[0]
    return rest if kind == "table" else name
