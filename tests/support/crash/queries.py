"""Queries for crash tests: their sources, transformations and expected rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Row = tuple[Any, ...]
SOURCE = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("ts", pa.timestamp("us", tz="UTC"))])
START = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW = 10
CHUNK_ROWS = 60
PARTITIONS = 2


def chunk(number: int, source: int = 0) -> list[dict[str, Any]]:
    """Return the rows of one append. Later chunks have later times, in other windows."""
    first = number * CHUNK_ROWS
    return [
        {"id": i, "k": (i + source) % 3, "ts": START + timedelta(seconds=number * 3 * WINDOW + i % WINDOW)}
        for i in range(first, first + CHUNK_ROWS)
    ]


@dataclass(frozen=True)
class QueryKind:
    """Kind of query."""

    name: str
    transform: Callable[[Sequence[DataFrame]], DataFrame]
    output: pa.Schema
    expected: Callable[[int], Counter[Row]]
    """Returns the output for a number of chunks in each source."""
    sources: int = 1
    no_data: bool = False
    """Whether a micro-batch without new rows follows each one with rows."""
    stateful: bool = True
    bounded: bool = True
    """Whether the watermark bounds its state. Other queries must be started without a check."""


def _even(frames: Sequence[DataFrame]) -> DataFrame:
    return frames[0].where("id % 2 = 0").selectExpr("id", "k * 10 as v")


def _even_rows(chunks: int) -> Counter[Row]:
    return Counter(
        (row["id"], row["k"] * 10) for n in range(chunks) for row in chunk(n) if row["id"] % 2 == 0
    )


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    first, second = frames
    return first.selectExpr("id", "k * 10 as v").union(second.selectExpr("-id - 1 as id", "k * 10 as v"))


def _union_rows(chunks: int) -> Counter[Row]:
    first = Counter((row["id"], row["k"] * 10) for n in range(chunks) for row in chunk(n))
    second = Counter((-row["id"] - 1, row["k"] * 10) for n in range(chunks) for row in chunk(n, 1))
    return first + second


def _windows(frames: Sequence[DataFrame]) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    counted = (
        frames[0]
        .withWatermark("ts", "0 seconds")
        .groupBy(F.window("ts", f"{WINDOW} seconds").alias("w"), "k")
        .agg(F.count("*").alias("n"), F.sum("id").alias("total"))
    )
    return counted.select(F.col("w.start").alias("start"), "k", "n", "total")


def _window_rows(chunks: int) -> Counter[Row]:
    """Return the windows that are closed at the last row's time: all but those of the last chunk."""
    sums: dict[tuple[datetime, int], list[int]] = {}
    for n in range(chunks):
        for row in chunk(n):
            start = START + timedelta(seconds=n * 3 * WINDOW)
            sums.setdefault((start, row["k"]), []).append(row["id"])
    closed = START + timedelta(seconds=(chunks - 1) * 3 * WINDOW)
    return Counter((start, k, len(ids), sum(ids)) for (start, k), ids in sums.items() if start < closed)


def _running(frames: Sequence[DataFrame]) -> DataFrame:
    """Compute running totals. Each micro-batch emits a row for each key, and state is never removed."""
    import pandas as pd

    def totals(key: Any, groups: Any, state: Any) -> Any:
        n, total = state.get if state.exists else (0, 0)
        for frame in groups:
            n, total = n + len(frame), total + int(frame["id"].sum())
        state.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})

    grouped = frames[0].groupBy("k")
    return grouped.applyInPandasWithState(
        totals, "k bigint, n bigint, total bigint", "n bigint, total bigint", "append", "NoTimeout"
    )


def _running_rows(chunks: int) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    for chunk_count in range(1, chunks + 1):
        for k in range(3):
            ids = [row["id"] for n in range(chunk_count) for row in chunk(n) if row["k"] == k]
            rows[k, len(ids), sum(ids)] += 1
    return rows


def _stream_join(frames: Sequence[DataFrame]) -> DataFrame:
    """Join half of each chunk with rows of the previous chunk, which are only in the state."""
    first, second = frames
    other = second.selectExpr(f"id - {CHUNK_ROWS // 2} as other", "k as v")
    return first.where("id % 2 = 0").join(other, first.id == other.other).selectExpr("id", "v * 10 as v")


def _stream_join_rows(chunks: int) -> Counter[Row]:
    values = {row["id"] - CHUNK_ROWS // 2: row["k"] * 10 for n in range(chunks) for row in chunk(n, 1)}
    ids = [row["id"] for n in range(chunks) for row in chunk(n) if row["id"] % 2 == 0]
    return Counter((i, values[i]) for i in ids if i in values)


def _static_join(frames: Sequence[DataFrame]) -> DataFrame:
    spark = frames[0].sparkSession
    names = spark.createDataFrame([(0, 100), (1, 200)], "k bigint, v bigint")
    return frames[0].join(names, "k").select("id", "v")


def _static_join_rows(chunks: int) -> Counter[Row]:
    values = {0: 100, 1: 200}
    return Counter(
        (row["id"], values[row["k"]]) for n in range(chunks) for row in chunk(n) if row["k"] in values
    )


_PAIR = pa.schema([("id", pa.int64()), ("v", pa.int64())])
_TOTALS = [("k", pa.int64()), ("n", pa.int64()), ("total", pa.int64())]

KINDS = {
    kind.name: kind
    for kind in (
        QueryKind("stateless", _even, _PAIR, _even_rows, stateful=False),
        QueryKind("union", _union, _PAIR, _union_rows, sources=2, stateful=False),
        QueryKind("static_join", _static_join, _PAIR, _static_join_rows, stateful=False),
        QueryKind("aggregate", _running, pa.schema(_TOTALS), _running_rows),
        QueryKind(
            "watermark",
            _windows,
            pa.schema([("start", pa.timestamp("us", tz="UTC")), *_TOTALS]),
            _window_rows,
            no_data=True,
        ),
        QueryKind("stream_join", _stream_join, _PAIR, _stream_join_rows, sources=2, bounded=False),
    )
}
