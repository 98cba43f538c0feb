"""What a preview found: each mode's micro-batches, or the reason why Spark does not start a query in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInput
from penstock.spark.internals.output_mode_checker import Refusal

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Group

DATA, NO_DATA, NOT_ALLOWED = "data", "no data", "not allowed"


@dataclass(frozen=True)
class StateRows:
    """What one stateful operator held and did in a micro-batch, in rows of its state."""

    operator: str
    """Spark's name for it, such as ``stateStoreSave``."""
    total: int
    updated: int
    removed: int
    dropped: int
    """Rows that came later than the watermark allows, and were left out."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one mode."""

    batch: int
    """The batch id, from 0."""
    kind: str
    """``data``, or ``no data`` where Spark ran it by itself, because the watermark had moved."""
    input_rows: int
    emitted: pa.Table
    """The rows that the sink was given, in their order."""
    watermark: datetime | None
    """Where the watermark stood while the micro-batch ran, in UTC; None before there was one."""
    operators: tuple[StateRows, ...]

    @property
    def state_rows(self) -> int:
        """Rows in state behind the micro-batch."""
        return sum(operator.total for operator in self.operators)

    @property
    def removed_rows(self) -> int:
        """Rows that left the state."""
        return sum(operator.removed for operator in self.operators)

    @property
    def dropped_rows(self) -> int:
        """Rows that came too late."""
        return sum(operator.dropped for operator in self.operators)


@dataclass(frozen=True)
class ModePreview:
    """What one output mode emits, or why it does not."""

    mode: str
    batches: tuple[MicroBatch, ...] = ()
    refusal: Refusal | None = None
    """Why Spark does not start the query."""
    is_cut: bool = False
    """Whether Spark would have gone on with micro-batches without data."""

    @property
    def allowed(self) -> bool:
        return self.refusal is None


@dataclass(frozen=True)
class Preview:
    """What a transformation emits in each output mode, micro-batch by micro-batch.

    ``print`` shows it as text, a notebook as a picture, rich as tables.

    Parameters
    ----------
    modes
        In the order in which they were asked for.
    time_zone
        The session's, in which times are shown.
    """

    modes: tuple[ModePreview, ...]
    time_zone: str

    def __getitem__(self, mode: str) -> ModePreview:
        """One mode: ``preview["append"]``."""
        for found in self.modes:
            if found.mode == str(mode).lower():
                return found
        names = [found.mode for found in self.modes]
        raise InvalidInput(
            f"the preview has the output modes {', '.join(names)}, not {in_quotes(mode)}.{did_you_mean(str(mode), names)}",
            mode=mode,
        )

    def to_arrow(self) -> pa.Table:
        """A row for each micro-batch: mode, batch, kind, input_rows, watermark, state_rows, removed_rows, dropped_rows, emitted
        (a list of the emitted rows), and reason; a mode that is not allowed has one row, with the reason."""
        from penstock.modes.previewing.arrow import arrow_table

        return arrow_table(self)

    def frame(self, spark: SparkSession) -> DataFrame:
        """The same as a DataFrame."""
        return spark.createDataFrame(self.to_arrow())

    def table(self) -> Group:
        """A table for each mode, for rich.

        Raises
        ------
        MissingDependency
            When rich is not installed.
        """
        from penstock.modes.previewing.text import rich_tables

        return rich_tables(self)

    def picture(self, path: str | Path) -> Path:
        """Write a picture in SVG: a lane for each mode, micro-batches from left to right.

        Parameters
        ----------
        path
            The file, which is replaced.
        """
        from penstock.modes.previewing.picture import svg

        written = Path(path)
        written.write_text(svg(self), encoding="utf-8")
        return written

    def __str__(self) -> str:
        from penstock.modes.previewing.text import text

        return text(self)

    def __rich__(self) -> Any:
        return self.table()

    def _repr_html_(self) -> str:
        from penstock.modes.previewing.picture import svg

        return f'<div style="overflow-x: auto">{svg(self)}</div>'
