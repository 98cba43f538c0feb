"""Work that waits for a network, done in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 16
_END = object()


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Map a function over items in threads, since most of the time is spent waiting for the storage."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(work, items))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items; the next one is made in another thread while the caller uses this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-ahead") as pool:
        made = pool.submit(next, items, _END)
        while (item := made.result()) is not _END:
            made = pool.submit(next, items, _END)
            yield item  # type: ignore[misc]  # one of the items
