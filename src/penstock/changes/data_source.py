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
"""Key of an offset: what distinguishes its last commit from another one of the same version."""
_STATE = "state"
"""Key of an offset: what the feed keeps with a version."""
_WARNINGS = "warnings"
"""Key of a query's progress: warnings of the feed's system."""
_MOST = (1 << 63) - 1
"""The highest version."""
LIMITS = ("maxCommitsPerTrigger", "maxRowsPerTrigger")
BATCH = ("url", *STARTING, *ENDING, "rowsPerTask")
STREAM = (*BATCH, *LIMITS, "readOnly", "finalizedUntil")
_PASSES = ("deduplicationmode", "computeupdates")
_PLANNED = ("plan", "somecolumns")
"""Options that `changes.read` sets for its own reads."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of a read of a feed; its URL may also come as ``load`` passes it, as ``path``."""

    url: str = field(repr=False)
    range: ChangeRange
    rows_per_task: int = 1_000_000
    max_commits: int | None = None
    max_rows: int | None = None
    read_only: bool = False
    """Whether the feed is not notified of what has been read."""
    finalized_until: bool = False
    """Whether there is a column with the time before which the stream has all commits."""
    plan: str | None = field(default=None, repr=False)
    """The feed's plan, if it was described earlier."""
    some_columns: bool = False
    """Whether the user named the columns."""


def read_options(options: Mapping[str, str], known: Sequence[str], what: str) -> ReadOptions:
    if any(name.lower() in _PASSES for name in options):
        raise InvalidChangeOptionError(
            f"format({FORMAT!r}) returns unprocessed change rows: pass deduplicationMode and computeUpdates "
            "to penstock.changes.read, read_stream or post_process"
        )
    if not any(name.lower() == "url" for name in options):
        options = {("url" if name.lower() == "path" else name): text for name, text in options.items()}
    planned = {name: value for name, value in options.items() if name.lower() in _PLANNED}
    read = OptionReader(
        {name: value for name, value in options.items() if name not in planned}, known, what, STREAM
    )
    plan = OptionReader(planned, _PLANNED, what)
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
    """Return the schema of a feed with the column for the time before which a stream has all commits."""
    finality.refuse_column(schema.names)
    return schema.append(finality.FIELD)


class ChangesTask(InputPartition):
    """A task of the feed, as Spark's partition, and the time before which its micro-batch is complete."""

    def __init__(self, task: Task, finalized: int | None = None) -> None:
        super().__init__(None)
        self.task, self.finalized = task, finalized


@without_tracebacks
class FeedReader:
    """A feed that is open in the driver, and described once; executors open it for each task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._requested = options, schema
        self._feed = parse(options.url)
        planned = PlannedRead(options.plan, schema.names, options.some_columns)
        self._opened: OpenFeed = self._feed.open(planned)
        self._known: tuple[str, pa.Schema] | None = None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark passes an empty partition if there are none.
        if isinstance(partition, ChangesTask):
            with closing(self._feed.open()) as opened:
                for batch in opened.read(partition.task, self._described()[1]):
                    yield self._with_finality(batch, partition.finalized)

    def _with_finality(self, batch: pa.RecordBatch, finalized: int | None) -> pa.RecordBatch:
        """Return a batch with the columns of the read, one of which may not be the feed's."""
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
    """The commits between two bounds, as they are when the query is planned."""

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
        """Warn of a first version beyond the next one, which may be a mistake, or another table's version."""
        first = self._options.range.first_version
        # This is cheap, and enough to read what has arrived since the last read, which is mostly nothing.
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
    """One source of one run of a streaming query; a micro-batch is a range of whole commits.

    Spark creates it several times and calls everything except ``read`` in one process, so connections are
    opened when they are first needed. An offset holds the start of its range too, since Spark does not log
    where the first one began (4.2, 4.3), and the name of its last commit.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._cap = options.range.last_version
        self._ends_here = False
        self._initial: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Note to end where the feed ends now; later commits are left to another run."""
        # The feed of a new query may have to be prepared first.
        self._ends_here = True

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        is_open = self._options.range.is_open and not self._options.read_only
        self._initial = self._opened.prepare() if is_open else self._options.range.start(self._opened)
        self._note_end(self._initial)
        return self._offset(self._initial, self._initial, self._opened.stream_start())

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the end of the next micro-batch; ``start`` itself if there is nothing to read."""
        begin, after = self._range(start)
        self._note_end(after)
        if after != self._initial and not self._options.read_only:
            # Spark asks for more only after what it has logged; where a new query starts nothing is logged
            # yet.
            self._opened.logged(after)
        if begin == after and self._options.range.first_time is not None:
            # No commit was late enough when the query began; later ones may be too early as well.
            after = max(after, self._options.range.start(self._opened))
        state = start.get(_STATE)
        newest = self._newest(after, state)
        self._check_commit(start)
        upto = self._admitted(after, self._capped(newest))
        if upto <= after:
            return start
        offset = self._offset(after, upto, self._opened.stream_state(upto, state))
        # A time that is not known now does not take back an earlier one.
        finalized = finality.latest(finality.micros_in(start), self._opened.finalized_until(upto))
        return finality.noted(offset, finalized)

    def reportLatestOffset(self) -> Json | None:
        start = self._initial if self._initial is not None else self._opened.oldest()
        newest = self._capped(self._opened.newest(start))
        warnings = self._opened.warnings()
        return self._offset(newest, newest) | ({_WARNINGS: list(warnings)} if warnings else {})

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch; ``end`` alone has its range."""
        after, upto = self._range(end)
        self._check_commit(end)
        self._note_end(upto)
        return self._tasks(after, upto, finality.micros_in(end))

    def _note_end(self, after: int) -> None:
        if self._ends_here:
            self._ends_here, self._cap = False, self._capped(self._opened.newest(after))

    def _newest(self, after: int, state: Json | None) -> int:
        """Return the end of what can be read now."""
        if self._cap is not None and after >= self._cap:
            # Commits after the end of the range do not have to fit the plan.
            return self._opened.newest(after)
        return self._opened.stream_end(after, state)

    def _capped(self, upto: int) -> int:
        return upto if self._cap is None else min(upto, self._cap)

    def _admitted(self, after: int, upto: int) -> int:
        """Return the end of as many whole commits as reach a limit, before those that are too late."""
        most_commits, most_rows = self._options.max_commits, self._options.max_rows
        last_time = self._options.range.last_time
        if upto <= after or (most_commits is None and most_rows is None and last_time is None):
            return upto
        commits = rows = 0
        end = after
        for commit in self._opened.commits(after, upto, most_rows):
            if last_time is not None and commit.timestamp > last_time:
                # The end: later commits, however early their time, are outside the range.
                self._cap = end
                return end
            commits, rows, end = commits + 1, rows + commit.rows, commit.version
            if commits == most_commits or (most_rows is not None and rows >= most_rows):
                return end
        return upto

    def _offset(self, after: int, upto: int, state: Json | None = None) -> Json:
        offset = {"feed": self._described()[0], "from": after, "to": upto}
        name = self._opened.commit_name(upto) if after < upto else None
        kept = {_COMMIT: name, _STATE: state}
        return offset | {key: value for key, value in kept.items() if value is not None}

    def _range(self, offset: Json) -> tuple[int, int]:
        identity = self._described()[0]
        try:
            feed, after, upto = offset["feed"], offset["from"], offset["to"]
        except (KeyError, TypeError):
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {limited(offset)}, which is not a change feed's: use the "
                "source of that query, or a new checkpoint",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
            ) from None
        if feed != identity:
            raise CheckpointMismatchError(
                f"the checkpoint is of the feed {feed!r}, and this is {identity!r}: another feed, or a "
                "recreated one. Restart the query with its own feed; or start over with a new checkpoint and "
                "an empty or another sink",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
                expected=feed,
                found=identity,
            )
        versions = type(after) is int and type(upto) is int and -_MOST <= after <= upto <= _MOST
        if not versions or not isinstance(offset.get(_STATE, {}), dict):
            raise CheckpointMismatchError(
                f"the checkpoint has the offset {limited(offset)}, which is not as Penstock writes it: "
                "restore the checkpoint from a copy, or start over with a new checkpoint and an empty sink",
                condition="CHECKPOINT_MISMATCH.MALFORMED",
            )
        return after, upto

    def _check_commit(self, offset: Json) -> None:
        """Refuse an offset whose last commit is another one in the feed now."""
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
