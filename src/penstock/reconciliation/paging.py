"""Reading in pages, whose size is chosen so that they fit into memory even if rows are wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from penstock.reconciliation.postgres_sql import Bound

T = TypeVar("T")

_PAGE_BYTES = 16 << 20
_FIRST_ROWS = 100
_GROWTH = 8


class PageSize:
    """The number of rows of the next page; at most ``max_rows``."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.rows = min(max_rows, _FIRST_ROWS)

    def record_bytes(self, size: int) -> None:
        """Record the size of the last page. Pages grow gradually, because the next rows may be wider."""
        fitting_rows = self.rows * _PAGE_BYTES // (size + 1)
        self.rows = max(1, min(self._max_rows, fitting_rows, self.rows * _GROWTH))

    def parts(self, keys: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divide keys into pages; record the size of each page before the next one is taken."""
        first = 0
        while first < len(keys):
            rows = self.rows
            yield keys[first : first + rows]
            first += rows


def pages(read: Callable[[Bound | None, int], pa.Table], key: Sequence[str], rows: int) -> Iterator[pa.Table]:
    """Yield all rows of a table as text, in key order.

    Parameters
    ----------
    read
        Returns rows after a key, up to a number of rows.
    rows
        The maximum number of rows of a page.
    """
    after: Bound | None = None
    page_size = PageSize(rows)
    while True:
        limit = page_size.rows
        texts = read(after, limit)
        if texts.num_rows:
            after = tuple(texts[name][-1].as_py() for name in key)
            yield texts
        if texts.num_rows < limit:
            return
        page_size.record_bytes(texts.nbytes)
