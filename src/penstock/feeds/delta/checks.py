"""Checks that refuse Delta tables and versions that Penstock cannot read correctly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache

import pyarrow as pa
import pyarrow.types as pat

from penstock.arrow.schema import canonical_schema
from penstock.errors import FeedUnavailableError, PenstockError
from penstock.feeds.delta.log import CommitFile, TableState
from penstock.feeds.protocol import check_reserved
from penstock.feeds.urls import row_id_forms
from penstock.lake.parquet import nullable
from penstock.lake.storage import import_deltalake, path_for_messages

_READER = 3
"""The newest reader version of the Delta protocol."""
_FEATURES = frozenset(
    {
        # Enabling these is accepted; versions that use them are refused.
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_VARIANT = "variantType"
"""Accepted without variant columns, because deltalake adds it to each table with deletion vectors."""


def check_state(state: TableState, label: str, version: int | None = None) -> None:
    """Refuse a table, or a version of it, that needs reader features that Penstock does not support."""
    which = f"the Delta table {label}" if version is None else f"version {version} of the Delta table {label}"
    reader, mapping = state.protocol.reader, state.metadata.column_mapping
    known = _FEATURES if _has_variants(state) else _FEATURES | {_VARIANT}
    unknown = sorted(set(state.protocol.features) - known)
    if reader > _READER or unknown:
        what = f"the reader features {', '.join(unknown)}" if unknown else f"reader version {reader}"
        raise FeedUnavailableError(
            f"{which} needs {what}, which Penstock does not support: drop the feature from the table, "
            "and begin after the version that drops it; or copy the table",
            condition="FEED_UNAVAILABLE.READER_FEATURE",
            features=unknown,
            reader_version=reader,
            version=version,
        )
    if mapping.lower() != "none":
        # The names of columns in the files differ from those of the table.
        raise FeedUnavailableError(
            f"{which} uses column mapping by {mapping}, which Penstock does not support: run ALTER TABLE "
            "… DROP FEATURE columnMapping, and begin after the version that it writes; or copy the table",
            condition="FEED_UNAVAILABLE.COLUMN_MAPPING",
            mode=mapping,
            version=version,
        )


def _has_variants(state: TableState) -> bool:
    return re.search(r':\s*"variant"', state.metadata.schema) is not None


def check_files(commit: CommitFile, before: TableState | None, table: TableState, label: str) -> None:
    """Refuse files with deletion vectors, outside the table's folder, or without partition values.

    Removed files have the partition columns of the table ``before`` the commit, other files those of
    ``table``.
    """
    where = f"version {commit.version} of the Delta table {label}"
    for kind, action in commit.needed:
        if action.deletion_vector:
            raise FeedUnavailableError(
                f"{where} has deletion vectors, which Penstock does not support: set "
                "delta.enableDeletionVectors=false, purge them (REORG TABLE … APPLY (PURGE)), and begin "
                "after that version",
                condition="FEED_UNAVAILABLE.DELETION_VECTORS",
                version=commit.version,
            )
        owner = before if kind == "delete" else table
        known = {name for name, _ in action.values}
        if owner is not None and not known.issuperset(owner.metadata.partition_columns):
            raise FeedUnavailableError(
                f"{where} removes a file whose partition values are missing from the log: begin after that "
                f"version (file {path_for_messages(action.path)})",
                condition="FEED_UNAVAILABLE.PARTITION_UNKNOWN",
                version=commit.version,
            )
        if action.is_outside_table:
            raise FeedUnavailableError(
                f"{where} has a file outside the table's folder, as in a shallow clone: read the original "
                f"table, or begin after that version (file {path_for_messages(action.path)})",
                condition="FEED_UNAVAILABLE.FILES_ELSEWHERE",
                version=commit.version,
            )


def replaced(label: str, version: int) -> FeedUnavailableError:
    """Return the error for a table that was replaced by another table."""
    return FeedUnavailableError(
        f"version {version} of the Delta table {label} belongs to another table at this path: the table was "
        "removed, replaced or recreated. Start the query again with a new checkpoint and an empty sink",
        condition="FEED_UNAVAILABLE.TABLE_REPLACED",
        table=label,
        version=version,
    )


def no_feed(label: str, versions: Sequence[int]) -> FeedUnavailableError:
    """Return the error for versions that rewrote files without recording which rows changed."""
    return FeedUnavailableError(
        f"{ranges(versions)} of the Delta table {label} rewrote files while its change data feed was off, "
        f"so changed rows cannot be identified: begin after version {versions[-1]}, or name the columns "
        f"that identify rows: {row_id_forms('delta', 'path', 'DeltaFeed')}",
        condition="FEED_UNAVAILABLE.FEED_NOT_ENABLED",
        versions=list(versions),
    )


def ranges(versions: Sequence[int]) -> str:
    """Format versions, as in "versions 2, 5 to 9"."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][1] + 1 == version:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    ranges = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    more = f" and {len(ranges) - 20} more ranges" if len(ranges) > 20 else ""
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(ranges[:20])}{more}"


@lru_cache(maxsize=64)
def data_schema(delta: str, label: str) -> pa.Schema:
    """Return the columns of a Delta schema, all nullable, because older rows may have NULL."""
    schema = import_deltalake("deltalake").Schema
    try:
        data = canonical_schema(pa.schema(schema.from_json(delta).to_arrow()))
    except PenstockError:
        raise
    except Exception as error:
        raise FeedUnavailableError(
            f"the Delta table {label} has a column of a type that deltalake cannot read: {error}",
            condition="FEED_UNAVAILABLE.SCHEMA",
            table=label,
        ) from None
    check_reserved(data.names, f"the Delta table {label}")
    return pa.schema([pa.field(field.name, nullable(field.type)) for field in data])


def partition_value(name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    """Parse the value of a partition column (Delta protocol, "Partition Value Serialization")."""
    if text is None or text == "":
        return pa.scalar(None, kind)
    try:
        return pa.scalar(_parsed(text, kind), kind)
    except (ValueError, ArithmeticError, pa.ArrowException):
        raise FeedUnavailableError(
            f"the partition column {name!r} is {kind}, but the log has the invalid value {text!r} for it: "
            "begin after that version",
            condition="FEED_UNAVAILABLE.PARTITION_VALUE",
            column=name,
        ) from None


def _parsed(text: str, kind: pa.DataType) -> object:
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
