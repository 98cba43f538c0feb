"""The order of the changes of a key inside what the table orders them by: a commit may change a row more than once."""

from __future__ import annotations

from pyspark.sql.types import StructType

from penstock.arguments import in_quotes
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.column_metadata import is_split, needed_sequence, sequence_of
from penstock.tables.columns import COMMIT_VERSION


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
    step, needed = sequence_of(schema), needed_sequence(schema)
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
