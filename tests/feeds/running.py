"""A query that runs while a table changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_VERSION
from penstock.feeds.protocol import OpenFeed
from tests.support.feed_reading import batches_of, passed

Row = dict[Hashable, Any]
_START_AGAIN = ("FEED_UNAVAILABLE.SCHEMA_CHANGED", "FEED_UNAVAILABLE.ROWS_OVERWRITTEN")
"""Refusals that a start with the table's present columns mends."""


class RunningQuery:
    """It keeps a copy of the table; each start plans it with the columns of that moment.

    It is started again when it is refused because it was planned before a change.

    Parameters
    ----------
    open_feed
        Opens the feed at each start.
    columns
        Identifies the columns of that start by more than their names, which may change.
    key
        The column that is the table's key.
    position
        The version after which it reads.
    """

    def __init__(
        self,
        open_feed: Callable[[], OpenFeed],
        columns: Callable[[Sequence[str]], Sequence[Hashable]],
        key: Hashable,
        position: int,
    ) -> None:
        self._open_feed, self._columns, self._key = open_feed, columns, key
        self.position = position
        self.copy: dict[object, Row] = {}
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._feed = self._open_feed()
        self._schema = self._feed.describe().planned_schema
        self.columns = self._columns(self._schema.names[:-3])
        self._planned_at = self._feed.newest(self.position)

    def read(self) -> list[int]:
        """Read up to the newest version; what goes has to be in the copy, and what comes must not.

        Returns the versions with changes that are newer than the query's plan.
        """
        upto = self._feed.newest(self.position)
        try:
            found = list(self._changes(upto))
        except FeedUnavailableError as error:
            if error.condition not in _START_AGAIN:
                raise
            self._start()
            found = list(self._changes(upto))
        for _, removed, added in found:
            for row in removed:
                held = self.copy.pop(row[self._key])
                assert {column: held.get(column) for column in row} == row
            for row in added:
                assert row[self._key] not in self.copy
                self.copy[row[self._key]] = row
        self.position = upto
        return [version for version, *_ in found if version > self._planned_at]

    def _changes(self, upto: int) -> Iterator[tuple[int, list[Row], list[Row]]]:
        rows = passed(
            self._feed,
            pa.Table.from_batches(batches_of(self._feed, self.position, upto, self._schema), self._schema),
            updates=True,
        )
        for version in sorted(set(rows[COMMIT_VERSION].to_pylist())):
            here = rows.filter(pc.equal(rows[COMMIT_VERSION], version))
            values = zip(*(here[place].to_pylist() for place in range(len(self.columns))), strict=True)
            removed, added = [], []
            for kind, row in zip(here[CHANGE_TYPE].to_pylist(), values, strict=True):
                to = removed if kind in ("delete", "update_preimage") else added
                to.append(dict(zip(self.columns, row, strict=True)))
            yield version, removed, added

    def check(self, columns: Collection[Hashable], rows: Iterable[Row]) -> None:
        """Compare the copy with the rows and columns that the table has at its position.

        A version without changes of rows may have dropped a column that the copy still has.
        """
        common = [column for column in self.columns if column in columns]

        def projected(rows: Iterable[Row]) -> dict[object, list[object]]:
            return {row[self._key]: [row.get(column) for column in common] for row in rows}

        assert projected(self.copy.values()) == projected(rows), self.position
