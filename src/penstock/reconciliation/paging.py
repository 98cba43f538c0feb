"""How many rows a page has, so that it fits into memory however wide they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

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
        """Note the bytes of the last page. The rows of the next one may be wider: it grows in steps."""
        fitting = self.rows * _PAGE_BYTES // (size + 1)
        self.rows = max(1, min(self._most, fitting, self.rows * _GROWTH))

    def parts(self, keys: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divide keys into pages; the size of each is noted before the next one."""
        first = 0
        while first < len(keys):
            rows = self.rows
            yield keys[first : first + rows]
            first += rows
