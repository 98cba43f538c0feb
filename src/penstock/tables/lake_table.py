"""Tables of a lake as sinks: what ``TableSink`` asks of a table that is not in a store's database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

BatchWriter = Callable[[DataFrame, int], None]
"""A ``foreachBatch`` function."""


class LakeTable(Protocol):
    """A table in a folder or a catalog, with the settings of a sink."""

    @property
    def kind(self) -> str:
        """What it is in messages, such as ``a Delta table``."""
        ...

    def check_rows(self, schema: StructType, output_mode: str) -> None:
        """Refuse rows that no table of this kind takes; the table is not read."""

    def new_columns(self, schema: StructType) -> list[str]:
        """Return the columns of the rows that the table lacks; none if it does not exist."""
        ...

    def evolve(self, schema: StructType) -> None:
        """Add the columns of the rows that the table lacks, except keys, and widen types as far as its format
        can.
        """

    def writer(
        self, frame: DataFrame, output_mode: str, guarantee: str, checkpoint: str, app_id: str | None
    ) -> BatchWriter:
        """Create or check the table, and return the function that the query calls with each micro-batch.

        ``app_id`` is the query's identity in the table; by default the one in its checkpoint.
        """
        ...
