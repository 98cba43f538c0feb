"""``TableSink``: a SQL, Delta or Iceberg table as the sink of a streaming query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from penstock.arguments import column_names, did_you_mean, in_quotes, require
from penstock.continuous.connectors.ledger import LedgerCommits
from penstock.continuous.connectors.protocol import ContinuousSink
from penstock.errors import (
    ContinuousRefusedError,
    InvalidInputError,
    InvalidOptionError,
    InvalidUrlError,
    PenstockError,
    TableRefusedError,
)
from penstock.feeds.contract import COMMIT_VERSION
from penstock.lake.storage import is_delta
from penstock.queue.checks import check_name
from penstock.queue.store import connect
from penstock.spark.connectors import Binding, Sink, WriteSettings
from penstock.spark.internals.plan_nodes import groups_by_session
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.plans import streaming_reads
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.internals.sessions import is_classic
from penstock.spark.schemas import COORDINATES
from penstock.spark.session import URL_SETTING, default_url
from penstock.store.database import Transaction
from penstock.store.url import parse_url
from penstock.tables.columns import Layout, layout_of
from penstock.tables.continuous import TableSinkDriver
from penstock.tables.iceberg.location import is_iceberg
from penstock.tables.lake_table import AnyLakeTable, BatchWriter, lake_table
from penstock.tables.names import TableName, resolve
from penstock.tables.row_checks import require_row_id, tie_breakers
from penstock.tables.sql import apply, ddl, evolution
from penstock.tables.sql.writer import CHANGES, TableWriter
from penstock.tables.unchanged_values import UnchangedValues

MODES = ("append", "update", "complete")
_SCD_TYPES = (1, 2)
REFUSE, EVOLVE, IGNORE = SCHEMA_CHANGES = ("refuse", "evolve", "ignore")


@dataclass(frozen=True)
class TableSink(Sink, ContinuousSink):
    """Sink for a SQL table in a store's database, a Delta table or an Iceberg table.

    Parameters
    ----------
    name
        The table's name: any Unicode text, ``schema.table`` in PostgreSQL, or
        ``iceberg:catalog.namespace.table`` for an Iceberg table in a catalog of pyiceberg's configuration. A
        table that does not exist is created.
    keys
        The key columns, which cannot be NULL. Required in output mode update and with ``apply_changes``; for
        the latter, they must include the columns by which the feed identifies rows.
    url
        The store, created if it does not exist; by default the session's ``spark.penstock.url``.
        ``delta:///folder`` or ``delta:s3://bucket/folder?storage.KEY=VALUE`` for a Delta table in that
        folder, with deltalake's storage options. ``iceberg:CATALOG?property.KEY=VALUE`` for an Iceberg
        table, whose name is then ``namespace.table``, with pyiceberg's properties of the catalog.
    app_id
        The identity of the query in the ledger; by default the query id in its checkpoint.
    allow_new_checkpoint
        Whether a stateful query may start with a new checkpoint, and so with empty state, although its
        consumer belongs to an earlier checkpoint.
    allow_new_sink
        Whether a query with an existing checkpoint may write to a table that has none of its earlier rows:
        for a query that is switched to another table.
    apply_changes
        Whether the rows are change rows, as ``penstock.changes`` returns them. Inserts and updates then
        replace the row with their key, and deletes remove it. The output mode is append.
    scd_type
        How changes are applied. With 1, the table has the current rows. With 2, it has every version of a
        row: ``_valid_from`` is the sequence of the change that created the version, and ``_valid_to`` is the
        sequence of the next change of its key, or NULL for the current version.
    sequence_by
        The column that orders the changes of a key; by default ``_commit_version``. A change with a lower
        value than one that was applied before is dropped.
    schema_changes
        What to do if the rows have columns that the table lacks when a query starts. ``refuse``: do not
        start. ``evolve``: add the columns, and widen types that are too narrow, in PostgreSQL and, except for
        keys, in Iceberg. ``ignore``: leave the columns out. Otherwise, types that are too narrow are refused.
        Output mode complete always replaces the table's columns.
    """

    format: ClassVar[str] = "penstock table"
    """The name of this sink in the output mode check."""
    guarantees: ClassVar[tuple[str, ...]] = ("exactly_once", "idempotent", "at_least_once")
    output_modes: ClassVar[tuple[str, ...]] = MODES

    name: str
    keys: Sequence[str] = ()
    url: str | None = field(default=None, repr=False)
    app_id: str | None = field(default=None, kw_only=True)
    allow_new_checkpoint: bool = field(default=False, kw_only=True)
    allow_new_sink: bool = field(default=False, kw_only=True)
    apply_changes: bool = field(default=False, kw_only=True)
    scd_type: int = field(default=1, kw_only=True)
    sequence_by: str | None = field(default=None, kw_only=True)
    schema_changes: str = field(default=REFUSE, kw_only=True)

    def __post_init__(self) -> None:
        check_name("table", self.name)
        keys = column_names("keys", self.keys)
        if len(set(keys)) != len(keys):
            raise InvalidInputError(
                f"keys names a column twice: {', '.join(keys)}: name each once", parameter="keys"
            )
        object.__setattr__(self, "keys", keys)
        require("url", self.url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
        if self.url is not None and not (is_delta(self.url) or is_iceberg(self.url)):
            _check_store(self.url)
        require("app_id", self.app_id, str | None, "text")
        if self.app_id is not None:
            check_name("app", self.app_id)
        for flag in ("allow_new_checkpoint", "allow_new_sink", "apply_changes"):
            require(flag, getattr(self, flag), bool, "True or False")
        if self.schema_changes not in SCHEMA_CHANGES:
            raise InvalidOptionError(
                f"schema_changes is {' or '.join(SCHEMA_CHANGES)}, not {in_quotes(self.schema_changes)}."
                f"{did_you_mean(str(self.schema_changes), SCHEMA_CHANGES)}",
                condition="INVALID_OPTION.VALUE",
                option="schema_changes",
            )
        self._check_changes()

    def _check_changes(self) -> None:
        require("sequence_by", self.sequence_by, str | None, "a column's name")
        if self.scd_type not in _SCD_TYPES:
            raise InvalidOptionError(
                f"scd_type is 1 (current rows) or 2 (every version of a row), not {in_quotes(self.scd_type)}",
                condition="INVALID_OPTION.VALUE",
                option="scd_type",
            )
        for option, is_set, purpose in (
            ("scd_type", self.scd_type == 2, "scd_type=2 says how change rows are applied"),
            ("sequence_by", self.sequence_by is not None, "sequence_by orders change rows"),
        ):
            if is_set and not self.apply_changes:
                raise InvalidOptionError(
                    f"{purpose}: set apply_changes=True with it",
                    condition="INVALID_OPTION.MISSING",
                    option=option,
                )
        if self.apply_changes and not self.keys:
            raise InvalidOptionError(
                f"changes are applied by key: name the keys, TableSink({in_quotes(self.name)}, keys=[…])",
                condition="INVALID_OPTION.MISSING",
                option="keys",
            )

    def check(self, guarantee: str, output_mode: str) -> None:
        """Refuse a combination of settings that no table supports."""
        if guarantee == "idempotent":
            self._check_idempotent(output_mode)
        if output_mode not in MODES:
            raise InvalidOptionError(
                f"a table takes output mode {', '.join(MODES)}, not {in_quotes(output_mode)}."
                f"{did_you_mean(str(output_mode), MODES)}",
                condition="INVALID_OPTION.VALUE",
                option="output_mode",
            )
        if self.apply_changes and output_mode != "append":
            raise InvalidOptionError(
                f"apply_changes needs output mode append, not {in_quotes(output_mode)}: each change is "
                "applied by its own type",
                condition="INVALID_OPTION.CONFLICT",
                option="output_mode",
            )
        if output_mode == "update" and not self.keys:
            raise InvalidOptionError(
                "output mode update replaces the row with the same key: name the keys, "
                f"TableSink({in_quotes(self.name)}, keys=[…])",
                condition="INVALID_OPTION.MISSING",
                option="keys",
            )

    def refusal(
        self, frame: DataFrame, output_mode: str, *, continuous: bool = False
    ) -> PenstockError | None:
        """Return the error that keeps a pipeline of these rows from starting; the table is not read."""
        try:
            self.check("exactly_once", output_mode)
            self._check_rows(frame, output_mode, continuous)
        except PenstockError as error:
            return error
        return None

    def _check_rows(self, frame: DataFrame, output_mode: str, continuous: bool) -> None:
        # Check a sink without a configured store as a SQLite table.
        url = self.store_url(frame.sparkSession) or "sqlite:///penstock.db"
        if continuous:
            self._require_append_only(url, "exactly_once", output_mode)
        if self.apply_changes:
            require_row_id(frame.schema, self.keys)
        lake = self._lake_table(url)
        if lake is None:
            self._layout(TableName("", self.name), frame.schema, self.keys, parse_url(url).dialect)
        else:
            lake.layout(frame.schema, output_mode)

    def _check_idempotent(self, output_mode: str) -> None:
        """Refuse anything but appends, because rows are identified by their coordinates in the source."""
        if output_mode != "append" or self.apply_changes:
            setting = "changes" if self.apply_changes else f"output mode {in_quotes(output_mode)}"
            raise InvalidOptionError(
                f"guarantee=idempotent only appends rows, in output mode append, and this is {setting}: use "
                "guarantee=exactly_once",
                condition="INVALID_OPTION.CONFLICT",
                option="guarantee",
            )
        if self.keys and set(self.keys) != set(COORDINATES):
            raise InvalidOptionError(
                f"with guarantee=idempotent the keys are the metadata columns {', '.join(COORDINATES)}: "
                "leave keys out",
                condition="INVALID_OPTION.CONFLICT",
                option="keys",
            )

    def writer(self, frame: DataFrame, guarantee: str, output_mode: str, location: str) -> BatchWriter:
        """Create the table or check an existing one, and return the query's ``foreachBatch`` function."""
        self.check(guarantee, output_mode)
        if not is_classic(frame):
            raise TableRefusedError(
                "a table's commit needs the query id of its tasks, which Spark Connect does not report: use "
                "a classic session, or write to a QueueSink and fill the table from a query in a classic "
                "session",
                condition="TABLE_REFUSED.CLASSIC_SESSION_NEEDED",
            )
        if output_mode == "update":
            _refuse_session_windows(frame)
        if self.apply_changes:
            require_row_id(frame.schema, self.keys)
        spark = frame.sparkSession
        url = self.resolve_url(spark)
        lake = self._lake_table(url)
        if lake is not None:
            if guarantee == "idempotent":
                raise InvalidOptionError(
                    f"guarantee=idempotent needs unique keys, which {lake.format.description} does not "
                    "enforce: use guarantee=exactly_once",
                    condition="INVALID_OPTION.CONFLICT",
                    option="guarantee",
                )
            if self.schema_changes == EVOLVE and output_mode != "complete":
                lake.evolve(frame.schema, output_mode)
            return lake.writer(frame.schema, output_mode, guarantee, location, self.app_id)
        check_store_reach(url, spark.conf.get("spark.master", None))
        keys = self.keys
        if guarantee == "idempotent":
            _require_coordinates(frame)
            keys = COORDINATES
        return TableWriter(
            url,
            self.prepared(url, frame.schema, output_mode, keys),
            self.name,
            CHANGES if self.apply_changes else output_mode,
            guarantee,
            location,
            self.app_id,
            self.allow_new_checkpoint,
            self.allow_new_sink,
        )

    def stream_writer(self, rows: DataFrame, settings: WriteSettings) -> DataStreamWriter:
        if self.schema_changes == IGNORE and settings.output_mode != "complete":
            rows = rows.drop(*self._new_columns(rows, settings.output_mode))
        write = self.writer(rows, settings.guarantee, settings.output_mode, settings.checkpoint)
        return rows.writeStream.foreachBatch(write).option("checkpointLocation", settings.checkpoint)

    def _new_columns(self, rows: DataFrame, output_mode: str) -> list[str]:
        """Return the columns of a query that the table lacks."""
        url = self.resolve_url(rows.sparkSession)
        lake = self._lake_table(url)
        if lake is not None:
            return lake.new_columns(rows.schema, output_mode)

        def read_new_columns(tx: Transaction) -> list[str]:
            layout = self._layout(resolve(tx, self.name), rows.schema, self.keys, tx.dialect)
            return evolution.new_columns(tx, layout)

        with connect(url) as store:
            return store.database.run(read_new_columns, write=False)

    def _lake_table(self, url: str) -> AnyLakeTable | None:
        """Return the Delta or Iceberg table; None for a SQL table in the database of a store."""
        sequence_by = self._sequence_by if self.apply_changes else None
        return lake_table(url, self.name, self.keys, sequence_by, self.scd_type)

    @property
    def description(self) -> str:
        return f"table {self.name!r}"

    def store_url(self, spark: SparkSession) -> str | None:
        return self.url or (self.name if is_iceberg(self.name) else default_url(spark))

    def ledger_name(self, tx: Transaction) -> str:
        return resolve(tx, self.name).ledger_name

    def binding(self, spark: SparkSession) -> Binding | None:
        if self._lake_table(self.resolve_url(spark)) is not None:
            return None
        return Binding(self.app_id, self.allow_new_checkpoint)

    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> TableSinkDriver:
        url = self.resolve_url(spark)
        self._require_append_only(url, guarantee, output_mode)
        check_store_reach(url, spark.conf.get("spark.master", None))
        return self.driver(url, query_id, exactly_once=guarantee == "exactly_once")

    def record(self, spark: SparkSession, query_id: str) -> TableSinkDriver | None:
        url = self.resolve_url(spark)
        return None if self._lake_table(url) is not None else self.driver(url, query_id, exactly_once=True)

    def driver(self, url: str, query_id: str, *, exactly_once: bool) -> TableSinkDriver:
        """Return the driver side of a table in a store, for a continuous query."""
        return TableSinkDriver(
            self.name,
            url,
            lambda schema: self.prepared(url, schema, "append", self.keys),
            LedgerCommits(
                url,
                query_id,
                self.app_id or query_id,
                rebind=self.allow_new_checkpoint,
                new_sink=self.allow_new_sink,
            ),
            exactly_once,
        )

    def _layout(self, name: TableName, schema: StructType, keys: Sequence[str], dialect: str) -> Layout:
        if not self.apply_changes:
            return layout_of(name, schema, keys, dialect)
        return layout_of(
            name,
            schema,
            keys,
            dialect,
            sequence_by=self._sequence_by,
            history=self.scd_type == 2,
            unchanged=UnchangedValues.of(schema, keys),
            tie_breakers=tie_breakers(schema, self._sequence_by),
        )

    @property
    def _sequence_by(self) -> str:
        """The column that orders the changes of a key."""
        return self.sequence_by or COMMIT_VERSION

    def resolve_url(self, spark: SparkSession) -> str:
        """Return the URL of the store, of the folder of a Delta table, or of an Iceberg catalog."""
        url = self.store_url(spark)
        if url is None:
            raise InvalidOptionError(
                f"no store is named for the table {in_quotes(self.name)}: pass url, or set {URL_SETTING} on "
                "the session",
                condition="INVALID_OPTION.MISSING",
                option="url",
            )
        return url

    def _require_append_only(self, url: str, guarantee: str, output_mode: str) -> None:
        """Refuse a table that a continuous query, which only appends rows, cannot write."""
        sink, alternative = f"TableSink({in_quotes(self.name)})", "or use Trigger.processing_time"
        lake = self._lake_table(url)
        if lake is not None:
            reason = (
                f"{sink} is {lake.format.description}, which would get a version for each epoch: use a SQL "
                f"table, {alternative}"
            )
        elif self.apply_changes:
            reason = (
                f"{sink} applies changes, and a continuous query only appends rows: leave apply_changes out, "
                f"{alternative}"
            )
        elif output_mode != "append":
            reason = (
                f"output mode {in_quotes(output_mode)} replaces rows of {sink}, and a continuous query only "
                f"appends rows: use output_mode='append', {alternative}"
            )
        elif self.schema_changes == IGNORE:
            reason = (
                f"{sink} has schema_changes='ignore', and a continuous query does not leave out columns: use "
                f"'refuse' or 'evolve', or select the table's columns, {alternative}"
            )
        elif self.keys and guarantee == "at_least_once":
            reason = (
                f"{sink} has the keys {', '.join(self.keys)}, and with guarantee=at_least_once rows are "
                "repeated after a failure, when their keys exist already: use guarantee=exactly_once, or "
                "leave the keys out"
            )
        else:
            return
        raise ContinuousRefusedError(
            reason,
            condition="CONTINUOUS_REFUSED.SINK",
            sink="TableSink",
            table=self.name,
            guarantee=guarantee,
            output_mode=output_mode,
        )

    def prepared(self, url: str, schema: StructType, output_mode: str, keys: Sequence[str]) -> Layout:
        """Create the table, or check that the existing one accepts rows of a schema; return its layout."""

        def work(tx: Transaction) -> Layout:
            layout = self._layout(resolve(tx, self.name), schema, keys, tx.dialect)
            if self.schema_changes == EVOLVE and output_mode != "complete":
                evolution.evolve(tx, layout)
            if self.apply_changes:
                apply.prepare_tables(tx, layout)
            else:
                ddl.ensure_table(tx, layout, complete=output_mode == "complete")
            return layout

        with connect(url) as store:
            layout = store.database.run(work, idempotent=True)
            # Clean up after queries that died, since maintenance may not run on this machine.
            store.clean_up()
        return layout


def _check_store(url: str) -> None:
    try:
        parse_url(url)
    except InvalidUrlError as error:
        message = f"{error.message}; a folder of Delta tables is delta:///folder"
        raise InvalidUrlError(message, condition=error.condition, **error.parameters) from None


def _require_coordinates(frame: DataFrame) -> None:
    """Refuse rows without source coordinates, and rows of several reads, whose coordinates may be equal."""
    missing = [name for name in COORDINATES if name not in frame.columns]
    if missing:
        raise InvalidInputError(
            "guarantee=idempotent identifies rows by metadata columns, and these have no "
            f"{', '.join(missing)}: read the queue with QueueSource(…, options={{'includeMetadataColumns': "
            "True}), and keep the columns",
            condition="INVALID_INPUT.METADATA_COLUMNS_MISSING",
            parameter="guarantee",
        )
    if len(streaming_reads(frame) or ()) > 1:
        raise InvalidInputError(
            "guarantee=idempotent needs a query that reads its queue once, since a row that is read twice "
            "would be taken for a repeat: use guarantee=exactly_once",
            condition="INVALID_INPUT.SEVERAL_READS",
            parameter="guarantee",
        )


def _refuse_session_windows(frame: DataFrame) -> None:
    """Refuse session windows in output mode update: a session's key changes as it grows."""
    if not any(node.name == "Aggregate" and groups_by_session(node) for node in plan_tree(frame).walk()):
        return
    raise TableRefusedError(
        "the query has a session window, whose key changes as it grows, so output mode update would leave "
        "outdated rows in the table: use output mode append with a watermark, which writes each session once "
        "it is closed, or complete",
        condition="TABLE_REFUSED.SESSION_WINDOW",
    )
