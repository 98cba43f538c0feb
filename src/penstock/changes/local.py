"""Changes of a feed in one process without a Spark session, for the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.changes.options import EVER, ChangeOptions
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.changes.passes.violations import check_rows
from penstock.changes.schema import layout_of
from penstock.feeds.protocol import Description, OpenFeed
from penstock.spark.schemas import to_struct

_ROWS_AT_ONCE = 500_000
_ROWS_PER_TASK = 1_000_000
_IN_ORDER = [("_commit_version", "ascending")]


def changes(
    feed: OpenFeed,
    after: int,
    upto: int,
    *,
    mode: str,
    compute_updates: bool,
    net_window: int = EVER,
    description: Description | None = None,
) -> Iterator[pa.Table]:
    """Yield the changes of a range in commit order, some commits at a time; its net changes all at once.

    ``mode``, ``compute_updates`` and ``net_window`` are those of ``ChangeOptions``. Without a description,
    the feed is described at the start of the range.
    """
    description = description or feed.describe(after)
    options = ChangeOptions(mode, compute_updates, net_window)
    passes = Passes() if description.contract is None else Passes.of(description.contract, options)
    schema, layout = description.planned_schema, None
    if passes and description.contract is not None:
        layout = layout_of(to_struct(description.schema), description.contract, case_sensitive=True)
    ranges = [(after, upto)] if passes.net == EVER else _pieces(feed, after, upto)
    for first, last in ranges:
        batches = [
            batch for task in feed.tasks(first, last, _ROWS_PER_TASK) for batch in feed.read(task, schema)
        ]
        table = pa.Table.from_batches(batches, schema=description.schema)
        yield _processed(table, layout, passes).sort_by(_IN_ORDER)


def _processed(table: pa.Table, layout: Layout | None, passes: Passes) -> pa.Table:
    if layout is None or not table.num_rows:
        return table
    rows = ChangeRows(table, layout)
    check_rows(rows, needs_content=passes.needs_content)
    return passes.whole(rows).table


def _pieces(feed: OpenFeed, after: int, upto: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole commits that fit into memory, or of single commits."""
    rows, first, last = 0, after, after
    for commit in feed.commits(after, upto):
        if rows and rows + commit.rows > _ROWS_AT_ONCE:
            yield first, last
            rows, first = 0, last
        rows, last = rows + commit.rows, commit.version
    if last > first:
        yield first, last
