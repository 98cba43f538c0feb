"""Page sizes, chosen so that pages fit into memory however wide the rows are."""

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
    """The rows of the next page; at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows = min(most, _FIRST_ROWS)

    def read(self, size: int) -> None:
        """Note the size of the last page. Pages grow in steps, since the next rows may be wider."""
        fitting = self.rows * _PAGE_BYTES // (size + 1)
        self.rows = max(1, min(self._most, fitting, self.rows * _GROWTH))

    def parts(self, keys: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divide keys into pages; the size of each is noted before the next one."""
        first = 0
        while first < len(keys):
            rows = self.rows
            yield keys[first : first + rows]
            first += rows


def pages(read: Callable[[Bound | None, int], pa.Table], key: Sequence[str], rows: int) -> Iterator[pa.Table]:
    """Yield all rows of a table as text, in the order of its key.

    Parameters
    ----------
    read
        Returns the rows after a key, up to a number of them.
    rows
        The rows of a page at most.
    """
    after: Bound | None = None
    size = PageSize(rows)
    while True:
        count = size.rows
        texts = read(after, count)
        if texts.num_rows:
            after = tuple(texts[name][-1].as_py() for name in key)
            yield texts
        if texts.num_rows < count:
            return
        size.read(texts.nbytes)
