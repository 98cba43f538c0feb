"""Generates the tables of docs/options.md.

The options, where they apply, and their defaults are read from the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from penstock.changes import data_source as changes
from penstock.spark import options

# Only `stream.limit` sets these.
INTERNAL = {"limitRows", "limitUrl", "movedBySink"}

BOTH = {
    "url": "the store; hidden by Spark in plans and on its web page",
    "queue": "the queue, when it is not the argument of `load`, `save` or `start`",
}
READING = {
    "consumer": "start at this consumer's offsets; a stream also moves them",
    "startingOffsets": '`earliest`, `latest`, `consumer`, or row indexes such as `{"0": 120}`',
    "startingTimestamp": "a time with its zone, or milliseconds since 1970: "
    "the first row appended at or after it",
    "endingOffsets": "`latest`, or row indexes",
    "failOnDataLoss": "fail when rows of the range have been trimmed; "
    "`false` continues after them and logs the range",
    "includeMetadataColumns": "add `_queue`, `_generation`, `_partition`, `_row_index`, `_timestamp`",
    "rowsPerTask": "a partition with more rows is read by several tasks",
    "maxTasks": "if there would be more tasks, partitions with few rows share them, up to `rowsPerTask`",
    "maxRowsPerTrigger": "rows of a micro-batch, shared among the partitions by their backlog",
    "maxRowsPerPartition": "rows of a micro-batch from each partition",
    "maxBytesPerTrigger": "compressed bytes of a micro-batch",
    "alignToAppends": "never split an append, over all its partitions; "
    "a micro-batch may then exceed the limits by one append",
}
WRITING = {
    "guarantee": "`exactly_once`, `idempotent`, `at_least_once`",
    "appId": "the query's identity in the ledger",
    "allowNewCheckpoint": "a stateful query with a new checkpoint may take the consumer over, "
    "with empty state",
    "allowNewSink": "a query with an existing checkpoint may write to a sink that has none of its earlier "
    "rows: it was switched to another sink",
    "maxRowsPerWrite": "rows of a segment",
}
CHANGES = {
    "url": "the feed's URL form; hidden by Spark in plans and on its web page",
    "startingVersion": "the first commit, by version",
    "endingVersion": "the last commit, by version",
    "startingTimestamp": "the first commit, by time: with a time zone, or milliseconds since 1970",
    "endingTimestamp": "the last commit, by time: the range ends before the first commit that is later",
    "startingBoundInclusive": "whether the start belongs to the range",
    "endingBoundInclusive": "whether the end belongs to the range",
    "maxCommitsPerTrigger": "commits in a micro-batch",
    "maxRowsPerTrigger": "rows in a micro-batch, rounded up to a whole commit",
    "rowsPerTask": "about how many rows a task reads",
    "readOnly": "a stream never reports to the feed how far it has read: a PostgreSQL slot does not advance",
    "finalizedUntil": "a stream has a column `_finalized_until`: the [time before which it has all commits]"
    "(feeds.md#how-complete-a-stream-is)",
}

# The meaning of defaults that are not values.
_UNSET = {
    "consumer": "none",
    "startingOffsets": "`earliest`",
    "startingTimestamp": "",
    "maxRowsPerTrigger": "no limit",
    "maxRowsPerPartition": "no limit",
    "maxBytesPerTrigger": "no limit",
    "maxCommitsPerTrigger": "no limit",
    "appId": "the id in its checkpoint",
    "startingVersion": "all",
    "endingVersion": "all",
    "endingTimestamp": "all",
    "queue": "",
}
_UNSET_OF_CHANGES = {"startingTimestamp": "all"}
_FIELDS = {
    "includeMetadataColumns": "metadata_columns",
    "maxCommitsPerTrigger": "max_commits",
    "startingBoundInclusive": "starting_bound_inclusive",
}


def tables() -> dict[str, list[str]]:
    """Return the lines of each table, by its name on the page."""
    source, sink = _defaults(options.SourceOptions), _defaults(options.SinkOptions)
    feed = _defaults(changes.ReadOptions) | {
        "max_rows_per_trigger": None,
        "starting_bound_inclusive": True,
        "ending_bound_inclusive": True,
    }
    return {
        "both": _table(BOTH, source),
        "reading": _table(READING, source, batch=options.BATCH_SOURCE, stream=options.STREAM_SOURCE),
        "writing": _table(WRITING, sink, batch=options.BATCH_SINK, stream=options.STREAM_SINK),
        "changes": _table(CHANGES, feed, unset=_UNSET | _UNSET_OF_CHANGES),
    }


def public_options() -> dict[str, set[str]]:
    """Return the options that users can set according to the code, by the same names."""
    return {
        "both": set(options.COMMON),
        "reading": set(options.ANY_SOURCE) - set(options.COMMON) - INTERNAL,
        "writing": set(options.STREAM_SINK) - set(options.COMMON),
        "changes": set(changes.STREAM),
    }


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind)}


def _table(
    meanings: Mapping[str, str],
    defaults: Mapping[str, Any],
    *,
    batch: Iterable[str] = (),
    stream: Iterable[str] = (),
    unset: Mapping[str, str] = _UNSET,
) -> list[str]:
    has_modes = bool(batch)
    head = ["option", *(["batch", "stream"] if has_modes else []), "meaning", "default"]
    lines = [_row(head), "|---" * len(head) + "|"]
    for name, meaning in meanings.items():
        availability = ["yes" if name in batch else "", "yes" if name in stream else ""] if has_modes else []
        lines.append(_row([f"`{name}`", *availability, meaning, _default(name, defaults, unset)]))
    return lines


def _default(name: str, defaults: Mapping[str, Any], unset: Mapping[str, str]) -> str:
    field = _FIELDS.get(name) or re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name)
    value = defaults.get(field, None)
    if name == "url":
        return "required"
    if value is None or value is MISSING:
        return unset[name]
    return f"`{str(value).lower()}`"


def _row(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
