"""``SnapshotFeed``: the changes between the snapshots of a table in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InvalidChangelogSchema
from penstock.feeds.contract import ChangeContract
from penstock.feeds.protocol import PlannedRead
from penstock.feeds.snapshots.open_feed import OpenSnapshotFeed
from penstock.feeds.urls import FeedUrl, pairs, row_id_forms
from penstock.lake.location import absolute, shown_path


@dataclass(frozen=True)
class SnapshotFeed:
    """The changes from each snapshot of a table to the next one.

    Every Parquet file of the folder, and every sub-folder with Parquet files in it, is a snapshot; names that
    begin with ``_`` or ``.`` are left out, and so are folders in which Spark is still writing. The version of
    a snapshot is the number in its name: 7 for ``orders-0007.parquet``, 20260131 for ``2026-01-31``. So it
    stays when older snapshots are removed. All names have to be alike except for their digits, and several
    numbers in a name need the same number of digits in every name, so that versions are ordered as the names
    are.

    Version v has the rows of the snapshot before it as deletes and its own as inserts; carry-over removal
    leaves the difference. The first snapshot is where the feed begins, and has no changes itself, unless it
    is number 1: before number 1 the table was empty.

    A snapshot must not change once it exists: write it under another name (``_new``), then rename it. Remove
    the oldest ones first, and none that a query still has to compare with. A folder is known by its path: if
    it is recreated for another table, a query needs a new checkpoint.

    Parameters
    ----------
    path
        The folder, or its URL in an object store that ``pyarrow.fs`` knows.
    row_id
        The columns that identify rows.
    """

    path: str
    row_id: str | Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))
        if not self.row_id:
            raise InvalidChangelogSchema(
                "the changes between snapshots need the columns that identify rows: "
                f"{row_id_forms('snapshots', 'path', 'SnapshotFeed')}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        object.__setattr__(self, "row_id", tuple(ChangeContract(self.row_id).row_id))

    @classmethod
    def from_url(cls, url: str) -> SnapshotFeed:
        """Return the feed of ``snapshots:PATH?row_id=NAME``.

        Raises
        ------
        InvalidUrl
            For another parameter.
        InvalidChangelogSchema
            MISSING_ROW_ID.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id",))
        return cls(parts.target, parts.all("row_id"))

    @property
    def url(self) -> str:
        """The feed's URL form."""
        return str(FeedUrl("snapshots", self.path, pairs(row_id=self.row_id)))

    @property
    def name(self) -> str:
        """The folder for messages, without a secret."""
        return shown_path(self.path)

    def open(self, planned: PlannedRead | None = None) -> OpenSnapshotFeed:
        """Open the feed in this process."""
        return OpenSnapshotFeed(self.name, self.path, tuple(self.row_id))
