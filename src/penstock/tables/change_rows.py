"""The order of the changes of a key inside what the table orders them by: a commit may change a row more than once."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import InvalidInput, InvalidOption, TableRefused
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_VERSION
from penstock.spark.column_metadata import is_split, required_sequence, row_id_columns, sequence_column


def ties(schema: StructType, sequence_by: str) -> tuple[str, ...]:
    """The columns that order changes of a key with one value of ``sequence_by``, as the feed's marks say; most often none.

    Parameters
    ----------
    schema
        That of the rows, which are changes.

    Raises
    ------
    InvalidOption
        When the order is to be that of a column which begins anew in each commit, or of one that does not tell apart changes which may
        come in several micro-batches.
    InvalidInput
        When the rows have lost that column.
    """
    step, needed = sequence_column(schema), required_sequence(schema)
    if step == sequence_by:
        raise InvalidOption(
            f"{in_quotes(step)} orders the changes of a row inside a commit alone, and a later commit's would be taken for old ones: leave "
            "sequence_by out, so that commits are in their order, and inside them the changes by that column",
            option="sequence_by",
        )
    if step is None and needed is not None:
        raise InvalidInput(
            f"a commit of this feed may have several changes of a row, and the column that orders them, {in_quotes(needed)}, is not among the "
            "rows: select it too, or read net changes (deduplication_mode='netChanges', net_window='commit')",
            parameter="apply_changes",
        )
    if is_split(schema) and sequence_by == COMMIT_VERSION:
        raise InvalidOption(
            f"several changes of a row may have one {in_quotes(COMMIT_VERSION)} and come in several micro-batches, of which a table would take the "
            "later ones for old: leave version out of the DebeziumFeed, so that each event has its own, or name a column as sequence_by that "
            "orders all changes of a key",
            option="sequence_by",
        )
    if step is None or COMMIT_VERSION not in schema.names:
        return ()
    return (step,) if sequence_by == COMMIT_VERSION else (COMMIT_VERSION, step)


# ---- change_rows: Change rows on their way into a table of whatever kind: what each does to a row, and that it says so.


def require_row_id(schema: StructType, keys: Sequence[str]) -> None:
    """Refuse keys that leave out a column by which the feed of the rows tells them apart, so far as it is among them.

    Raises
    ------
    InvalidOption
    """
    missing = [name for name in row_id_columns(schema) if name not in keys]
    # Keys that are no columns are somebody else's to refuse.
    if missing and set(keys) <= set(schema.names):
        raise InvalidOption(
            f"the feed tells rows apart by {', '.join(missing)}, which is not among the keys {', '.join(keys)}: two of its rows with "
            "the same keys would take each other's place. Name it as a key. Or have the feed tell rows apart by these keys (row_id of most "
            "feeds; for PostgreSQL, ALTER TABLE … REPLICA IDENTITY USING INDEX); or, where no two rows have the same keys at any time, "
            "drop the column from the rows",
            option="keys",
        )


def present() -> Column:
    """0 for a row that is gone, 1 for one that is there, and null for a change of no known type."""
    kind = F.col(CHANGE_TYPE)
    gone, there = kind.isin("delete", "update_preimage"), kind.isin("insert", "update_postimage")
    return F.when(gone, 0).when(there, 1).cast("int").alias("present")


def require_changes(chunk: pa.RecordBatch, sequence_by: str) -> None:
    """Refuse changes of no known type, and those without a place in the order.

    Parameters
    ----------
    chunk
        Rows with the columns ``present`` and ``sequence``.
    sequence_by
        The user's name of the column that orders the changes of a key.

    Raises
    ------
    TableRefused
    """
    if chunk.column("present").null_count:
        raise TableRefused(
            f"a change has a {CHANGE_TYPE} that is none of insert, delete, update_preimage and update_postimage: see to it before "
            "the rows come here",
            condition="TABLE_REFUSED.UNKNOWN_CHANGE_TYPE",
        )
    if chunk.column("sequence").null_count:
        raise TableRefused(
            f"a change has no value in {in_quotes(sequence_by)}, which orders the changes of a key: name a column as sequence_by "
            "that has one in every row",
            condition="TABLE_REFUSED.NULL_SEQUENCE",
            column=sequence_by,
        )
