"""The Spark data source ``penstock_changes``: the change rows of any feed, as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.changes.options import ChangeRange
from penstock.errors import CheckpointMismatch, FeedUnavailable, InvalidChangeOption, SchemaMismatch
from penstock.feeds.protocol import (
    Changelog,
    Description,
    NamesCommits,
    PlannedChangelog,
    WatchedChangelog,
    history_changed,
    with_plan,
)
from penstock.feeds.urls import parse
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.options import OptionReader, parse_boolean, parse_positive
from penstock.spark.schemas import projection, to_struct

FORMAT = "penstock_changes"
_COMMIT = "commit"
"""Where an offset has what its last commit is known by."""
_STATE = "state"
"""Where an offset has what the feed keeps with a version."""
_WARNINGS = "warnings"
"""Where the progress of a query has what is wrong with the feed's system."""
STARTING = ("startingVersion", "startingTimestamp", "startingBoundInclusive")
ENDING = ("endingVersion", "endingTimestamp", "endingBoundInclusive")
LIMITS = ("maxCommitsPerTrigger", "maxRowsPerTrigger")
BATCH = ("url", *STARTING, *ENDING, "rowsPerTask")
STREAM = (*BATCH, *LIMITS, "readOnly")
_PASSES = ("deduplicationmode", "computeupdates")
_PLANNED = ("plan", "somecolumns")
"""Options that `changes.read` gives to its own reads."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of a read."""

    url: str = field(repr=False)
    range: ChangeRange
    rows_per_task: int = 1_000_000
    max_commits: int | None = None
    max_rows: int | None = None
    read_only: bool = False
    """Whether the feed is not told how far it has been read."""
    plan: str | None = field(default=None, repr=False)
    """The feed's plan, where it was described before."""
    some_columns: bool = False
    """Whether the user named the columns."""

    def open(self, columns: Sequence[str]) -> Changelog:
        """The feed, ready to read some columns."""
        feed = parse(self.url)
        if isinstance(feed, PlannedChangelog):
            feed.follow(self.plan, columns, some_columns=self.some_columns)
        return feed


def read_options(given: Mapping[str, str], known: Sequence[str], what: str) -> ReadOptions:
    """Parse the options of a read.

    Raises
    ------
    InvalidOption
        For an unknown option, a bad value or a missing one.
    """
    if any(name.lower() in _PASSES for name in given):
        raise InvalidChangeOption(
            f"format({FORMAT!r}) gives change rows as the feed has them: deduplicationMode and computeUpdates are arguments "
            "of penstock.changes.read, read_stream and post_process"
        )
    planned = {name: value for name, value in given.items() if name.lower() in _PLANNED}
    read = OptionReader(
        {name: value for name, value in given.items() if name not in planned}, known, what, STREAM
    )
    plan = OptionReader(planned, _PLANNED, what)
    return ReadOptions(
        url=read.required("url"),
        range=ChangeRange.of(
            starting_version=read.text("startingVersion"),
            ending_version=read.text("endingVersion"),
            starting_timestamp=read.text("startingTimestamp"),
            ending_timestamp=read.text("endingTimestamp"),
            starting_bound_inclusive=read.text("startingBoundInclusive") or True,
            ending_bound_inclusive=read.text("endingBoundInclusive") or True,
        ),
        rows_per_task=read.value("rowsPerTask", parse_positive, ReadOptions.rows_per_task),
        max_commits=read.value("maxCommitsPerTrigger", parse_positive),
        max_rows=read.value("maxRowsPerTrigger", parse_positive),
        read_only=read.value("readOnly", parse_boolean, False),
        plan=plan.text("plan"),
        some_columns=plan.value("someColumns", parse_boolean, False),
    )


@without_tracebacks
class ChangesDataSource(DataSource):
    """Change rows of a feed that its URL names."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """The feed's schema."""
        return to_struct(parse(self._options(STREAM, "read").url).describe().schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        return ChangesReader(self._options(BATCH, "batch read of changes"), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read."""
        return ChangesStreamReader(self._options(STREAM, "streaming read of changes"), schema)

    def _options(self, known: Sequence[str], what: str) -> ReadOptions:
        return read_options(self.options, known, what)


class ChangesTask(InputPartition):
    """A piece of a range, as the feed cuts it."""

    def __init__(self, piece: Any) -> None:
        super().__init__(None)
        self.piece = piece


@without_tracebacks
class ChangesReader(DataSourceReader):
    """The commits between two bounds, as they are when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._feed = options.open(schema.names)
        self._schema = _read_schema(schema, self._feed.describe(), options)

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the read."""
        after = self._options.range.start(self._feed)
        upto = self._options.range.end(self._feed, after)
        pieces = self._feed.tasks(after, upto, self._options.rows_per_task) if after < upto else ()
        return [ChangesTask(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return _read(self._feed, partition, self._schema)


@without_tracebacks
class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One source of one run of a streaming query; a micro-batch is a range of whole commits.

    Spark makes it several times and calls everything but ``read`` in one process, so nothing is opened here. An offset holds the
    start of its range too, since Spark does not log where the first one began (4.2, 4.3), and what its last commit is known by.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._feed = options.open(schema.names)
        self._requested = schema
        self._known: tuple[str, pa.Schema] | None = None
        self._cap = options.range.last_version
        self._ends_here = False
        self._initial: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the feed ends now; later commits are another run's."""
        # A new query's feed may have to be made first.
        self._ends_here = True

    def getDefaultReadLimit(self) -> ReadLimit:
        """No limit of Spark's; this source has its own."""
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        """Where a query with a new checkpoint starts."""
        is_open = self._options.range.is_open and not self._options.read_only
        self._initial = self._feed.begin() if is_open else self._options.range.start(self._feed)
        self._note_end(self._initial)
        state = self._feed.stream_start() if isinstance(self._feed, PlannedChangelog) else None
        return self._offset(self._initial, self._initial, state)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch; ``start`` itself when there is nothing for one."""
        begin, after = self._range(start)
        self._note_end(after)
        if after != self._initial and not self._options.read_only:
            # Spark asks for more only behind what it has logged; where a new query starts nothing is logged yet.
            self._feed.logged(after)
        if begin == after and self._options.range.first_time is not None:
            # Nothing was late enough when the query began; commits that came since may be too early, too.
            after = max(after, self._options.range.start(self._feed))
        newest, state = self._newest(after, start.get(_STATE))
        self._check_commit(start)
        upto = self._admitted(after, self._capped(newest))
        return start if upto <= after else self._offset(after, upto, state)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the feed ends now, for the query's progress."""
        newest = self._capped(
            self._feed.newest(self._initial if self._initial is not None else self._feed.oldest())
        )
        warnings = self._feed.warnings() if isinstance(self._feed, WatchedChangelog) else ()
        return self._offset(newest, newest) | ({_WARNINGS: list(warnings)} if warnings else {})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch; its range is in ``end`` alone."""
        after, upto = self._range(end)
        self._check_commit(end)
        self._note_end(upto)
        pieces = self._feed.tasks(after, upto, self._options.rows_per_task) if after < upto else ()
        return [ChangesTask(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor."""
        return _read(self._feed, partition, self._described()[1])

    def __getstate__(self) -> dict[str, Any]:
        # What executors get: the schema goes along, so that they need not ask for it.
        return {**self.__dict__, "_known": self._described()}

    def _described(self) -> tuple[str, pa.Schema]:
        if self._known is None:
            found = self._feed.describe()
            self._known = found.identity, _read_schema(self._requested, found, self._options)
        return self._known

    def _note_end(self, after: int) -> None:
        if self._ends_here:
            self._ends_here, self._cap = False, self._capped(self._feed.newest(after))

    def _newest(self, after: int, state: Mapping[str, Any] | None) -> tuple[int, dict[str, Any] | None]:
        """The end of what can be read now, and what the feed keeps in the checkpoint with it."""
        if isinstance(self._feed, PlannedChangelog):
            # Behind the end of the range nothing has to fit.
            at_end = self._cap is not None and after >= self._cap
            return (after, None) if at_end else self._feed.stream_end(after, state)
        return self._feed.newest(after), None

    def _capped(self, upto: int) -> int:
        return upto if self._cap is None else min(upto, self._cap)

    def _admitted(self, after: int, upto: int) -> int:
        """The end of as many whole commits as it takes to reach a limit, and before those that are too late."""
        most_commits, most_rows = self._options.max_commits, self._options.max_rows
        last_time = self._options.range.last_time
        if upto <= after or (most_commits is None and most_rows is None and last_time is None):
            return upto
        commits = rows = 0
        end = after
        for commit in self._feed.commits(after, upto, most_rows):
            if last_time is not None and commit.timestamp > last_time:
                # The end: what comes behind it, however early its time, is not of this range.
                self._cap = end
                return end
            commits, rows, end = commits + 1, rows + commit.rows, commit.version
            if commits == most_commits or (most_rows is not None and rows >= most_rows):
                return end
        return upto

    def _offset(self, after: int, upto: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
        offset = {"feed": self._described()[0], "from": after, "to": upto}
        name = self._commit_name(upto) if after < upto else None
        kept = {_COMMIT: name, _STATE: state}
        return offset | {key: value for key, value in kept.items() if value is not None}

    def _commit_name(self, version: int) -> str | None:
        return self._feed.commit_name(version) if isinstance(self._feed, NamesCommits) else None

    def _range(self, offset: dict[str, Any]) -> tuple[int, int]:
        identity = self._described()[0]
        try:
            feed, after, upto = offset["feed"], int(offset["from"]), int(offset["to"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointMismatch(
                f"the checkpoint has the offset {str(offset)[:200]!r}, which is not a change feed's: it belongs to another "
                "query; use that query's source, or a new checkpoint"
            ) from None
        if feed != identity:
            raise CheckpointMismatch(
                f"the checkpoint is of the feed {feed!r}, and this is {identity!r}: it was made anew, or is another one. Give the query "
                "back the feed that it has read; or start over with a new checkpoint, and an empty or another sink, which would keep what has "
                "gone from the source meanwhile",
                expected=feed,
                found=identity,
            )
        return after, upto

    def _check_commit(self, offset: dict[str, Any]) -> None:
        """Refuse an offset whose last commit is another one in the feed as it is now."""
        known = offset.get(_COMMIT)
        if known is not None and self._commit_name(offset["to"]) not in (None, known):
            raise history_changed(self._feed.name, offset["to"])


def _read_schema(requested: StructType, found: Description, options: ReadOptions) -> pa.Schema:
    try:
        wanted = projection(requested, found.schema)
    except SchemaMismatch as error:
        if options.plan is None:
            raise
        raise FeedUnavailable(
            f"the columns have changed after this query was planned: {error.message}. Read the feed again and start the query again",
            condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
            **error.parameters,
        ) from None
    return with_plan(wanted, found.plan if options.plan is None else options.plan)


def _read(feed: Changelog, task: InputPartition, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if not isinstance(task, ChangesTask):
        # Spark puts an empty partition in the place of none.
        return iter(())
    freeze_imports()
    return feed.read(task.piece, schema)
