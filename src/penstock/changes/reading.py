"""``changes.read`` and ``changes.read_stream``: a feed's rows with the passes of its contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.arguments import column_names, require
from penstock.changes import finality
from penstock.changes.data_source import BATCH, FORMAT, STREAM, ChangesDataSource, read_options
from penstock.changes.options import COMMIT, ENDING, EVER, STARTING, ChangeOptions, flag
from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows
from penstock.changes.passes.violations import check_rows
from penstock.changes.post_processing import process
from penstock.changes.schema import layout_of, select_columns, with_contract_metadata
from penstock.errors import InvalidChangelogSchemaError, InvalidChangeOptionError
from penstock.feeds.contract import COMMIT_VERSION, ChangeContract
from penstock.feeds.protocol import Description, Feed, OpenFeed
from penstock.feeds.urls import parse
from penstock.spark.internals.sessions import check_session
from penstock.spark.schemas import is_case_sensitive, to_struct
from penstock.spark.session import register_source

_ROWS_PER_TABLE = 500_000
_ROWS_PER_TASK = 1_000_000
_COMMIT_ORDER = [(COMMIT_VERSION, "ascending")]


def read(
    spark: SparkSession,
    feed: Feed | str,
    *,
    starting_version: int | None = None,
    ending_version: int | None = None,
    starting_timestamp: object = None,
    ending_timestamp: object = None,
    starting_bound_inclusive: bool = True,
    ending_bound_inclusive: bool = True,
    deduplication_mode: str = "dropCarryovers",
    compute_updates: bool = False,
    net_window: str | None = None,
    columns: str | Sequence[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read changes as a batch.

    Parameters
    ----------
    spark
        The session.
    feed
        A feed, or its URL.
    starting_version, ending_version
        The first and the last commit to read. Without a last commit the range ends at the newest one; without
        either, it is the whole feed.
    starting_timestamp, ending_timestamp
        The same range by commit time: a ``datetime`` with a time zone, or text such as
        ``2026-01-31T12:00:00Z``. The range ends before the first commit with a later time than the end.
    starting_bound_inclusive, ending_bound_inclusive
        Whether the bounds belong to the range.
    deduplication_mode
        ``none``, ``dropCarryovers`` or ``netChanges``, as for :func:`~penstock.changes.post_process`.
    compute_updates
        Whether a delete and an insert of one row in one commit become an update.
    net_window
        For ``netChanges``: ``commit``, or an interval of commit time such as ``1 hour``; None for net changes
        of the whole range.
    columns
        The column or columns to read; None for all. Spark does not tell a Python data source which columns a
        query uses, so name the columns that you need to read less data. The three metadata columns and those
        of the contract are always read.
    options
        Further options of the data source, such as ``{"rowsPerTask": 100_000}``.

    Raises
    ------
    InvalidChangeOptionError, InvalidChangelogSchemaError, FeedUnavailableError, DataLostError
    """
    return _changes(
        spark,
        feed,
        columns,
        (starting_version, starting_timestamp, starting_bound_inclusive),
        (ending_version, ending_timestamp, ending_bound_inclusive),
        options,
        ChangeOptions.of(deduplication_mode, compute_updates, net_window),
        streaming=False,
    )


def read_stream(
    spark: SparkSession,
    feed: Feed | str,
    *,
    starting_version: int | None = None,
    ending_version: int | None = None,
    starting_timestamp: object = None,
    ending_timestamp: object = None,
    starting_bound_inclusive: bool = True,
    ending_bound_inclusive: bool = True,
    deduplication_mode: str = "dropCarryovers",
    compute_updates: bool = False,
    strategy: str = "auto",
    watermark_delay: str = "0 seconds",
    keep_watermark: bool = False,
    net_window: str | None = None,
    columns: str | Sequence[str] | None = None,
    finalized_until: bool = False,
    options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read changes as a stream. A micro-batch has whole commits.

    Parameters
    ----------
    spark
        The session.
    feed
        A feed, or its URL.
    starting_version, starting_timestamp, starting_bound_inclusive
        Where a new query begins, as for :func:`read`. A query with a checkpoint resumes where the checkpoint
        ends, and ignores these parameters.
    ending_version, ending_timestamp, ending_bound_inclusive
        Where the stream ends, as for :func:`read`.
    deduplication_mode
        ``none``, ``dropCarryovers`` or ``netChanges``, as for :func:`~penstock.changes.post_process`.
    compute_updates
        Whether a delete and an insert of one row in one commit become an update.
    strategy
        ``micro_batch`` for commits that are whole in a micro-batch (stateless; append and update mode),
        ``watermark`` for others (append mode), or ``auto``, which follows the feed's contract.
    watermark_delay
        For ``watermark``: how far a commit's time may lag behind the newest time of earlier micro-batches.
        Set it if the times of the feed repeat or go backwards; otherwise such a commit fails the query.
    keep_watermark
        For ``watermark``: whether the result keeps a watermark on the commit time.
    net_window
        For ``netChanges``: ``commit``, or an interval of commit time such as ``1 hour``. An interval needs
        the ``watermark`` strategy, because it may span several micro-batches. Its net changes are emitted
        when the query has read a commit after its end.
    columns
        The column or columns to read, as for :func:`read`.
    finalized_until
        Whether to add a column ``_finalized_until``: the time before which the stream has all commits of the
        feed after it has processed the row's micro-batch, NULL if the time is unknown. A replay of the
        micro-batch has the same time.
    options
        Further options of the data source: ``maxCommitsPerTrigger`` and ``maxRowsPerTrigger`` (rounded up to
        a whole commit), ``rowsPerTask``.

    Raises
    ------
    InvalidChangeOptionError, InvalidChangelogSchemaError, FeedUnavailableError
    """
    return _changes(
        spark,
        feed,
        columns,
        (starting_version, starting_timestamp, starting_bound_inclusive),
        (ending_version, ending_timestamp, ending_bound_inclusive),
        options,
        ChangeOptions.of(
            deduplication_mode, compute_updates, net_window, strategy, watermark_delay, keep_watermark
        ),
        streaming=True,
        finalized_until=flag("finalized_until", finalized_until),
    )


def _changes(
    spark: SparkSession,
    feed: Feed | str,
    columns: str | Sequence[str] | None,
    starting: tuple[object, ...],
    ending: tuple[object, ...],
    options: Mapping[str, object] | None,
    passes: ChangeOptions,
    *,
    streaming: bool,
    finalized_until: bool = False,
) -> DataFrame:
    require("options", options, Mapping | None, "a mapping such as {'rowsPerTask': 100_000}")
    if any(str(name).lower() == "url" for name in options or ()):
        raise InvalidChangeOptionError(
            "options has a url, but feed already has one: leave url out of options", option="url"
        )
    check_session(spark)
    feed = parse(feed) if isinstance(feed, str) else feed
    require("feed", feed, Feed, "a change feed, such as penstock.DeltaFeed('/data/orders'), or its URL")
    if finalized_until and passes.net_changes and passes.net_window != COMMIT:
        raise InvalidChangeOptionError(
            "finalized_until is the time of one micro-batch, and the net changes of a window span several "
            "micro-batches: leave finalized_until out, or set net_window='commit'",
            option="finalizedUntil",
        )
    bounds = dict(zip((*STARTING, *ENDING), (*starting, *ending), strict=True))
    texts = {name: _text(value) for name, value in {**bounds, **(options or {})}.items() if value is not None}
    # Check the options now, so that errors are raised to the caller and not when the query runs.
    read_options({"url": feed.url, **texts}, STREAM if streaming else BATCH, "read of changes")
    first = texts.get("startingVersion")
    with closing(feed.open()) as opened:
        description = opened.describe(None if first is None else int(first) - 1)
    contract = description.contract
    if description.plan is not None:
        texts |= {"plan": description.plan, "someColumns": _text(columns is not None)}
    schema = to_struct(description.schema)
    if contract is not None:
        schema = with_contract_metadata(schema, contract, net=passes.net_changes)
    if columns is not None:
        names = column_names("columns", columns)
        schema = select_columns(schema, contract, names, case_sensitive=is_case_sensitive(spark))
    if finalized_until:
        finality.refuse_column(description.schema.names)
        schema = StructType([*schema, *to_struct(pa.schema([finality.FIELD]))])
        texts |= {"finalizedUntil": "true"}
    register_source(spark, ChangesDataSource)
    reader = spark.readStream if streaming else spark.read
    rows = reader.format(FORMAT).schema(schema).options(**texts, url=feed.url).load()
    return process(rows, _contract_for(passes, contract), passes)


def _contract_for(passes: ChangeOptions, contract: ChangeContract | None) -> ChangeContract:
    """Return a feed's contract; for a feed without one, a contract that needs no pass."""
    if contract is not None:
        return contract
    if passes.net_changes:
        raise InvalidChangelogSchemaError(
            "net changes need the columns that identify rows: set row_id of the feed, or row_id=COLUMN in "
            "its URL",
            condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
        )
    # Such a feed has no carry-over rows, and no updates as a delete and an insert.
    return ChangeContract(COMMIT_VERSION)


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value).lower() if isinstance(value, bool) else str(value)


def local_changes(
    feed: OpenFeed, after: int, upto: int, options: ChangeOptions, description: Description | None = None
) -> Iterator[pa.Table]:
    """Yield the changes of a range in commit order, as tables of several commits; net changes as one table.

    This reads in the current process, without a Spark session.
    """
    description = description or feed.describe(after)
    contract = _contract_for(options, description.contract)
    passes = Passes.of(contract, options)
    layout = None
    if passes:
        layout = layout_of(to_struct(description.schema), contract, case_sensitive=True)
    ranges = [(after, upto)] if passes.net == EVER else _ranges_of_commits(feed, after, upto)
    for first, last in ranges:
        tasks = feed.tasks(first, last, _ROWS_PER_TASK)
        batches = [batch for task in tasks for batch in feed.read(task, description.planned_schema)]
        table = pa.Table.from_batches(batches, schema=description.schema)
        if layout is not None and table.num_rows:
            rows = ChangeRows(table, layout)
            check_rows(rows, needs_content=passes.needs_content)
            table = passes.run(rows).table
        yield table.sort_by(_COMMIT_ORDER)


def _ranges_of_commits(feed: OpenFeed, after: int, upto: int) -> Iterator[tuple[int, int]]:
    """Divide a range into ranges of whole commits of at most _ROWS_PER_TABLE rows, or of one commit."""
    rows, first, last = 0, after, after
    for commit in feed.commits(after, upto):
        if rows and rows + commit.rows > _ROWS_PER_TABLE:
            yield first, last
            rows, first = 0, last
        rows, last = rows + commit.rows, commit.version
    if last > first:
        yield first, last
