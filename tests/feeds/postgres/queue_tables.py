"""The tables that the rows in the queues of a pump make, after each commit."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.feeds.protocol import METADATA_NAMES
from penstock.feeds.queue_feed import QueueFeed
from tests.feeds.postgres.changing_tables import plain
from tests.support.feed_reading import batches_of
from tests.support.postgres_source import Row, apply


@dataclass
class QueueTable:
    """The table of one queue."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    rows: list[Row]
    """The change rows of its commits, in the order of the queue."""
    state: dict[object, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, store_url: str, queue: str) -> QueueTable:
        feed = QueueFeed(queue, store_url).open()
        found = feed.describe()
        assert found.contract is not None
        columns = tuple(name for name in found.schema.names if name not in METADATA_NAMES)
        batches = batches_of(feed, -1, feed.newest(-1), found.schema)
        rows = [
            {name: plain(value) for name, value in row.items()}
            for batch in batches
            for row in batch.to_pylist()
        ]
        columns = tuple(name for name in columns if not name.startswith("_"))
        return cls(columns, tuple(found.contract.row_id), rows)


def place_of(row: Row) -> tuple[int, int]:
    """A row's place in the log."""
    return row["_commit_version"], row["_commit_sequence"]


def read_tables(store_url: str, queues: Mapping[str, str], *, ordered: bool) -> dict[str, QueueTable]:
    """Read queues by table; no row is there twice, and rows of each queue are in the order of the log.

    Parameters
    ----------
    ordered
        Whether queues have one partition, in which the order shows.
    """
    tables = {name: QueueTable.read(store_url, queue) for name, queue in queues.items()}
    places: set[tuple[int, int]] = set()
    for name, table in tables.items():
        mine = [place_of(row) for row in table.rows]
        assert not ordered or mine == sorted(mine), f"{name}: rows are not in the order of the log"
        assert len(set(mine)) == len(mine), f"{name}: rows are repeated"
        assert places.isdisjoint(mine), f"{name}: rows have the places of another table's"
        places.update(mine)
    return tables


def require_whole_commits(tables: Mapping[str, QueueTable]) -> None:
    """Require that each commit has all of its rows: their numbers have no gaps."""
    rows = sorted(place_of(row) for table in tables.values() for row in table.rows)
    for version, places in itertools.groupby(rows, lambda place: place[0]):
        numbers = [number for _, number in places]
        assert numbers == list(range(len(numbers))), f"commit {version} lacks rows: {numbers}"


def played(tables: Mapping[str, QueueTable], unchecked: Collection[str]) -> Iterator[int]:
    """Apply the commits to the tables in their order; yield each commit after it is applied."""
    commits: dict[int, dict[str, list[Row]]] = {}
    for name, table in tables.items():
        for row in sorted(table.rows, key=place_of):
            commits.setdefault(row["_commit_version"], {}).setdefault(name, []).append(row)
    for version in sorted(commits):
        for name, rows in commits[version].items():
            table = tables[name]
            apply(rows, table.key, table.columns, table.state, unchecked)
        yield version
