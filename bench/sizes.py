"""Cost of small micro-batches compared with large ones, from queue to queue, exactly once."""

from __future__ import annotations

import statistics
from pathlib import Path

import penstock
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch
from bench.streaming import run

LARGE = 500_000
SMALL = {1_000: 30, 10_000: 20, 100_000: 10}
"""Rows of a micro-batch, and the number of micro-batches."""


def sizes(url: str, name: str) -> list[Result]:
    """Measure the seconds for a million rows by the median micro-batch, without the first one."""
    with scratch() as folder:
        store_url = url.format(folder=folder)
        with penstock.connect(store_url) as store:
            seconds_by_size = {
                size: _seconds(store, store_url, folder, size, size * count) for size, count in SMALL.items()
            }
            large = _seconds(store, store_url, folder, LARGE, 4 * LARGE)
        return [_compare(size, seconds, large, name) for size, seconds in seconds_by_size.items()]


def _seconds(store: penstock.Store, url: str, folder: Path, size: int, total: int) -> float:
    queue = store.create_queue("in", SCHEMA, partitions=2)
    for partition in range(2):
        queue.append(rows(total).slice(partition * total // 2, total // 2), partition=partition)
    try:
        return run(store, url, folder / f"size-{size}", "exactly_once", size, statistics.median) * 1e6 / size
    finally:
        store.drop_queue("in", force=True)


def _compare(size: int, small: float, large: float, name: str) -> Result:
    note = f"{1e6 / small:,.0f} rows/s against {1e6 / large:,.0f}; {small * size / 1e6:.2f} s each"
    return Result(
        f"micro-batches of {size:,} / of {LARGE:,} rows, {name}",
        small,
        large,
        small / large,
        "none",
        True,
        note,
    )
