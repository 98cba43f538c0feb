"""The envelope of an event: where it stands in the source's log, and whether it can be taken.

The fields are those of Debezium 1.9 to 3 (https://debezium.io/documentation/reference/stable/connectors/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from penstock.errors import InvalidChangeOption

CONNECTORS = ("postgresql", "mysql", "mariadb", "oracle", "sqlserver")
_BROKEN = "__penstock_broken"
_NUMBERS = ("ts_ms", "ts_us", "lsn", "pos", "row", "event_serial_no", "ssn")
_TEXTS = ("file", "scn", "commit_lsn", "change_lsn")
_DIGITS = 20
_LAST = 253_402_300_799_999_999
"""The end of the year 9999 in microseconds."""
_POSITION_BITS = 20
"""For the number of a row in a binlog event, beside the event's position."""
_TRANSACTION = ("data_collections", "event_count", "id", "status", "ts_ms")
"""What an event says that a transaction begins or ends with; older ones say no time."""
_TOMBSTONE = r'^\s*(null|\{\s*"schema"\s*:\s*null\s*,\s*"payload"\s*:\s*null\s*\})\s*$'


@dataclass(frozen=True)
class Place:
    """A field of the envelope, such as ``source.lsn``."""

    parent: str
    field: str

    @classmethod
    def named(cls, path: str) -> Place:
        """Parse a path.

        Raises
        ------
        InvalidChangeOption
            For a field of anything else.
        """
        parent, dot, field = path.partition(".")
        if not dot or not field or "." in field or parent not in ("source", "transaction"):
            raise InvalidChangeOption(
                f"version={path!r}: give a field of source or transaction, such as source.ts_ms",
                option="version",
                value=path,
            )
        return cls(parent, field)


@dataclass(frozen=True)
class Envelope:
    """How envelopes of one connector are read."""

    connector: str
    version_field: str | None
    version_kind: str

    def wire(self, image: StructType) -> StructType:
        """The type that an envelope is parsed into."""
        source = [StructField(name, LongType()) for name in _NUMBERS]
        source += [StructField(name, StringType()) for name in _TEXTS]
        transaction = [StructField("total_order", LongType())]
        if self.version_field is not None:
            place = Place.named(self.version_field)
            # Under another type too where it is one of those above: it is taken as text.
            fields = source if place.parent == "source" else transaction
            fields[:] = [each for each in fields if each.name != place.field]
            fields.append(StructField(place.field, StringType()))
        return StructType(
            [
                StructField("before", image),
                StructField("after", image),
                StructField("op", StringType()),
                StructField("ts_ms", LongType()),
                StructField("source", StructType(source)),
                StructField("transaction", StructType(transaction)),
            ]
        )

    def parsed(self, raw: Column, image: StructType) -> Column:
        """The event by its type, with and without the schema around it."""
        envelope = self.wire(image)
        both = StructType(
            [StructField("payload", envelope), *envelope.fields, StructField(_BROKEN, StringType())]
        )
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BROKEN}
        return F.from_json(raw, both, options)

    def opened(self, parsed: Column) -> Column:
        """The envelope itself."""
        names = ("before", "after", "op", "ts_ms", "source", "transaction")
        bare = F.struct(*(parsed[name].alias(name) for name in names))
        return F.coalesce(parsed["payload"], bare)

    @property
    def broken(self) -> Column:
        """Whether the event could not be parsed."""
        return F.col("parsed").isNull() | F.col("parsed")[_BROKEN].isNotNull()

    def tombstone(self, raw: Column) -> Column:
        """Whether the event only says that Kafka may forget its key."""
        return raw.isNull() | raw.rlike(_TOMBSTONE)

    def other(self, raw: Column) -> Column:
        """Whether the event is one of those that Debezium writes beside the changes of rows: a heartbeat, where a transaction begins or
        ends, or a message of ``pg_logical_emit_message``. Each is known by all that it has, so that nothing else is taken for it.
        """
        names = F.array_sort(F.json_object_keys(F.coalesce(F.get_json_object(raw, "$.payload"), raw)))
        status = F.coalesce(F.get_json_object(raw, "$.payload.status"), F.get_json_object(raw, "$.status"))
        heartbeat = names == F.array(F.lit("ts_ms"))
        boundary = F.size(F.array_except(names, _literals(_TRANSACTION))) == 0
        boundary &= F.size(F.array_except(_literals(_TRANSACTION[:-1]), names)) == 0
        boundary &= status.isin("BEGIN", "END")
        message = (F.col("e.op") == "m") & F.col("e.before").isNull() & F.col("e.after").isNull()
        # The names are looked at for what is no change event alone.
        beside = F.when(F.col("e.op").isNull() & ~F.col("broken"), heartbeat | boundary).otherwise(message)
        return F.coalesce(beside, F.lit(False))

    def names(self, raw: Column) -> Column:
        """The names of the columns that the row has after the change."""
        whole = F.coalesce(F.get_json_object(raw, "$.after"), F.get_json_object(raw, "$.payload.after"))
        return F.json_object_keys(whole)

    @property
    def version_type(self) -> DataType:
        if self.version_field is None:
            return LongType() if self.connector == "postgresql" else StringType()
        return LongType() if self.version_kind == "bigint" else StringType()

    def version(self) -> Column:
        """The position of the event in the source's log, or the field that stands for it; NULL where it is missing."""
        if self.version_field is not None:
            return F.col(f"e.{self.version_field}").try_cast(self.version_type)
        if self.connector == "postgresql":
            return self._number("lsn")
        if self.connector == "oracle":
            return F.concat(F.lpad(F.col("e.source.scn"), _DIGITS, "0"), F.lit(":"), self._padded("ssn"))
        if self.connector == "sqlserver":
            # A snapshot has the first one only.
            change = F.coalesce(F.col("e.source.change_lsn"), F.lit(""))
            serial = self._padded("event_serial_no")
            return F.concat(F.col("e.source.commit_lsn"), F.lit("/"), change, F.lit("/"), serial)
        file = F.col("e.source.file")
        number = F.regexp_extract(file, r"(\d+)$", 1)
        stem = F.expr(
            "left(e.source.file, length(e.source.file) - length(regexp_extract(e.source.file, '([0-9]+)$', 1)))"
        )
        position = F.lpad(self._number("pos").cast("string"), _DIGITS, "0")
        return F.concat(
            stem, F.lpad(number, _DIGITS, "0"), F.lit(":"), position, F.lit(":"), self._padded("row")
        )

    def _padded(self, name: str) -> Column:
        """A number that orders the events of one position; 0 where there is none."""
        return F.lpad(F.coalesce(self._number(name), F.lit(0)).cast("string"), _DIGITS, "0")

    def timestamp(self) -> Column:
        """When the source committed; when the event was made, where that is not told."""
        told = (self._number("ts_us"), 1), (self._number("ts_ms"), 1000), (F.col("e.ts_ms"), 1000)
        # Old connectors say 0 for a time that they do not know.
        micros = (F.when(count.between(1, _LAST // per), count * per) for count, per in told)
        return F.timestamp_micros(F.coalesce(*micros))

    def sequence(self) -> Column:
        """What orders the changes of one version."""
        own = {"postgresql": "lsn", "oracle": "ssn", "sqlserver": "event_serial_no"}.get(self.connector)
        if own is not None:
            by_source = self._number(own)
        else:
            row = F.coalesce(self._number("row"), F.lit(0))
            by_source = F.shiftleft(self._number("pos"), _POSITION_BITS) + row
        return F.coalesce(F.col("e.transaction.total_order"), by_source, F.lit(0).cast("bigint"))

    def reason(self) -> Column:
        """Why the event cannot be taken, whatever its images hold; NULL for one that can."""
        op = F.col("e.op")
        shown = F.coalesce(self._version_name(), F.lit("the version"))
        cases = [
            (
                F.col("broken"),
                F.lit("it is no JSON object, or a field of it has another type than it has to have"),
            ),
            (
                F.col("ddl").isNotNull() & op.isNull(),
                F.lit(
                    "it tells of a statement that changes the tables, and of no row: leave the topic of the schema changes out of what "
                    "is read"
                ),
            ),
            (op.isNull(), F.lit("op is missing: it is no change event of Debezium's")),
            (op == "t", F.lit("it truncates the table, which no change of a row can tell")),
            (
                ~op.isin("c", "r", "u", "d"),
                F.concat(F.lit("op is none of c, r, u, d: "), F.left(op, F.lit(20))),
            ),
            ((op != "d") & F.col("e.after").isNull(), F.lit("after is missing")),
            (
                (op == "d") & F.col("e.before").isNull(),
                F.lit("before is missing: the table's REPLICA IDENTITY is NOTHING"),
            ),
            (F.col("version").isNull(), F.concat(shown, F.lit(" is missing, or of another type"))),
            (F.col("timestamp").isNull(), F.lit("source.ts_ms is missing")),
        ]
        return F.coalesce(*(F.when(when, why) for when, why in cases))

    def _version_name(self) -> Column:
        names = {
            "postgresql": "source.lsn",
            "oracle": "source.scn",
            "sqlserver": "source.commit_lsn",
        }
        return F.lit(self.version_field or names.get(self.connector, "source.file or source.pos"))

    def _number(self, name: str) -> Column:
        # As text where it is the version that was asked for.
        return F.col(f"e.source.{name}").try_cast("bigint")


def _literals(names: Sequence[str]) -> Column:
    return F.array(*map(F.lit, names))
