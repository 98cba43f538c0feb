"""``DebeziumFeed``: conversion of Debezium's change events to change rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, TimestampType

from penstock.arguments import column_names, did_you_mean, in_quotes, require
from penstock.arrow.schema import canonical_schema
from penstock.changes.debezium.columns import ExpectedColumns, ImageReader, is_supported, text_type
from penstock.changes.debezium.decoding import Encoding
from penstock.changes.debezium.envelope import CONNECTORS, Envelope, split_path
from penstock.changes.debezium.tasks import OWN, SEQUENCE, DeadLetterQueue, EventConverter, QueueAddress
from penstock.changes.options import ChangeOptions, invalid_option
from penstock.changes.post_processing import process
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COORDINATES,
    REASON,
    ChangeContract,
    convert_fields,
    invalid_schema,
)
from penstock.feeds.protocol import check_reserved
from penstock.spark.internals.plans import fingerprint
from penstock.spark.schemas import quote_column, to_struct, with_feed_metadata

_UNITS = ("micros", "millis", "nanos")


@dataclass(frozen=True)
class DebeziumFeed:
    """Debezium change events in JSON, with or without a schema in each event.

    ``unwrap`` converts any DataFrame with such events in a column, streaming or not, to change rows: an
    update becomes a pre-image (if the event has one) and a post-image, a delete becomes a delete, and a
    create or a snapshot read becomes an insert. Tombstones and other events that are not changes (heartbeats,
    begin and end of transactions, messages) are skipped and counted. Events that cannot be converted are
    refused: they fail the query, or go to a dead letter queue, with the reason and their position in the
    topic. These include the truncation of a table, and an event with an unchanged TOAST value.

    The version of a change is the position of the event in the source's log, which depends on the connector:
    the versions of one row's changes increase, and only the two rows of an update share a version. Each event
    of a transaction has its own version, and transactions may interleave. ``_sequence`` orders the changes of
    a version. A micro-batch may end inside a transaction, so the contract has ``whole_commits=False``.

    ======================= ============================== ==================================================
    connector               version                        sequence, if the event has no
                                                           ``transaction.total_order``
    ======================= ============================== ==================================================
    ``postgresql``          bigint, ``source.lsn``         ``source.lsn``
    ``mysql``, ``mariadb``  string, file, position and row ``source.pos`` and ``source.row``
    ``oracle``              string, ``source.scn`` and     ``source.ssn``
                            ``source.ssn``
    ``sqlserver``           string, commit, change and     ``source.event_serial_no``
                            serial number
    ======================= ============================== ==================================================

    An event with a schema (``schemas.enable=true``) declares how its values are encoded: scale of decimals,
    unit of times, bytes or text. (time.precision.mode=isostring needs this.) Otherwise a value has to have
    the form of its column's type:

    ==================== ======================================================================
    type                 form
    ==================== ======================================================================
    integers             an integer, as number or text; also the count of a time
    float, double        a number, ``NaN`` or ``Infinity``; at most the digits that the type has
    decimal              see ``decimals``
    boolean              ``true``, ``false``, 0 or 1
    date                 days since 1970, or ISO text
    timestamp_ntz        a count since 1970 (see ``timestamps``), or ISO text without a zone
    timestamp            ISO text with a zone
    binary               see ``binaries``
    string               as it is
    ==================== ======================================================================

    The same holds for the values in arrays, maps and structs. A value that does not fit exactly is refused.
    Without a schema in the events, some values of another type are accepted: see the documentation on schema
    changes. A row has to have the columns of the schema: an event with an additional or a missing column is
    refused, unless ``ignored`` or ``optional`` names it. Fields of structs may be missing, and are NULL then.

    Parameters
    ----------
    schema
        The table's columns: a ``StructType``, or DDL such as ``id bigint not null, name string``.
    row_id
        The columns of its primary key.
    value
        The column that holds the events, string or binary; Kafka's by default.
    connector
        ``postgresql``, ``mysql``, ``mariadb``, ``oracle`` or ``sqlserver``.
    version
        Another field as the version, such as ``source.ts_ms`` or ``transaction.id``; it has to increase with
        each commit. A table that applies changes then needs a ``sequence_by`` that orders all changes of a
        row.
    version_type
        ``bigint`` or ``string`` (compared as text), for ``version``.
    timestamps
        The unit of counts for timestamps: ``micros`` (time.precision.mode=adaptive for columns of 4 to 6
        digits), ``millis`` (3 digits and less, or time.precision.mode=connect) or ``nanos``, for all columns
        or for each by name. The counts of the connectors are local times, which are timestamp_ntz. For a
        timestamp column, name it here if its counts are instants; otherwise counts are refused.
    decimals
        ``string`` for decimal.handling.mode=string or double, ``precise`` for base64 of the unscaled value,
        with the scale of the column. The numbers of Kafka Connect's decimal.format=NUMERIC are not supported:
        long ones would be rounded.
    binaries
        ``base64`` or ``hex``, as binary.handling.mode.
    unavailable
        The placeholder that the PostgreSQL connector sends for an unchanged TOAST value, also in arrays and
        maps. Such an event is refused; ALTER TABLE … REPLICA IDENTITY FULL sends the values. With None the
        text is an ordinary value.
    dead_letters
        A queue for refused events, with the schema ``DEAD_LETTERS``: anything with ``queue`` and ``url``,
        such as ``penstock.QueueSink("dead", url=…)``. A repeated micro-batch of a stream writes each event
        once, if it has the same tasks; a batch DataFrame writes them each time it is evaluated.
        Without a queue, a refused event fails the query.
    optional
        Columns that may be missing from events and are NULL then, such as columns that were added or dropped
        later. ``"*"`` for all.
    ignored
        Columns of the table to leave out, which are not in the schema; ``"*"`` for all of them.
    name
        The name of the counts ``events``, ``tombstones`` and ``others`` in a query's progress
        (``observedMetrics``); feeds in one query need different names.

    Raises
    ------
    InvalidChangelogSchemaError, InvalidChangeOptionError
        Immediately, for invalid parameters.
    """

    schema: StructType | str
    row_id: Sequence[str] | str
    value: str = "value"
    connector: str = "postgresql"
    version: str | None = None
    version_type: str = "bigint"
    timestamps: str | Mapping[str, str] = "micros"
    decimals: str = "string"
    binaries: str = "base64"
    unavailable: str | None = "__debezium_unavailable_value"
    dead_letters: QueueAddress | None = None
    optional: Sequence[str] | str = ()
    ignored: Sequence[str] | str = ()
    name: str = "debezium"

    def __post_init__(self) -> None:
        convert_fields(
            self,
            row_id=ChangeContract(self.row_id).row_id,
            optional=column_names("optional", self.optional),
            ignored=column_names("ignored", self.ignored),
        )
        require("timestamps", self.timestamps, str | Mapping, f"one of {', '.join(_UNITS)}, or one by column")
        require("value", self.value, str, "a column's name")
        require("dead_letters", self.dead_letters, QueueAddress | None, "a penstock.QueueSink")
        units = [self.timestamps] if isinstance(self.timestamps, str) else self.timestamps.values()
        for option, value, known in (
            ("connector", self.connector, CONNECTORS),
            ("version_type", self.version_type, ("bigint", "string")),
            ("decimals", self.decimals, ("string", "precise")),
            ("binaries", self.binaries, ("base64", "hex")),
            *(("timestamps", unit, _UNITS) for unit in units),
        ):
            if value not in known:
                advice = f"give one of {', '.join(known)}.{did_you_mean(str(value), known)}"
                raise invalid_option(option, value, advice)
        if self.version is not None:
            split_path(self.version)

    @property
    def contract(self) -> ChangeContract:
        """The contract of the change rows."""
        return ChangeContract(
            row_id=self.row_id,
            intermediate_changes=True,
            whole_commits=False,
            sequence=SEQUENCE,
            # A custom version does not identify an event, and several changes of a row may have one SCN.
            repeated_changes=self.version is None and self.connector != "oracle",
        )

    def unwrap(self, df: DataFrame) -> DataFrame:
        """Convert events to change rows.

        They have the schema's columns, ``_change_type``, ``_commit_version``, ``_commit_timestamp`` and
        ``_sequence``.

        Parameters
        ----------
        df
            Events in the column ``value``; the columns ``topic``, ``partition`` and ``offset`` of Kafka, if
            there are any, are reported with refused events.

        Raises
        ------
        InvalidChangelogSchemaError
            When a column does not exist, or the name of one is reserved for metadata.
        QueueNotFoundError, SchemaMismatchError
            When the dead letter queue does not exist, or does not have the schema ``DEAD_LETTERS``.
        """
        require("df", df, DataFrame, "a DataFrame with the events")
        columns = self._columns()
        envelope = Envelope(self.connector, self.version, self.version_type)
        reader = self._image_reader(columns)
        events = self._events(df, envelope, reader).observe(
            self.name,
            F.count(F.lit(1)).alias("events"),
            F.count_if("tombstone").alias("tombstones"),
            F.count_if("other").alias("others"),
        )
        dead_letters = None
        if self.dead_letters is not None:
            dead_letters = DeadLetterQueue.look_up(
                df.sparkSession, self.dead_letters, f"{self.name}:{fingerprint(df)}"
            )
        return (
            events.where("NOT tombstone AND NOT other")
            .drop("tombstone", "other")
            .mapInArrow(EventConverter(reader, dead_letters), self._result(columns, envelope))
        )

    def read(
        self,
        df: DataFrame,
        *,
        deduplication_mode: str = "dropCarryovers",
        compute_updates: bool = False,
        net_window: str | None = None,
        watermark_delay: str = "1 minute",
    ) -> DataFrame:
        """``unwrap`` events and run the requested passes; see :func:`penstock.changes.post_process`.

        Parameters
        ----------
        watermark_delay
            For net changes on a stream: how far a commit may lag behind the newest one. All parts of a
            transaction have the same time.
        """
        options = ChangeOptions.of(
            deduplication_mode, compute_updates, net_window, watermark_delay=watermark_delay
        )
        return process(self.unwrap(df), self.contract, options)

    def _events(self, df: DataFrame, envelope: Envelope, reader: ImageReader) -> DataFrame:
        """Parse the events, and add the reason to those that are refused."""
        if self.value not in df.columns:
            raise invalid_schema(
                "MISSING_COLUMN",
                self.value,
                f"there is no column {in_quotes(self.value)} with "
                f"events.{did_you_mean(self.value, df.columns)} Pass its name as value",
            )
        raw = F.col(quote_column(self.value)).cast("string").alias("raw")
        # One select for each step, because later steps use the parsed columns many times.
        images = StructType(
            [StructField(field.name, text_type(field.dataType)) for field in to_struct(reader.schema)]
        )
        wrapped = df.select(*_coordinates(df), raw).select(
            "*", envelope.wrapped(F.col("raw"), images).alias("wrapped")
        )
        unwrapped = wrapped.select("*", envelope.parsed.alias("parsed")).select(
            "*", envelope.without_schema(F.col("parsed")).alias("e"), envelope.is_malformed.alias("broken")
        )
        positioned = unwrapped.select(
            "*",
            envelope.version().alias("version"),
            envelope.timestamp().alias("timestamp"),
            envelope.sequence().alias("sequence"),
            F.when(F.col("e.op").isNull(), F.get_json_object("raw", "$.ddl")).alias("ddl"),
        )
        names = (
            envelope.names(F.col("raw")) if reader.columns.are_checked else F.lit(None).cast("array<string>")
        )
        return positioned.select(
            *COORDINATES,
            F.col("raw").alias("value"),
            envelope.is_tombstone(F.col("raw")).alias("tombstone"),
            envelope.is_other_event(F.col("raw")).alias("other"),
            names.alias("names"),
            "e.op",
            "e.before",
            "e.after",
            "parsed.schema",
            "version",
            "timestamp",
            "sequence",
            envelope.reason().alias(REASON),
        )

    def _columns(self) -> StructType:
        columns = _parsed_schema(self.schema)
        check_reserved(columns.names, "the schema", OWN)
        for field in canonical_schema(columns):
            if not is_supported(field.type):
                raise invalid_schema(
                    "INVALID_COLUMN_TYPE",
                    field.name,
                    f"the column {in_quotes(field.name)} is {columns[field.name].dataType.simpleString()}, "
                    "which is not supported: read it as bigint or string, and convert it",
                )
        units = () if isinstance(self.timestamps, str) else self.timestamps
        optional = [name for name in self.optional if name != "*"]
        for option, names in (("optional", optional), ("row_id", self.row_id), ("timestamps", units)):
            unknown = next((name for name in names if name not in columns.names), None)
            if unknown is not None:
                raise invalid_schema(
                    "MISSING_COLUMN",
                    unknown,
                    f"{option} has the column {in_quotes(unknown)}, which is not in the "
                    f"schema.{did_you_mean(unknown, columns.names)}",
                )
        return columns

    def _image_reader(self, columns: StructType) -> ImageReader:
        return ImageReader(
            canonical_schema(columns),
            tuple(self.row_id),
            {name: self._encoding(name) for name in columns.names},
            self.unavailable,
            ExpectedColumns(tuple(columns.names), tuple(self.optional), tuple(self.ignored)),
        )

    def _encoding(self, column: str) -> Encoding:
        units = self.timestamps
        precise = self.decimals == "precise"
        if isinstance(units, str):
            return Encoding(units, precise=precise, binaries=self.binaries)
        is_named = column in units
        return Encoding(units.get(column, "micros"), is_named, precise, self.binaries)

    def _result(self, columns: StructType, envelope: Envelope) -> StructType:
        ids = set(self.row_id)
        data = [StructField(field.name, field.dataType, field.name not in ids) for field in columns]
        added_types: list[DataType] = [StringType(), envelope.version_type, TimestampType(), LongType()]
        added = [StructField(name, kind, False) for name, kind in zip(OWN, added_types, strict=True)]
        return with_feed_metadata(
            StructType([*data, *added]),
            ids,
            sequence=SEQUENCE,
            ordered=CHANGE_TYPE,
            split=self.version is not None,
        )


def _coordinates(df: DataFrame) -> list[Column]:
    kinds = {"topic": "string", "partition": "int", "offset": "bigint"}
    return [
        (F.col(name) if name in df.columns else F.lit(None)).cast(kind).alias(name)
        for name, kind in kinds.items()
    ]


def _parsed_schema(schema: StructType | str) -> StructType:
    struct: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(struct, StructType) or not struct.names:
        raise invalid_schema(
            "MISSING_COLUMN",
            "schema",
            f"the schema is {in_quotes(schema)}: give a StructType or DDL with columns",
        )
    return struct
