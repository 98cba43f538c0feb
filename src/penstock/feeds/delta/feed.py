"""``DeltaFeed``: the changes of a Delta table, with or without its change data feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.arguments import column_names, require
from penstock.feeds.delta.open_feed import OpenDeltaFeed
from penstock.feeds.protocol import PlannedRead
from penstock.feeds.urls import FeedUrl, pairs, prefixed
from penstock.lake.location import absolute, shown_path


@dataclass(frozen=True)
class DeltaFeed:
    """The changes of a Delta table; a version of the table is a commit.

    A version that was written with the change data feed on has the rows that the writer recorded, or else, as
    Delta defines it, the rows of the files that it added and removed. A version that was written without it
    has the rows of all files that it added and removed; they include unchanged rows, as in every
    copy-on-write table, which carry-over removal takes out. ``OPTIMIZE`` and ``VACUUM`` change nothing.

    Parameters
    ----------
    path
        The table's folder, or its URL in an object store.
    row_id
        The columns that identify rows, needed if the table's change data feed is off. With them a table whose
        feed was turned on or off is read from any version on; without them from the version that turned it
        on.
    storage_options
        deltalake's storage options, such as credentials.
    overwrites
        Whether commits overwrite the table, or files of it, beside the change data feed. Delta then has all
        rows as deletes and inserts; unchanged ones are dropped as carry-overs, and the others become updates.
        That needs ``row_id``, and a shuffle.
    """

    path: str
    row_id: str | Sequence[str] | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    overwrites: bool = False

    def __post_init__(self) -> None:
        columns = column_names("row_id", self.row_id or ())
        require("storage_options", self.storage_options, Mapping, "a mapping, as deltalake takes it")
        options = {str(name): str(value) for name, value in self.storage_options.items()}
        object.__setattr__(self, "path", absolute(self.path))
        object.__setattr__(self, "row_id", columns or None)
        object.__setattr__(self, "storage_options", {name: value for name, value in options.items() if value})

    @classmethod
    def from_url(cls, url: str) -> DeltaFeed:
        """Return the feed of ``delta:PATH?row_id=NAME&overwrites=true&storage.KEY=VALUE``.

        Raises
        ------
        InvalidUrl
            For another parameter.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id", "overwrites"), ("storage.",))
        overwrites = parts.flag("overwrites")
        return cls(parts.target, parts.all("row_id") or None, parts.prefixed("storage."), overwrites)

    @property
    def url(self) -> str:
        """The feed's URL form."""
        options = prefixed("storage.", self.storage_options)
        overwrites = pairs(overwrites="true") if self.overwrites else ()
        return str(FeedUrl("delta", self.path, (*pairs(row_id=self.row_id), *overwrites, *options)))

    @property
    def name(self) -> str:
        """The table's path for messages, without a secret."""
        return shown_path(self.path)

    def open(self, planned: PlannedRead | None = None) -> OpenDeltaFeed:
        """Open the feed in this process."""
        columns = None if self.row_id is None else tuple(self.row_id)
        return OpenDeltaFeed(self.name, self.path, columns, self.storage_options, self.overwrites)
