"""The Spark data source ``penstock_changes``: the unprocessed change rows of any feed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from reprlib import repr as limited

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.changes import finality
from penstock.changes.options import ENDING, STARTING, ChangeRange
from penstock.errors import (
    CheckpointMismatchError,
    FeedUnavailableError,
    InvalidChangeOptionError,
    SchemaMismatchError,
)
from penstock.feeds.protocol import (
    Description,
    OpenFeed,
    PlannedRead,
    Task,
    history_changed,
    with_plan,
)
from penstock.feeds.urls import parse
from penstock.json_text import Json
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.options import OptionReader, parse_boolean, parse_positive
from penstock.spark.schemas import projection, to_struct

log = logging.getLogger("penstock.changes")

FORMAT = "penstock_changes"
_COMMIT = "commit"
"""Offset key: the name of its last commit, to detect another commit with the same version."""
_STATE = "state"
"""Offset key: the state that the feed stores with a version."""
_WARNINGS = "warnings"
"""Progress key: warnings from the feed's system."""
_MAX_VERSION = (1 << 63) - 1
"""The highest version."""
LIMITS = ("maxCommitsPerTrigger", "maxRowsPerTrigger")
BATCH = ("url", *STARTING, *ENDING, "rowsPerTask")
STREAM = (*BATCH, *LIMITS, "readOnly", "finalizedUntil")
_PASS_OPTIONS = ("deduplicationmode", "computeupdates")
_INTERNAL_OPTIONS = ("plan", "somecolumns")
"""Options that `changes.read` sets for its own reads."""


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a feed. The URL may also be in ``path``, where ``load(url)`` puts it."""

    url: str = field(repr=False)
    range: ChangeRange
    rows_per_task: int = 1_000_000
    max_commits: int | None = None
    max_rows: int | None = None
    read_only: bool = False
    """Whether to leave the feed unchanged: not to prepare it, and not to report progress to it."""
    finalized_until: bool = False
    """Whether to add the column with the time before which the stream has all commits."""
    plan: str | None = field(default=None, repr=False)
    """The feed's plan, if the caller has already described the feed."""
    some_columns: bool = False
    """Whether the user selected columns."""


def read_options(options: Mapping[str, str], known: Sequence[str], what: str) -> ReadOptions:
    if any(name.lower() in _PASS_OPTIONS for name in options):
        raise InvalidChangeOptionError(
            f"format({FORMAT!r}) returns unprocessed change rows: pass deduplicationMode and computeUpdates "
            "to penstock.changes.read, read_stream or post_process"
        )
    if not any(name.lower() == "url" for name in options):
        options = {("url" if name.lower() == "path" else name): text for name, text in options.items()}
    planned = {name: value for name, value in options.items() if name.lower() in _INTERNAL_OPTIONS}
    read = OptionReader(
        {name: value for name, value in options.items() if name not in planned}, known, what, STREAM
    )
    plan = OptionReader(planned, _INTERNAL_OPTIONS, what)
    return ReadOptions(
        url=read.required("url"),
        range=ChangeRange.of({name: read.text(name) for name in (*STARTING, *ENDING)}),
        rows_per_task=read.value("rowsPerTask", parse_positive, ReadOptions.rows_per_task),
        max_commits=read.value("maxCommitsPerTrigger", parse_positive),
        max_rows=read.value("maxRowsPerTrigger", parse_positive),
        read_only=read.value("readOnly", parse_boolean, False),
        finalized_until=read.value("finalizedUntil", parse_boolean, False),
        plan=plan.text("plan"),
        some_columns=plan.value("someColumns", parse_boolean, False),
    )


@without_tracebacks
class ChangesDataSource(DataSource):
    """Change rows of the feed with a URL."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        options = read_options(self.options, STREAM, "read")
        with closing(parse(options.url).open()) as feed:
            schema = feed.describe().schema
        return to_struct(with_finality(schema) if options.finalized_until else schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ChangesReader(read_options(self.options, BATCH, "batch read of changes"), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ChangesStreamReader(read_options(self.options, STREAM, "streaming read of changes"), schema)


def with_finality(schema: pa.Schema) -> pa.Schema:
    """Add the column with the time before which a stream has all commits to a feed's schema."""
    finality.refuse_column(schema.names)
    return schema.append(finality.FIELD)


class ChangesTask(InputPartition):
    """A partition for Spark: a task of the feed, and the time before which the stream has all commits."""

    def __init__(self, task: Task, finalized: int | None = None) -> None:
        super().__init__(None)
        self.task, self.finalized = task, finalized


@without_tracebacks
class FeedReader:
    """A feed that the driver opens and describes once, and that executors open again for each task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._requested = options, schema
        self._feed = parse(options.url)
        planned = PlannedRead(options.plan, schema.names, options.some_columns)
        self._opened: OpenFeed = self._feed.open(planned)
        self._known: tuple[str, pa.Schema] | None = None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there are no partitions, Spark passes an empty one.
        if isinstance(partition, ChangesTask):
            with closing(self._feed.open()) as opened:
                for batch in opened.read(partition.task, self._described()[1]):
                    yield self._with_finality(batch, partition.finalized)

    def _with_finality(self, batch: pa.RecordBatch, finalized: int | None) -> pa.RecordBatch:
        """Add the finality column to a batch, if the read has it, in the requested order of columns."""
        if finality.COLUMN not in self._requested.names or not self._options.finalized_until:
            return batch
        time = pa.repeat(pa.scalar(finalized, finality.FIELD.type), batch.num_rows)
        return batch.append_column(finality.FIELD, time).select(self._requested.names)

    def _tasks(self, after: int, upto: int, finalized: int | None = None) -> list[InputPartition]:
        tasks = self._opened.tasks(after, upto, self._options.rows_per_task) if after < upto else ()
        return [ChangesTask(task, finalized) for task in tasks]

    def _described(self) -> tuple[str, pa.Schema]:
        """Return the feed's identity and the schema of the read."""
        if self._known is None:
            description = self._opened.describe()
            self._known = description.identity, _read_schema(self._requested, description, self._options)
        return self._known

    def __getstate__(self) -> Json:
        state = {name: value for name, value in self.__dict__.items() if name != "_opened"}
        return {**state, "_known": self._described()}


@without_tracebacks
class ChangesReader(FeedReader, DataSourceReader):
    """Batch reader: the commits of a range that exist when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._described()

    def partitions(self) -> Sequence[InputPartition]:
        after = self._options.range.start(self._opened)
        upto = self._options.range.end(self._opened, after)
        if upto == after:
            self._warn_if_ahead()
        return self._tasks(after, upto)

    def _warn_if_ahead(self) -> None:
        """Warn if startingVersion is beyond the next version: it may be wrong, or from another table."""
        first = self._options.range.first_version
        # A cheap check first: most reads continue where the last one ended, and there are no new commits.
        if first is None or self._opened.newest(first - 2) > first - 2:
            return
        newest = self._opened.newest(self._opened.oldest())
        if first > newest + 1:
            log.warning(
                "%s is read from version %d, and its newest is %d: there are no changes to read",
                self._opened.name,
                first,
                newest,
                extra={"action": "version_ahead", "table": self._opened.name, "version": first},
            )


@without_tracebacks
class ChangesStreamReader(FeedReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming reader of one source in one run of a query. A micro-batch is a range of whole commits.

    Spark creates several instances, and calls every method except ``read`` in one process, so connections are
    opened on first use. An offset contains the name of its last commit, and also the start of its range,
    because Spark does not log where the first range starts (4.2, 4.3).
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._end_version = options.range.last_version
        self._end_at_newest = False
        self._initial: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """End this run at the newest commit of the feed; a later run reads the commits that follow."""
        # The end is read later: the feed of a new query may have to be prepared first.
        self._end_at_newest = True

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        is_open = self._options.range.is_open and not self._options.read_only
        self._initial = self._opened.prepare() if is_open else self._options.range.start(self._opened)
        self._fix_end(self._initial)
        return self._offset(self._initial, self._initial, self._opened.stream_start())

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the end of the next micro-batch; ``start`` itself if there is nothing to read."""
        begin, after = self._range(start)
        self._fix_end(after)
        if after != self._initial and not self._options.read_only:
            # Spark has logged every offset that it passes here, except the initial offset of a new query.
            self._opened.logged(after)
        if begin == after and self._options.range.first_time is not None:
            # When the query began, all commits were before startingTimestamp; later commits may be as well.
            after = max(after, self._options.range.start(self._opened))
        state = start.get(_STATE)
        newest = self._newest(after, state)
        self._check_commit(start)
        upto = self._limited_end(after, self._before_end(newest))
        if upto <= after:
            return start
        offset = self._offset(after, upto, self._opened.stream_state(upto, state))
        # If the time is unknown now, the earlier one still holds.
        finalized = finality.latest(finality.micros_in(start), self._opened.finalized_until(upto))
        return finality.with_time(offset, finalized)

    def reportLatestOffset(self) -> Json | None:
        start = self._initial if self._initial is not None else self._opened.oldest()
        newest = self._before_end(self._opened.newest(start))
        warnings = self._opened.warnings()
        return self._offset(newest, newest) | ({_WARNINGS: list(warnings)} if warnings else {})

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch; ``end`` contains both ends of its range."""
        after, upto = self._range(end)
        self._check_commit(end)
        self._fix_end(upto)
        return self._tasks(after, upto, finality.micros_in(end))

    def _fix_end(self, after: int) -> None:
        if self._end_at_newest:
            self._end_at_newest, self._end_version = False, self._before_end(self._opened.newest(after))

    def _newest(self, after: int, state: Json | None) -> int:
        """Return the version up to which the feed can be read now."""
        if self._end_version is not None and after >= self._end_version:
            # Commits after the end of the range do not have to match the plan.
            return self._opened.newest(after)
        return self._opened.stream_end(after, state)

    def _before_end(self, upto: int) -> int:
        return upto if self._end_version is None else min(upto, self._end_version)

    def _limited_end(self, after: int, upto: int) -> int:
        """Return the end of a micro-batch of whole commits within the limits and ``endingTimestamp``."""
        most_commits, most_rows = self._options.max_commits, self._options.max_rows
        last_time = self._options.range.last_time
        if upto <= after or (most_commits is None and most_rows is None and last_time is None):
            return upto
        commits = rows = 0
        end = after
        for commit in self._opened.commits(after, upto, most_rows):
            if last_time is not None and commit.timestamp > last_time:
                # The range ends here, even if later commits have earlier times.
                self._end_version = end
                return end
            commits, rows, end = commits + 1, rows + commit.rows, commit.version
            if commits == most_commits or (most_rows is not None and rows >= most_rows):
                return end
        return upto

    def _offset(self, after: int, upto: int, state: Json | None = None) -> Json:
        offset = {"feed": self._described()[0], "from": after, "to": upto}
        name = self._opened.commit_name(upto) if after < upto else None
        optional = {_COMMIT: name, _STATE: state}
        return offset | {key: value for key, value in optional.items() if value is not None}

    def _range(self, offset: Json) -> tuple[int, int]:
        identity = self._described()[0]
        try:
            feed, after, upto = offset["feed"], offset["from"], offset["to"]
        except (KeyError, TypeError):
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {limited(offset)}, which does not belong to a change feed: "
                "use the source that the query had before, or a new checkpoint",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
            ) from None
        if feed != identity:
            raise CheckpointMismatchError(
                f"the checkpoint belongs to the feed {feed!r}, but the query reads {identity!r}: it is "
                "another feed, or its table was recreated. Restart the query with the feed of its "
                "checkpoint, or start over with a new checkpoint and an empty or another sink",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
                expected=feed,
                found=identity,
            )
        is_valid_range = (
            type(after) is int and type(upto) is int and -_MAX_VERSION <= after <= upto <= _MAX_VERSION
        )
        if not is_valid_range or not isinstance(offset.get(_STATE, {}), dict):
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {limited(offset)}, which Penstock cannot have written: "
                "restore the checkpoint from a copy, or start over with a new checkpoint and an empty sink",
                condition="CHECKPOINT_MISMATCH.MALFORMED",
            )
        return after, upto

    def _check_commit(self, offset: Json) -> None:
        """Refuse an offset if the feed now has another commit at the version of its last commit."""
        known = offset.get(_COMMIT)
        if known is not None and self._opened.commit_name(offset["to"]) not in (None, known):
            raise history_changed(self._feed.name, offset["to"])


def _read_schema(requested: StructType, description: Description, options: ReadOptions) -> pa.Schema:
    if options.finalized_until:
        requested = StructType([each for each in requested if each.name != finality.COLUMN])
    try:
        wanted = projection(requested, description.schema)
    except SchemaMismatchError as error:
        if options.plan is None:
            raise
        raise FeedUnavailableError(
            f"the columns have changed since this query was planned: {error.message}. Read the feed again "
            "and start the query again",
            condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
            **error.parameters,
        ) from None
    return with_plan(wanted, description.plan if options.plan is None else options.plan)
