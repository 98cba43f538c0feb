"""``diff``: the changes from one DataFrame to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.arguments import did_you_mean, in_quotes, require
from penstock.errors import ChangelogContractViolationError, InvalidInputError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    DELETE,
    INSERT,
    ChangeContract,
    invalid_schema,
)
from penstock.feeds.protocol import check_reserved

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def diff(
    before: DataFrame,
    after: DataFrame,
    *,
    row_id: str | Sequence[str],
    version: int = 1,
    timestamp: datetime | None = None,
    compute_updates: bool = False,
) -> DataFrame:
    """Return the changes from one state of a table to another.

    Parameters
    ----------
    before, after
        The states: batch DataFrames with the same columns, in any order.
    row_id
        The columns that identify rows; see :class:`ChangeContract`.
    version, timestamp
        The ``_commit_version`` and ``_commit_timestamp`` of all rows; by default the current time.
    compute_updates
        Whether a row that differs between the states is an ``update_preimage`` and an ``update_postimage``
        instead of a ``delete`` and an ``insert``.

    Raises
    ------
    InvalidChangelogSchemaError
        SCHEMA_DIFFERS, naming the column; MISSING_COLUMN for a row id that does not exist; RESERVED_COLUMN.
    InvalidInputError
        For a streaming DataFrame, or a time without a time zone.
    ChangelogContractViolationError
        When the query runs: NULL_ROW_ID, or DUPLICATE_ROW_ID if several rows of a state have the same row id.
    """
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    from penstock.changes.post_processing import post_process
    from penstock.spark.schemas import quote_column

    contract = ChangeContract(
        row_id, carryover_rows=True, updates_as_delete_and_insert=True, whole_commits=True
    )
    _check_columns(before, after)
    require("version", version, int, "a whole number")
    require("timestamp", timestamp, datetime | None, "a datetime with a time zone")
    commit_time = timestamp or datetime.now(UTC)
    if commit_time.tzinfo is None:
        raise InvalidInputError(f"the timestamp {commit_time} has no time zone: give datetime(…, tzinfo=UTC)")

    def rows(frame: DataFrame, kind: str) -> DataFrame:
        return frame.select(
            *[F.col(quote_column(name)) for name in after.columns],
            F.lit(kind).alias(CHANGE_TYPE),
            F.lit(version).cast("bigint").alias(COMMIT_VERSION),
            F.lit(commit_time).cast("timestamp").alias(COMMIT_TIMESTAMP),
        )

    all_rows = rows(before, DELETE).unionByName(rows(after, INSERT))
    changes = post_process(all_rows, contract, compute_updates=compute_updates)
    # If a state has a row twice, only one of the two cancels, and the other would look like a change.
    ids = [F.col(quote_column(name) if name in after.columns else name) for name in contract.row_id]
    counted = all_rows.groupBy(F.struct(*ids).alias("row_id"), CHANGE_TYPE).agg(F.count("*").alias("rows"))
    duplicates = counted.where("rows > 1").select(F.to_json("row_id").alias("row_id"), CHANGE_TYPE)
    return changes.union(duplicates.mapInArrow(_refuse_duplicates, changes.schema))


def _refuse_duplicates(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Raise the error for the first row, if any: each row is a row id that one state has more than once."""
    for batch in batches:
        if batch.num_rows:
            row = batch.slice(0, 1).to_pylist()[0]
            state = "before" if row[CHANGE_TYPE] == DELETE else "after"
            raise ChangelogContractViolationError(
                f"several rows of {state} have the row id {row['row_id']}: name columns that identify every "
                "row",
                condition="CHANGELOG_CONTRACT_VIOLATION.DUPLICATE_ROW_ID",
                row=row["row_id"],
            )
    yield from ()


def _check_columns(before: DataFrame, after: DataFrame) -> None:
    from pyspark.sql import DataFrame

    for name, frame in (("before", before), ("after", after)):
        require(name, frame, DataFrame, "a DataFrame")
        if frame.isStreaming:
            raise InvalidInputError(
                f"{name} is a streaming DataFrame: diff compares two batch DataFrames",
                condition="INVALID_INPUT.STREAMING",
            )
        check_reserved(frame.columns, name)
    for frame, other, where in ((before, after, "after"), (after, before, "before")):
        for name in frame.columns:
            if name not in other.columns:
                hint = did_you_mean(name, other.columns)
                raise invalid_schema(
                    "SCHEMA_DIFFERS",
                    name,
                    f"{where} has no column {in_quotes(name)}.{hint} Select the same columns from both",
                )
    for name in before.columns:
        old, new = before.schema[name].dataType, after.schema[name].dataType
        if old != new and old.simpleString() != new.simpleString():
            raise invalid_schema(
                "SCHEMA_DIFFERS",
                name,
                f"the column {in_quotes(name)} is {old.simpleString()} in before and {new.simpleString()} in "
                "after: cast one of them",
            )
