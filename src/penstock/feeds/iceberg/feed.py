"""An Apache Iceberg table as a change feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.arguments import column_names, require
from penstock.arrow.schema import canonical_schema
from penstock.errors import FeedUnavailable
from penstock.extras import load, missing
from penstock.feeds.contract import ChangeContract
from penstock.feeds.iceberg import scan
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    Commit,
    Description,
    begins_late,
    check_reserved,
    check_there,
)
from penstock.feeds.urls import FeedUrl, pairs, prefixed
from penstock.queue.checks import check_name

if TYPE_CHECKING:
    from penstock.feeds.iceberg.open_table import Opened

_PROPERTY = "property."


@dataclass(frozen=True)
class IcebergFeed:
    """The changes of an Iceberg table of format 2 or 3: what each snapshot of its main branch added and removed.

    A commit is a snapshot: its version is the sequence number, its time the snapshot's. Rows of added files are inserts, rows
    of removed files and of positions that were deleted are deletes. A table that is written copy-on-write gives rows that did
    not change as a delete and an insert, which the passes take out again; compactions give nothing.

    The columns are those of the table when the query starts, for its older files too: Iceberg follows a column by its id through
    renames, wider types and defaults. Where rows are told apart by the row lineage of format 3, its two columns come after them:
    ``_row_id``, a number that a row keeps through updates and compactions, and ``_last_updated_sequence_number``, the version
    that last updated it. Versions from before the table had that format are then not part of the feed.

    Parameters
    ----------
    table
        The table with its namespace, as in ``shop.orders``.
    catalog
        The catalog's name; what the properties leave out, pyiceberg looks up under it in its own configuration.
    properties
        The catalog's properties, such as ``{"uri": …, "warehouse": …}``. They may hold credentials.
    row_id
        The columns that tell rows apart. By default they are told apart by the row lineage of a table of format 3, else by the
        table's identifier fields. Where it has neither, by all their columns, but for maps: carry-overs are found then, updates
        are not. Give the columns for a table of format 3 with a writer that does not keep the row lineage of rows it rewrites.
    """

    table: str
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    row_id: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        columns = column_names("row_id", self.row_id or ())
        object.__setattr__(self, "row_id", columns or None)
        check_name("table", self.table)
        check_name("catalog", self.catalog)
        require("properties", self.properties, Mapping, "a mapping such as {'uri': 'http://localhost:8181'}")
        object.__setattr__(self, "properties", {name: str(value) for name, value in self.properties.items()})

    @property
    def url(self) -> str:
        catalog = None if self.catalog == "default" else self.catalog
        given = pairs(catalog=catalog, row_id=self.row_id)
        return str(FeedUrl("iceberg", self.table, (*given, *prefixed(_PROPERTY, self.properties))))

    @property
    def name(self) -> str:
        return f"Iceberg table {self.table!r}"

    @classmethod
    def from_url(cls, url: str) -> IcebergFeed:
        """The feed of ``iceberg:namespace.table?catalog=NAME&property.uri=…&property.warehouse=…&row_id=COLUMN``."""
        parts = FeedUrl.of(url)
        parts.require_known(["catalog", "row_id"], (_PROPERTY,))
        return cls(
            parts.target, parts.one("catalog") or "default", parts.prefixed(_PROPERTY), parts.given("row_id")
        )

    def describe(self) -> Description:
        opened = self._opened()
        opened.describe_anew()
        data = canonical_schema(opened.arrow_schema())
        by_lineage = self._by_lineage()
        check_reserved(data, self.name, scan.NAMES if by_lineage else ())
        identifiers = () if by_lineage else opened.identifier_columns()
        contract = ChangeContract(
            row_id=scan.ROW_ID if by_lineage else self._row_id(data, identifiers),
            row_version=scan.UPDATED if by_lineage else None,
            nullable_row_id=not (by_lineage or self.row_id or identifiers),
            carryover_rows=True,
            updates_as_delete_and_insert=True,
            intermediate_changes=True,
            whole_commits=True,
        )
        columns = [*data, *(scan.FIELDS if by_lineage else ()), *METADATA_FIELDS]
        return Description(
            f"iceberg:{opened.uuid()}", pa.schema(columns), contract, opened.planned().to_json()
        )

    def begin(self) -> int:
        """The table's first commit; refused where that cannot be read any more, since a new query would miss its rows."""
        oldest = self.oldest()
        if oldest > 0:
            raise begins_late(self.name, oldest + 1)
        return oldest

    def oldest(self) -> int:
        history = self._opened().refreshed()
        return history.oldest_with_lineage if self._by_lineage() else history.oldest

    def newest(self, after: int) -> int:
        return self._opened().refreshed().newest(after)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        for snapshot in self._opened().history(upto).between(after, upto):
            yield Commit(snapshot.version, snapshot.timestamp, snapshot.rows)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Any]:
        return self._opened().tasks(after, upto, rows_per_task, by_lineage=self._by_lineage())

    def read(self, task: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from penstock.feeds.iceberg.scan import rows

        return rows(task, schema)

    def commit_name(self, version: int) -> str | None:
        """The snapshot's id."""
        snapshot = self._opened().history(version).chain.get(version)
        return None if snapshot is None else str(snapshot.snapshot_id)

    def logged(self, upto: int) -> None:
        """Nothing is kept for a reader in Iceberg; but from here on a history without that commit is another history."""
        self._opened().logged = upto

    def _opened(self) -> Opened:
        found: Opened | None = self.__dict__.get("_catalog")
        if found is None:
            if find_spec("pyiceberg") is None:
                raise missing("pyiceberg", "the feed of an Iceberg table")
            made = load("penstock.feeds.iceberg.open_table", "Opened", "the feed of an Iceberg table")
            found = made(self.name, self.table, self.catalog, self.properties)
            object.__setattr__(self, "_catalog", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Without what is open: it belongs to its process.
        return {name: value for name, value in self.__dict__.items() if name != "_catalog"}

    def _by_lineage(self) -> bool:
        return self.row_id in (None, (scan.ROW_ID,)) and self._opened().has_lineage()

    def _row_id(self, data: pa.Schema, identifiers: Sequence[str]) -> Sequence[str]:
        check_there(data, self.name, self.row_id or ())
        groupable = [each.name for each in data if not _holds_map(each.type)]
        found = self.row_id or identifiers or [_quoted(name) for name in groupable]
        if not found:
            raise FeedUnavailable(
                f"{self.name} has maps only, by which rows cannot be told apart: add a column that tells them apart",
                condition="FEED_UNAVAILABLE.NO_ROW_ID",
            )
        return found


def _quoted(name: str) -> str:
    return f"`{name}`" if "." in name and "`" not in name else name


def _holds_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_holds_map(kind.field(place).type) for place in range(kind.num_fields))
