"""Delta schemas and partition values in Arrow."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arrow.schema import canonical_schema
from penstock.errors import FeedUnavailable, PenstockError
from penstock.feeds.protocol import check_reserved
from penstock.lake.parquet import nullable
from penstock.lake.storage import library


@lru_cache(maxsize=64)
def data_schema(delta: str, shown: str) -> pa.Schema:
    """Return the columns of a Delta schema; all are nullable, since older rows may have NULL."""
    schema = library("deltalake").Schema
    try:
        data = canonical_schema(pa.schema(schema.from_json(delta).to_arrow()))
    except PenstockError:
        raise
    except Exception as error:
        raise FeedUnavailable(
            f"the Delta table {shown} has a column of a type that deltalake cannot read: {error}",
            condition="FEED_UNAVAILABLE.SCHEMA",
            table=shown,
        ) from None
    check_reserved(data, f"the Delta table {shown}")
    return pa.schema([pa.field(field.name, nullable(field.type)) for field in data])


def partition_value(name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    """Parse the value of a partition column (Delta protocol, "Partition Value Serialization")."""
    if text is None or text == "":
        return pa.scalar(None, kind)
    try:
        return pa.scalar(_parsed(text, kind), kind)
    except (ValueError, ArithmeticError, pa.ArrowException):
        raise FeedUnavailable(
            f"the partition column {name!r} is {kind}, and the log has the invalid value {text!r} for it: "
            "begin after it",
            condition="FEED_UNAVAILABLE.PARTITION_VALUE",
            column=name,
        ) from None


def _parsed(text: str, kind: pa.DataType) -> Any:
    if pat.is_integer(kind):
        return int(text)
    if pat.is_floating(kind):
        return float(text)
    if pat.is_boolean(kind):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if pat.is_decimal(kind):
        return Decimal(text)
    if pat.is_date(kind):
        return date.fromisoformat(text)
    if pat.is_timestamp(kind):
        moment = datetime.fromisoformat(text)
        zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return zoned.astimezone(UTC) if kind.tz is not None else zoned.astimezone(UTC).replace(tzinfo=None)
    if pat.is_binary(kind):
        # Writers encode bytes above 127 differently.
        return text.encode("ascii")
    return text
