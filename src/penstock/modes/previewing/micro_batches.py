"""Results of a preview: the micro-batches of an output mode, or the reason why Spark refuses the mode."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.internals.query_start import Refusal

DATA, NO_DATA, NOT_ALLOWED = "data", "no data", "not allowed"
MAX_WITHOUT_DATA = 5
"""The maximum number of micro-batches without data that are shown; a query with processing-time timers never
stops running them.
"""


@dataclass(frozen=True)
class StateRows:
    """State rows of one stateful operator in a micro-batch."""

    operator: str
    """Spark's name for the operator, such as ``stateStoreSave``."""
    total: int
    updated: int
    removed: int
    dropped: int
    """Rows that were dropped because they arrived later than the watermark allows."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one mode."""

    batch: int
    """The batch id, from 0."""
    kind: str
    """``data``, or ``no data`` if Spark ran it because the watermark had moved."""
    input_rows: int
    emitted: pa.Table
    """The rows that the sink received, in order."""
    watermark: datetime | None
    """The watermark during the micro-batch, in UTC; None before there was one."""
    operators: tuple[StateRows, ...]

    @property
    def state_rows(self) -> int:
        """Rows in state after the micro-batch."""
        return sum(operator.total for operator in self.operators)

    @property
    def removed_rows(self) -> int:
        """Rows that were removed from the state."""
        return sum(operator.removed for operator in self.operators)

    @property
    def dropped_rows(self) -> int:
        """Rows that were dropped because they arrived too late."""
        return sum(operator.dropped for operator in self.operators)


@dataclass(frozen=True)
class ModePreview:
    """The output of one output mode, or the reason why Spark refuses the mode."""

    mode: str
    batches: tuple[MicroBatch, ...] = ()
    refusal: Refusal | None = None
    """The reason why Spark does not start the query."""
    is_cut: bool = False
    """Whether Spark would have continued with micro-batches without data."""

    @property
    def allowed(self) -> bool:
        return self.refusal is None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the emitted rows."""
        return tuple(self.batches[0].emitted.column_names) if self.batches else ()
