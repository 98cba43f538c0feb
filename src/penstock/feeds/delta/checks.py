"""What is refused by name, rather than read wrongly."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.delta.actions import CommitFile, Metadata, Protocol
from penstock.feeds.delta.log import Log
from penstock.feeds.file_commits import DataFile
from penstock.feeds.urls import row_id_forms
from penstock.lake.location import shown_path
from penstock.lake.storage import Storage

_READER = 3
"""The newest reader version that the Delta protocol has."""
_FEATURES = frozenset(
    {
        # Refused where they are used, not where they are allowed.
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)


def check_protocol(protocol: Protocol, shown: str) -> None:
    """Refuse tables that ask for what is not known here.

    Raises
    ------
    FeedUnavailable
        READER_FEATURE.
    """
    unknown = sorted(set(protocol.features) - _FEATURES)
    if protocol.reader <= _READER and not unknown:
        return
    what = f"the reader features {', '.join(unknown)}" if unknown else f"reader version {protocol.reader}"
    raise FeedUnavailable(
        f"the Delta table {shown} asks for {what}, which Penstock does not read: drop the feature from the table, or copy it",
        condition="FEED_UNAVAILABLE.READER_FEATURE",
        features=unknown,
        reader_version=protocol.reader,
    )


def check_metadata(metadata: Metadata, shown: str, version: int | None = None) -> None:
    """Refuse columns that have other names in the files.

    Parameters
    ----------
    version
        The version that has them; None for the newest one.

    Raises
    ------
    FeedUnavailable
        COLUMN_MAPPING.
    """
    if metadata.column_mapping.lower() == "none":
        return
    which = "the Delta table" if version is None else f"version {version} of the Delta table"
    raise FeedUnavailable(
        f"{which} {shown} maps its columns by {metadata.column_mapping}, so that they have other names in its files, which "
        "Penstock does not read: drop the mapping (ALTER TABLE … DROP FEATURE columnMapping) and begin after the version that does, "
        "or copy the table",
        condition="FEED_UNAVAILABLE.COLUMN_MAPPING",
        mode=metadata.column_mapping,
        version=version,
    )


def check_files(commit: CommitFile, before: Metadata | None, table: Metadata | None, shown: str) -> None:
    """Refuse files of which only a part counts, files of another table, and files whose partition the log does not say.

    Parameters
    ----------
    before
        The table before the commit: what it removes was written under that.
    table
        The table after it.

    Raises
    ------
    FeedUnavailable
        DELETION_VECTORS, FILES_ELSEWHERE or PARTITION_UNKNOWN.
    """
    for kind, action in commit.needed:
        if action.deletion_vector:
            raise FeedUnavailable(
                f"version {commit.version} of the Delta table {shown} has deletion vectors, which Penstock does not read: set "
                "delta.enableDeletionVectors=false, purge those that are there (REORG TABLE … APPLY (PURGE)), and begin after "
                "that version",
                condition="FEED_UNAVAILABLE.DELETION_VECTORS",
                version=commit.version,
            )
        if not _says_partition(action, before if kind == "delete" else table):
            raise FeedUnavailable(
                f"version {commit.version} of the Delta table {shown} removes a file, and its log does not say of which "
                f"partition, as writers may leave it: begin after that version (file {shown_path(action.path)})",
                condition="FEED_UNAVAILABLE.PARTITION_UNKNOWN",
                version=commit.version,
            )
        if elsewhere(action):
            raise FeedUnavailable(
                f"version {commit.version} of the Delta table {shown} has a file outside its folder, as a shallow clone has: "
                f"read the table that it was made from, or begin after that version (file {shown_path(action.path)})",
                condition="FEED_UNAVAILABLE.FILES_ELSEWHERE",
                version=commit.version,
            )


def _says_partition(action: DataFile, table: Metadata | None) -> bool:
    return table is None or {name for name, _ in action.values}.issuperset(table.partition_columns)


def replaced(shown: str, version: int) -> FeedUnavailable:
    """The error for a table that another one took the place of."""
    return FeedUnavailable(
        f"version {version} of the Delta table {shown} is of another table, which took its place at this path: the table was "
        "removed, replaced or recreated. Start the query again, with a new checkpoint and an empty sink",
        condition="FEED_UNAVAILABLE.TABLE_REPLACED",
        table=shown,
        version=version,
    )


def went_back(shown: str, version: int, newest: int) -> DataLost:
    """The error for a log that ends before what has been read."""
    return DataLost(
        f"version {version} of the Delta table {shown} has been read, and the table is at version {newest} now: it was restored from a "
        "backup, or recreated. What was read of later versions does not hold: read anew what depends on it, with a new checkpoint "
        "and an empty sink",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
        newest=newest,
    )


def elsewhere(action: DataFile) -> bool:
    """Whether a file is not in the table's folder."""
    return action.path.startswith("/") or "://" in action.path or action.path.startswith("file:")


def no_feed(shown: str, versions: Sequence[int]) -> FeedUnavailable:
    """The error for versions that rewrote files without noting down which rows they changed."""
    return FeedUnavailable(
        f"{_listed(versions)} of the Delta table {shown} rewrote files while its change data feed was off, so that the rows which "
        f"changed are not told apart from the others: begin after version {versions[-1]}, or give the columns that tell rows "
        f"apart: {row_id_forms('delta', 'path', 'DeltaFeed')}",
        condition="FEED_UNAVAILABLE.FEED_NOT_ENABLED",
        versions=list(versions),
    )


def _listed(versions: Sequence[int]) -> str:
    """Such as: versions 2, 5 to 9."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] + 1 == version:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    told = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    more = f" and {len(told) - 20} more runs" if len(told) > 20 else ""
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(told[:20])}{more}"


# ---- reach: How far back a table's changes can still be read.


class Reach:
    """Which commits have all their files yet."""

    def __init__(self, storage: Storage, log: Log, shown: str) -> None:
        self._storage = storage
        self._log = log
        self._shown = shown
        self._found: int | None = None
        self._probe: tuple[str, ...] = ()

    def oldest(self, refused: Collection[int] = ()) -> int:
        """The version after which all commits and all their files are there, and none is among those refused."""
        # Files go in the order in which commits made them superfluous, so that the first ones tell if any are gone since.
        if self._found is None or self._found < self._log.first - 1 or self._storage.missing(self._probe):
            self._look(refused)
        assert self._found is not None
        return self._found

    def _look(self, refused: Collection[int]) -> None:
        removed: set[str] = set()
        self._probe = ()
        for commit in self._log.backwards(self._log.newest()):
            removed.update(action.path for action in commit.removed)
            # What the table has now is not vacuumed.
            mortal = [
                action.path
                for kind, action in commit.needed
                if (kind != "insert" or action.path in removed) and not elsewhere(action)
            ]
            if commit.version in refused or self._storage.missing(mortal):
                self._found = commit.version
                return
            self._probe = tuple(mortal) or self._probe
        self._found = self._log.first - 1

    def lost(self, version: int, path: str) -> DataLost:
        """The error for a file that is gone, naming the versions that are left."""
        self._found = None
        try:
            first, last = self.oldest() + 1, self._log.newest()
            left = f"versions {first} to {last} are left" if first <= last else "no version is left"
        except (DataLost, FeedUnavailable) as error:
            return DataLost(
                f"{path} of {self._shown} is gone, and so is its table: {error.message}", version=version
            )
        return DataLost(
            f"version {version} of the Delta table {self._shown} cannot be read any more, since its file {path} was vacuumed; {left}",
            version=version,
            first=first,
            last=last,
        )
