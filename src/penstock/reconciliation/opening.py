"""Opening of a copy."""

from __future__ import annotations

from penstock.lake.storage import is_delta
from penstock.reconciliation.copies import Copy
from penstock.reconciliation.source import SourceTable
from penstock.tables.sink import TableSink


def open_copy(sink: TableSink, url: str, source: SourceTable) -> Copy:
    """Open the table of a sink, which has to exist."""
    # Each needs a library of its own.
    if is_delta(url):
        from penstock.reconciliation.delta_copy import DeltaCopy

        return DeltaCopy.of(url, sink.name, source.schema, source.key)
    from penstock.reconciliation.sql_opening import open_sql_copy

    return open_sql_copy(url, sink.name, source)
