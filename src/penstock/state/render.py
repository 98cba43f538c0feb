"""A checkpoint's content as blocks of text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.errors import StateRefused
from penstock.limits.record import read_record
from penstock.state.files import Files
from penstock.state.layout import Layout, read_layout
from penstock.state.logs import CONTINUOUS, Batch, Source
from penstock.state.result import CheckpointState, StateOperator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.limits.progress import LimitProgress
    from penstock.state.result import StateOperator


_OFFSETS = ("source", "reads", "partition", "from", "to")
_PARTS = ("part", "keys", "values", "rows", "updated", "removed")
_STORES = ("store", "kind", "partitions", "bytes", "snapshot", "delta")
_NUMBERS = {"rows", "updated", "removed", "partitions", "partition", "bytes", "snapshot", "delta"}


@dataclass(frozen=True)
class Block:
    """A heading with pairs of names and texts, or with lines of cells under titles."""

    title: str
    pairs: tuple[tuple[str, str], ...] = ()
    titles: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()

    @property
    def right(self) -> frozenset[int]:
        """The columns of numbers."""
        return frozenset(place for place, title in enumerate(self.titles) if title in _NUMBERS)


def blocks(state: CheckpointState) -> Iterator[Block]:
    """All there is to show, part by part."""
    yield Block(f"checkpoint {state.location}", tuple(_about(state)))
    for batch in (state.committed, state.planned):
        if batch is not None and batch.sources:
            lines = tuple(line for source in batch.sources for line in _source_lines(source))
            yield Block(f"offsets of {_named(batch)}", titles=_OFFSETS, lines=lines)
    for operator in state.operators:
        yield from _operator(operator)
    untold = [("", text) for text in state.untold]
    untold += [("", f"operator {each.id}: {text}") for each in state.operators for text in each.untold]
    if untold:
        yield Block("not told", tuple(untold))


def _about(state: CheckpointState) -> Iterator[tuple[str, str]]:
    yield "query", state.query_id or "unknown"
    yield "engine", state.engine or "unknown"
    yield "last planned", _planned(state)
    committed = state.committed
    yield (
        "last committed",
        "none" if committed is None else f"{committed.id}, {moment(committed.committed_at)}",
    )
    yield "watermark", moment(state.watermark)
    if state.limit is not None:
        yield "limit", str(state.limit)
    if not state.operators:
        yield "state", "none"


def _planned(state: CheckpointState) -> str:
    batch = state.planned
    if batch is None:
        return "none" if state.committed is None else str(state.committed.id)
    return f"{batch.id}, not committed: the query runs it now, or ended in it and begins with it again"


def _named(batch: Batch) -> str:
    what = "epoch" if batch.engine == CONTINUOUS else "batch"
    return f"{what} {batch.id}" + ("" if batch.committed else ", not committed")


def _source_lines(source: Source) -> Iterator[tuple[str, ...]]:
    name, queue = source.name or str(source.position), source.queue
    if queue is not None:
        consumer = f", consumer {queue.consumer}" if queue.consumer else ""
        about = (name, f"queue {queue.queue}{consumer}")
        for partition, (start, end) in enumerate(zip(queue.start, queue.end, strict=True)):
            yield (*(about if partition == 0 else ("", "")), str(partition), str(start), str(end))
    elif source.kind == "feed":
        ends = (_plain(source.offset[key]) for key in ("from", "to"))
        yield (name, f"feed {source.offset['feed']}", "", *ends)
    else:
        yield (name, "", "", "", _plain(source.offset))


def _plain(offset: object) -> str:
    if offset is None:
        return "nothing yet"
    return offset if isinstance(offset, str) else json.dumps(offset, ensure_ascii=False)


def _operator(operator: StateOperator) -> Iterator[Block]:
    parts = tuple(
        (
            part.name,
            part.keys or "?",
            part.values or "?",
            *map(_count, (part.rows, part.updated, part.removed)),
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
    changed = f"{_count(operator.updated)} updated, {_count(operator.removed)} removed by the last batch"
    yield Block(f"{name}: {_count(operator.rows)} rows ({changed})", titles=_PARTS, lines=parts)
    where = f"operator {operator.id}'s files: {operator.bytes:,} bytes, written {moment(operator.written_at)}"
    yield Block(where, titles=_STORES, lines=stores)


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def moment(found: datetime | None) -> str:
    """An instant in UTC."""
    if found is None:
        return "none"
    milliseconds = f".{found.microsecond // 1000:03}" if found.microsecond else ""
    return f"{found:%Y-%m-%d %H:%M:%S}{milliseconds} UTC"


def text(state: CheckpointState) -> str:
    """Blocks of lines, in columns of one width."""
    return "\n\n".join("\n".join([block.title, *_text_lines(block)]) for block in blocks(state))


def _text_lines(block: Block) -> list[str]:
    table: Sequence[Sequence[str]] = [block.titles, *block.lines] if block.titles else block.pairs
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [_padded(line, widths, block.right) for line in table]


def _padded(line: Sequence[str], widths: Sequence[int], right: frozenset[int]) -> str:
    cells = [
        cell.rjust(width) if place in right else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        if width
    ]
    return "  " + "  ".join(cells).rstrip()


# ---- showing: What a checkpoint holds, told without starting the query.


def show(spark: SparkSession | None, checkpoint: str | os.PathLike[str]) -> CheckpointState:
    """What the checkpoint of a streaming query holds: batches, watermarks, offsets and stateful operators.

    Nothing is started and nothing is written. It takes checkpoints of micro-batches and of continuous queries, whole or as a crash
    left them, also while the query runs.

    Parameters
    ----------
    spark
        A session. Spark reads all of the state, in one job, for its columns and its rows as of the last committed batch; with None they
        are left out, files are listed and small ones are read.
    checkpoint
        The query's ``checkpointLocation``: a path, or the URL of a file system that Python and Spark both reach.

    Raises
    ------
    CheckpointNotFound
        When there is no checkpoint.
    StateRefused
        When it cannot be reached.
    """
    layout = read_layout(Files(checkpoint))
    operators, untold = _counted(spark, layout)
    limit, why = _limit(spark, layout.files)
    logs = layout.logs
    return CheckpointState(
        layout.files.shown,
        logs.query_id,
        logs.committed,
        logs.planned,
        operators,
        limit,
        (*logs.untold, *untold, *why),
    )


def _limit(spark: SparkSession | None, files: Files) -> tuple[LimitProgress | None, tuple[str, ...]]:
    try:
        if read_record(files.checkpoint) is None:
            return None, ()
        # Late: it imports Spark, and queries without a limit do without.
        from penstock.limits.progress import limit_progress

        return limit_progress(files.location, spark=spark), ()
    except (StateRefused, OSError, ValueError, KeyError) as error:
        return None, (f"how far the limit has come: {error}",)


def _counted(spark: SparkSession | None, layout: Layout) -> tuple[tuple[StateOperator, ...], tuple[str, ...]]:
    if not layout.operators:
        return (), ()
    if spark is None:
        return layout.operators, ("columns and rows of the state: Spark reads them, and there is no session",)
    if not layout.logs.batches:
        why = "no batch is committed, and Spark reads the state of one"
        return layout.operators, (f"columns and rows of the state: {why}",)
    from penstock.state.counting import counted

    return counted(spark, layout, layout.logs.batches[-1]), ()
