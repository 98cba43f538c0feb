"""Reads the change rows of open feeds without Spark, and runs the passes of their contracts."""

from __future__ import annotations

import pickle

import pyarrow as pa

from penstock.changes.options import ChangeOptions, parse_net_window
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows
from penstock.changes.passes.violations import check_rows
from penstock.changes.schema import layout_of
from penstock.feeds.protocol import OpenFeed
from penstock.spark.schemas import to_struct


def batches_of(
    feed: OpenFeed, after: int, upto: int, schema: pa.Schema, per_task: int = 1000
) -> list[pa.RecordBatch]:
    """Return the batches of a range, as Spark's tasks read them."""
    batches = []
    for task in feed.tasks(after, upto, per_task) if after < upto else ():
        for batch in feed.read(pickle.loads(pickle.dumps(task)), schema):
            assert batch.schema.equals(schema, check_metadata=True)
            batch.validate(full=True)
            batches.append(batch)
    return batches


def changes(feed: OpenFeed, after: int = -1, upto: int = 10**6, per_task: int = 1000) -> pa.Table:
    """Return the change rows of a range."""
    schema = feed.describe().planned_schema
    return pa.Table.from_batches(batches_of(feed, after, upto, schema, per_task), schema)


def passed(feed: OpenFeed, rows: pa.Table, *, updates: bool = False) -> pa.Table:
    """Return change rows after the passes of the feed's contract."""
    contract = feed.describe().contract
    if contract is None:
        return rows
    layout = layout_of(to_struct(rows.schema), contract, case_sensitive=True)
    passes = Passes.of(contract, ChangeOptions("dropCarryovers", updates, parse_net_window(None)))
    check_rows(ChangeRows(rows, layout), needs_content=True)
    return passes.run(ChangeRows(rows, layout)).table if passes else rows
