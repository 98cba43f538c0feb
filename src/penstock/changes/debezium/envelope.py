"""The envelope of an event: its kind, its position in the source's log, and whether it can be converted.

The fields are those of Debezium 1.9 to 3 (https://debezium.io/documentation/reference/stable/connectors/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import ArrayType, DataType, LongType, StringType, StructField, StructType

from penstock.changes.options import invalid_option

CONNECTORS = ("postgresql", "mysql", "mariadb", "oracle", "sqlserver")
_MALFORMED = "__penstock_broken"
_PERMISSIVE = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MALFORMED}
_NUMBERS = ("ts_ms", "ts_us", "lsn", "pos", "row", "event_serial_no", "ssn")
_TEXTS = ("file", "scn", "commit_lsn", "change_lsn")
_DIGITS = 20
_LAST_MICROS = 253_402_300_799_999_999
"""The end of the year 9999 in microseconds."""
_POSITION_BITS = 20
"""Bits of a sequence that hold the number of the row in its binlog event; the rest holds the position."""
_TRANSACTION = ("data_collections", "event_count", "id", "status", "ts_ms")
"""The fields of a transaction boundary event; in older versions of Debezium it has no ``ts_ms``."""
_TOMBSTONE = r'^\s*(null|\{\s*"schema"\s*:\s*null\s*,\s*"payload"\s*:\s*null\s*\})\s*$'


def split_path(path: str) -> tuple[str, str]:
    """Split the path of a field of the envelope, such as ``source.lsn``."""
    parent, dot, field = path.partition(".")
    if not dot or not field or "." in field or parent not in ("source", "transaction"):
        raise invalid_option("version", path, "give a field of source or transaction, such as source.ts_ms")
    return parent, field


@dataclass(frozen=True)
class Envelope:
    """Reader for the envelopes of one connector."""

    connector: str
    version_field: str | None
    version_kind: str

    def parsed_type(self, image: StructType) -> StructType:
        """Return the Spark type that an envelope is parsed into."""
        source = [StructField(name, LongType()) for name in _NUMBERS]
        source += [StructField(name, StringType()) for name in _TEXTS]
        transaction = [StructField("total_order", LongType())]
        if self.version_field is not None:
            parent, name = split_path(self.version_field)
            # The version field is read as text, even if it is one of the fields above.
            fields = source if parent == "source" else transaction
            fields[:] = [field for field in fields if field.name != name]
            fields.append(StructField(name, StringType()))
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

    def wrapped(self, raw: Column, image: StructType) -> Column:
        """Parse an event, with or without the schema around it, as the first element of an array.

        Spark ignores text after a JSON object. The array has an empty object after the event, so that such
        text becomes an additional element or a parse error.
        """
        envelope = self.parsed_type(image)
        own = [StructField("schema", StringType()), StructField("payload", envelope)]
        events = ArrayType(StructType([*own, *envelope.fields]))
        both = StructType([StructField("events", events), StructField(_MALFORMED, StringType())])
        return F.from_json(F.concat(F.lit('{"events":['), raw, F.lit(",{}]}")), both, _PERMISSIVE)

    @property
    def parsed(self) -> Column:
        return F.get("wrapped.events", F.lit(0))

    def without_schema(self, parsed: Column) -> Column:
        names = ("before", "after", "op", "ts_ms", "source", "transaction")
        bare = F.struct(*(parsed[name].alias(name) for name in names))
        return F.coalesce(parsed["payload"], bare)

    @property
    def is_malformed(self) -> Column:
        return F.col("parsed").isNull() | F.col("wrapped")[_MALFORMED].isNotNull() | ~self._is_single

    @property
    def _is_single(self) -> Column:
        return F.coalesce(F.size("wrapped.events") == 2, F.lit(False))

    def has_more_text(self, raw: Column) -> Column:
        """Whether there is more text after a JSON object."""
        kind = StructType([StructField(_MALFORMED, StringType())])
        first = F.from_json(raw, kind, _PERMISSIVE)
        return ~self._is_single & first.isNotNull() & first[_MALFORMED].isNull()

    def is_tombstone(self, raw: Column) -> Column:
        """Whether the event is a tombstone, which removes a key from a compacted topic."""
        return raw.isNull() | raw.rlike(_TOMBSTONE)

    def is_other_event(self, raw: Column) -> Column:
        """Whether the event is not a row change but a heartbeat, a transaction boundary, or a message.

        All fields of the event have to match, so that no change is skipped by mistake.
        """
        names = F.array_sort(F.json_object_keys(F.coalesce(F.get_json_object(raw, "$.payload"), raw)))
        status = F.coalesce(F.get_json_object(raw, "$.payload.status"), F.get_json_object(raw, "$.status"))
        heartbeat = names == F.array(F.lit("ts_ms"))
        boundary = F.size(F.array_except(names, _literals(_TRANSACTION))) == 0
        boundary &= F.size(F.array_except(_literals(_TRANSACTION[:-1]), names)) == 0
        boundary &= status.isin("BEGIN", "END")
        message = (F.col("e.op") == "m") & F.col("e.before").isNull() & F.col("e.after").isNull()
        # The names of the fields are only checked for events without op.
        other = F.when(F.col("e.op").isNull() & ~F.col("broken"), heartbeat | boundary).otherwise(message)
        return F.coalesce(other, F.lit(False))

    def names(self, raw: Column) -> Column:
        """Return the names of the columns of the row after the change."""
        whole = F.coalesce(F.get_json_object(raw, "$.after"), F.get_json_object(raw, "$.payload.after"))
        return F.json_object_keys(whole)

    @property
    def version_type(self) -> DataType:
        if self.version_field is None:
            return LongType() if self.connector == "postgresql" else StringType()
        return LongType() if self.version_kind == "bigint" else StringType()

    def version(self) -> Column:
        """Return the position in the source's log, or the field used instead; NULL if missing."""
        if self.version_field is not None:
            return F.col(f"e.{self.version_field}").try_cast(self.version_type)
        if self.connector == "postgresql":
            return self._number("lsn")
        if self.connector == "oracle":
            return F.concat(F.lpad(F.col("e.source.scn"), _DIGITS, "0"), F.lit(":"), self._padded("ssn"))
        if self.connector == "sqlserver":
            # An event of a snapshot has only commit_lsn.
            change = F.coalesce(F.col("e.source.change_lsn"), F.lit(""))
            serial = self._padded("event_serial_no")
            return F.concat(F.col("e.source.commit_lsn"), F.lit("/"), change, F.lit("/"), serial)
        file = F.col("e.source.file")
        number = F.regexp_extract(file, r"(\d+)$", 1)
        stem = F.expr(
            "left(e.source.file, length(e.source.file) - length(regexp_extract(e.source.file, '([0-9]+)$', "
            "1)))"
        )
        position = F.lpad(self._number("pos").cast("string"), _DIGITS, "0")
        return F.concat(
            stem, F.lpad(number, _DIGITS, "0"), F.lit(":"), position, F.lit(":"), self._padded("row")
        )

    def _padded(self, name: str) -> Column:
        """Return a number that orders events at the same position, padded with zeros; 0 if it is missing."""
        return F.lpad(F.coalesce(self._number(name), F.lit(0)).cast("string"), _DIGITS, "0")

    def timestamp(self) -> Column:
        """Return the commit time of the source; if it is missing, the time at which the event was created."""
        times = (self._number("ts_us"), 1), (self._number("ts_ms"), 1000), (F.col("e.ts_ms"), 1000)
        # Old connectors write 0 for an unknown time.
        micros = (F.when(count.between(1, _LAST_MICROS // per), count * per) for count, per in times)
        return F.timestamp_micros(F.coalesce(*micros))

    def sequence(self) -> Column:
        """Return the number that orders the changes of one version."""
        own = {"postgresql": "lsn", "oracle": "ssn", "sqlserver": "event_serial_no"}.get(self.connector)
        if own is not None:
            by_source = self._number(own)
        else:
            row = F.coalesce(self._number("row"), F.lit(0))
            by_source = F.shiftleft(self._number("pos"), _POSITION_BITS) + row
        return F.coalesce(F.col("e.transaction.total_order"), by_source, F.lit(0).cast("bigint"))

    def reason(self) -> Column:
        """Return why the envelope of an event is refused; NULL if it is accepted."""
        op = F.col("e.op")
        names = {"postgresql": "source.lsn", "oracle": "source.scn", "sqlserver": "source.commit_lsn"}
        version = self.version_field or names.get(self.connector, "source.file or source.pos")
        cases = [
            (
                F.col("broken") & self.has_more_text(F.col("raw")),
                F.lit("there is more text after its JSON object: put one event in a message"),
            ),
            (F.col("broken"), F.lit("it is not a JSON object, or a field has the wrong type")),
            (
                F.col("ddl").isNotNull() & op.isNull(),
                F.lit("it is a schema change, not a row change: do not read the schema change topic"),
            ),
            (
                op.isNull(),
                F.lit(
                    "op is missing: it is not a Debezium change event, or the transformation "
                    "ExtractNewRecordState has flattened it: remove it from the connector"
                ),
            ),
            (op == "t", F.lit("it truncates the table, and a truncation has no change rows")),
            (
                ~op.isin("c", "r", "u", "d"),
                F.concat(F.lit("op is not one of c, r, u, d: "), F.left(op, F.lit(20))),
            ),
            ((op != "d") & F.col("e.after").isNull(), F.lit("after is missing")),
            (
                (op == "d") & F.col("e.before").isNull(),
                F.lit("before is missing: the table's REPLICA IDENTITY is NOTHING"),
            ),
            (F.col("version").isNull(), F.lit(f"{version} is missing, or has the wrong type")),
            (F.col("timestamp").isNull(), F.lit("source.ts_ms is missing")),
        ]
        return F.coalesce(*(F.when(when, why) for when, why in cases))

    def _number(self, name: str) -> Column:
        # A field that is used as the version is text.
        return F.col(f"e.source.{name}").try_cast("bigint")


def _literals(names: Sequence[str]) -> Column:
    return F.array(*map(F.lit, names))
