"""Rendering of batches and operators of a checkpoint as blocks of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.state.logs import CONTINUOUS, Batch, Source
from penstock.state.operators import StateOperator

_OFFSETS = ("source", "reads", "partition", "from", "to")
_PARTS = ("part", "keys", "values", "rows", "updated", "removed")
_STORES = ("store", "kind", "partitions", "bytes", "snapshot", "delta")
_NUMBERS = {"rows", "updated", "removed", "partitions", "partition", "bytes", "snapshot", "delta"}


@dataclass(frozen=True)
class Block:
    """A heading with name and text pairs, or with a table."""

    title: str
    pairs: tuple[tuple[str, str], ...] = ()
    titles: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()

    @property
    def right(self) -> frozenset[int]:
        """The places of numeric columns, which are aligned to the right."""
        return frozenset(place for place, title in enumerate(self.titles) if title in _NUMBERS)


def offsets_block(batch: Batch) -> Block:
    """Return the offsets of a batch or epoch, by source."""
    kind = "epoch" if batch.engine == CONTINUOUS else "batch"
    title = f"offsets of {kind} {batch.id}" + ("" if batch.committed else ", not committed")
    lines = tuple(line for source in batch.sources for line in _source_lines(source))
    return Block(title, titles=_OFFSETS, lines=lines)


def _source_lines(source: Source) -> Iterator[tuple[str, ...]]:
    name, queue = source.name or str(source.position), source.queue
    if queue is not None:
        consumer = f", consumer {queue.consumer}" if queue.consumer else ""
        described = (name, f"queue {queue.queue}{consumer}")
        for partition, (start, end) in enumerate(zip(queue.start, queue.end, strict=True)):
            yield (*(described if partition == 0 else ("", "")), str(partition), str(start), str(end))
    elif source.kind == "feed" and isinstance(source.offset, dict):
        ends = (_plain(source.offset[key]) for key in ("from", "to"))
        yield (name, f"feed {source.offset['feed']}", "", *ends)
    else:
        yield (name, "", "", "", _plain(source.offset))


def _plain(offset: object) -> str:
    if offset is None:
        return "nothing yet"
    return offset if isinstance(offset, str) else json.dumps(offset, ensure_ascii=False)


def operator_blocks(operator: StateOperator) -> Iterator[Block]:
    """Return an operator's parts, and its stores."""
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
    files = f"operator {operator.id}'s files: {operator.bytes:,} bytes, written {moment(operator.written_at)}"
    yield Block(files, titles=_STORES, lines=stores)


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def moment(instant: datetime | None) -> str:
    """Format an instant in UTC."""
    if instant is None:
        return "none"
    milliseconds = f".{instant.microsecond // 1000:03}" if instant.microsecond else ""
    return f"{instant:%Y-%m-%d %H:%M:%S}{milliseconds} UTC"


def text(blocks: Iterable[Block]) -> str:
    """Format blocks as lines with aligned columns."""
    return "\n\n".join("\n".join([block.title, *_text_lines(block)]) for block in blocks)


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
