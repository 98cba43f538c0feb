"""``IcebergFeed``: the changes of an Apache Iceberg table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.arguments import column_names, require
from penstock.extras import load
from penstock.feeds.contract import convert_fields
from penstock.feeds.protocol import OpenFeed, PlannedRead
from penstock.feeds.urls import FeedUrl, pairs, prefixed
from penstock.queue.checks import check_name

_PROPERTY = "property."


@dataclass(frozen=True)
class IcebergFeed:
    """The changes of an Iceberg table of format 2 or 3, from each snapshot of its main branch.

    Each snapshot is a commit: its version is the sequence number of the snapshot. Rows of added files are
    inserts; rows of removed files and deleted positions are deletes. In a copy-on-write table, unchanged rows
    are a delete and an insert, which the passes drop. Compactions have no change rows.

    The columns are those of the table when the query starts, also for older files: Iceberg identifies a
    column by its id across renames, wider types and defaults. If rows are identified by the row lineage of
    format 3, two columns are added at the end: ``_row_id``, a number that a row keeps in updates and
    compactions, and ``_last_updated_sequence_number``, the version that last updated the row. The feed then
    starts at the upgrade of the table to format 3.

    Parameters
    ----------
    table
        The table's name with its namespace, such as ``shop.orders``.
    catalog
        The catalog's name, under which pyiceberg looks up missing properties in its configuration.
    properties
        The catalog's properties, such as ``{"uri": …, "warehouse": …}``. They may contain credentials.
    row_id
        The columns that identify rows. By default the row lineage of a table of format 3, or the table's
        identifier fields, or else all columns except maps: then carry-over rows are dropped, but updates
        are not detected. Set this for a table of format 3 if a writer does not keep the row lineage of
        rewritten rows.
    """

    table: str
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    row_id: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        check_name("table", self.table)
        check_name("catalog", self.catalog)
        require("properties", self.properties, Mapping, "a mapping such as {'uri': 'http://localhost:8181'}")
        convert_fields(
            self,
            row_id=column_names("row_id", self.row_id or ()) or None,
            properties={name: str(value) for name, value in self.properties.items()},
        )

    @property
    def url(self) -> str:
        catalog = None if self.catalog == "default" else self.catalog
        named = pairs(catalog=catalog, row_id=self.row_id)
        return str(FeedUrl("iceberg", self.table, (*named, *prefixed(_PROPERTY, self.properties))))

    @property
    def name(self) -> str:
        return f"Iceberg table {self.table!r}"

    @classmethod
    def from_url(cls, url: str) -> IcebergFeed:
        """Return the feed of ``iceberg:namespace.table?catalog=NAME&property.uri=…&row_id=COLUMN``."""
        parts = FeedUrl.of(url)
        parts.require_known(["catalog", "row_id"], (_PROPERTY,))
        return cls(
            parts.target, parts.one("catalog") or "default", parts.prefixed(_PROPERTY), parts.all("row_id")
        )

    def open(self, planned: PlannedRead | None = None) -> OpenFeed:
        """Open the feed in this process; this needs pyiceberg."""
        open_feed = load(
            "penstock.feeds.iceberg.open_feed", "OpenIcebergFeed", "the feed of an Iceberg table"
        )
        opened: OpenFeed = open_feed(self)
        return opened
