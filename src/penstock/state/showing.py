"""``state.show``: read a checkpoint without starting its query, and show it with ``print``, in notebooks and
as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from penstock.arrow.row_text import align_columns
from penstock.errors import CommitRefusedError, StateRefusedError
from penstock.json_text import Json
from penstock.limits.record import read_record
from penstock.state.logs import CONTINUOUS, Batch, CheckpointFiles, Source, plain_fields
from penstock.state.operators import Layout, StateOperator, read_layout

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.limits.progress import LimitProgress

_OFFSETS = ("source", "reads", "partition", "from", "to")
_PARTS = ("part", "keys", "values", "rows", "updated", "removed")
_STORES = ("store", "kind", "partitions", "bytes", "snapshot", "delta")
_NUMBERS = {"rows", "updated", "removed", "partitions", "partition", "bytes", "snapshot", "delta"}


@dataclass(frozen=True)
class Block:
    """A heading with pairs of name and text, or with a table."""

    title: str
    pairs: tuple[tuple[str, str], ...] = ()
    titles: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()

    @property
    def right(self) -> frozenset[int]:
        """The positions of numeric columns, which are right-aligned."""
        return frozenset(position for position, title in enumerate(self.titles) if title in _NUMBERS)

    def __str__(self) -> str:
        table = [self.titles, *self.lines] if self.titles else self.pairs
        return "\n".join([self.title, *align_columns(table, self.right)])


def offsets_block(batch: Batch) -> Block:
    """Return the offsets of a batch or epoch as a block, by source."""
    kind = "epoch" if batch.engine == CONTINUOUS else "batch"
    title = f"offsets of {kind} {batch.id}" + ("" if batch.committed else ", not committed")
    lines = tuple(line for source in batch.sources for line in _source_lines(source))
    return Block(title, titles=_OFFSETS, lines=lines)


def _source_lines(source: Source) -> Iterator[tuple[str, ...]]:
    name, queue, feed = source.name or str(source.position), source.queue, source.feed
    if queue is not None:
        consumer = f", consumer {queue.consumer}" if queue.consumer else ""
        source_columns = (name, f"queue {queue.queue}{consumer}")
        for partition, (start, end) in enumerate(zip(queue.start, queue.end, strict=True)):
            yield (*(source_columns if partition == 0 else ("", "")), str(partition), str(start), str(end))
    elif feed is not None:
        yield (name, f"feed {feed[0]}", "", *map(_offset_text, feed[1:]))
    elif source.starts is not None:
        yield (name, "no data: added by the pipeline, counts the query's starts", "", "", str(source.starts))
    else:
        yield (name, "", "", "", _offset_text(source.offset))


def _offset_text(offset: object) -> str:
    if offset is None:
        return "nothing yet"
    return offset if isinstance(offset, str) else json.dumps(offset, ensure_ascii=False)


def operator_blocks(operator: StateOperator) -> Iterator[Block]:
    """Yield the blocks of an operator's parts and of its stores."""
    parts = tuple(
        (
            part.name,
            *("?" if columns is None else columns or "none" for columns in (part.keys, part.values)),
            *map(_count_text, (part.rows, part.updated, part.removed)),
        )
        for part in operator.parts
    )
    stores = tuple(
        (
            store.name,
            store.kind or "?",
            str(store.partitions),
            f"{store.bytes:,}",
            *("" if batch is None else str(batch) for batch in (store.newest_snapshot, store.newest_delta)),
        )
        for store in operator.stores
    )
    name = f"operator {operator.id}, {operator.name or 'of unknown name'}"
    changed = (
        f"{_count_text(operator.updated)} updated, {_count_text(operator.removed)} removed by the last batch"
    )
    yield Block(f"{name}: {_count_text(operator.rows)} rows ({changed})", titles=_PARTS, lines=parts)
    files = (
        f"operator {operator.id}'s files: {operator.bytes:,} bytes, "
        f"written {instant_text(operator.written_at)}"
    )
    yield Block(files, titles=_STORES, lines=stores)


def _count_text(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def instant_text(instant: datetime | None) -> str:
    """Format an instant in UTC."""
    if instant is None:
        return "none"
    milliseconds = f".{instant.microsecond // 1000:03}" if instant.microsecond else ""
    return f"{instant:%Y-%m-%d %H:%M:%S}{milliseconds} UTC"


def show(spark: SparkSession | None, checkpoint: str | os.PathLike[str]) -> CheckpointState:
    """Show what a streaming query's checkpoint contains: batches, watermarks, offsets and stateful operators.

    This starts no query and writes nothing. The checkpoint may be from micro-batches or from a continuous
    query. A crash may have left it incomplete, and the query may be running.

    Parameters
    ----------
    spark
        A session. Spark reads the whole state in one job, to show its columns and row counts after the last
        committed batch. With None these are left out, and Penstock only lists the files and reads small ones.
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both
        reach.

    Raises
    ------
    CheckpointNotFoundError
        When there is no checkpoint.
    StateRefusedError
        When the checkpoint cannot be reached.
    """
    layout = read_layout(checkpoint)
    operators, uncounted = _with_row_counts(spark, layout)
    limit, limit_unknown = _limit(spark, layout.files)
    logs = layout.logs
    return CheckpointState(
        layout.files.label,
        logs.query_id,
        logs.committed,
        logs.planned,
        operators,
        limit,
        (*logs.unknown, *uncounted, *limit_unknown),
    )


def _limit(
    spark: SparkSession | None, files: CheckpointFiles
) -> tuple[LimitProgress | None, tuple[str, ...]]:
    try:
        if read_record(files.checkpoint) is None:
            return None, ()
        # Import this only here because it imports Spark, which queries without a limit do not need.
        from penstock.limits.progress import limit_progress

        return limit_progress(files.location, spark=spark), ()
    except (StateRefusedError, CommitRefusedError, OSError, ValueError, KeyError) as error:
        return None, (f"progress of the limit: {error}",)


def _with_row_counts(
    spark: SparkSession | None, layout: Layout
) -> tuple[tuple[StateOperator, ...], tuple[str, ...]]:
    if not layout.operators:
        return (), ()
    if spark is None:
        return layout.operators, ("columns and rows of the state: reading them needs a Spark session",)
    if not layout.logs.batches:
        reason = "Spark reads the state of a committed batch, and there is none"
        return layout.operators, (f"columns and rows of the state: {reason}",)
    from penstock.state.reading import count_rows

    return count_rows(spark, layout, layout.logs.batches[-1]), ()


@dataclass(frozen=True, repr=False)
class CheckpointState:
    """The content of a streaming query's checkpoint. ``print`` and notebooks show it as text."""

    location: str
    """The location, without secrets."""
    query_id: str | None
    """The query's id, which is the same in all runs; None if the file with the id is missing."""
    committed: Batch | None
    """The last committed batch."""
    planned: Batch | None
    """A later batch that is planned but not committed. Either it is in flight, or the query ended during it
    and will repeat it.
    """
    operators: tuple[StateOperator, ...] = ()
    limit: LimitProgress | None = None
    """The progress of a pipeline's limit; None if the query has no limit."""
    unknown: tuple[str, ...] = ()
    """What is unknown, and why."""

    @property
    def engine(self) -> str | None:
        """The engine of the last batch: ``micro-batch`` or ``continuous``. None if the files do not show
        it.
        """
        last = self.planned or self.committed
        return None if last is None else last.engine

    @property
    def last_planned(self) -> int | None:
        """The id of the last batch or epoch whose offsets are logged."""
        last = self.planned or self.committed
        return None if last is None else last.id

    @property
    def last_committed(self) -> int | None:
        """The id of the last batch or epoch that is committed."""
        return None if self.committed is None else self.committed.id

    @property
    def watermark(self) -> datetime | None:
        """The watermark of the planned batch; if there is none, that of the next batch."""
        if self.planned is not None:
            return self.planned.watermark
        return None if self.committed is None else self.committed.next_watermark

    def to_dict(self) -> Json:
        """Return all fields as JSON values, with times as text in UTC. Future versions may add keys, but will
        not rename or remove any.
        """
        query = ("location", "query_id", "engine", "last_planned", "last_committed", "watermark")
        return plain_fields(self, *query, "committed", "planned", "limit", "operators", "unknown")

    def __repr__(self) -> str:
        summary = {"query_id": self.query_id, "committed": self.last_committed, "planned": self.last_planned}
        summary_text = "".join(f", {name}={value!r}" for name, value in summary.items())
        return f"CheckpointState({self.location!r}{summary_text}, operators={len(self.operators)})"

    def __str__(self) -> str:
        return "\n\n".join(map(str, blocks(self)))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def blocks(state: CheckpointState) -> Iterator[Block]:
    """Yield the blocks that show a checkpoint's content."""
    yield Block(f"checkpoint {state.location}", tuple(_summary(state)))
    for batch in (state.committed, state.planned):
        if batch is not None and batch.sources:
            yield offsets_block(batch)
    for operator in state.operators:
        yield from operator_blocks(operator)
    unknown = [("", reason) for reason in state.unknown]
    unknown += [
        ("", f"operator {operator.id}: {reason}")
        for operator in state.operators
        for reason in operator.unknown
    ]
    if unknown:
        yield Block("unknown", tuple(unknown))


def _summary(state: CheckpointState) -> Iterator[tuple[str, str]]:
    yield "query", state.query_id or "unknown"
    yield "engine", state.engine or "unknown"
    yield "last planned", _planned(state)
    committed = state.committed
    yield (
        "last committed",
        "none" if committed is None else f"{committed.id}, {instant_text(committed.committed_at)}",
    )
    yield "watermark", instant_text(state.watermark)
    if state.limit is not None:
        yield "limit", str(state.limit)
    if not state.operators:
        yield "state", "none"


def _planned(state: CheckpointState) -> str:
    batch = state.planned
    if batch is None:
        return "none" if state.committed is None else str(state.committed.id)
    return (
        f"{batch.id}, not committed: it is in flight, or the query ended and will repeat it when it resumes"
    )
