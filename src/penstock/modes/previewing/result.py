"""``Preview``: the result of ``modes.preview``, shown as text, rich tables, SVG or Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError
from penstock.json_text import Json
from penstock.modes.previewing.micro_batches import NOT_ALLOWED, ModePreview
from penstock.modes.previewing.svg import svg
from penstock.modes.previewing.text import rich_tables, text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Group


@dataclass(frozen=True)
class Preview:
    """The output of a transformation in each output mode, micro-batch by micro-batch.

    ``print`` shows it as text, a notebook as a picture, and rich as tables.

    Parameters
    ----------
    modes
        The previews of the modes, in the requested order.
    time_zone
        The session's time zone, in which times are shown.
    """

    modes: tuple[ModePreview, ...]
    time_zone: str

    def __getitem__(self, mode: str) -> ModePreview:
        """Return one mode: ``preview["append"]``."""
        for previewed in self.modes:
            if previewed.mode == str(mode).lower():
                return previewed
        names = [previewed.mode for previewed in self.modes]
        raise InvalidInputError(
            f"the preview has the output modes {', '.join(names)}, not {in_quotes(mode)}."
            f"{did_you_mean(str(mode), names)}",
            mode=mode,
        )

    def to_arrow(self) -> pa.Table:
        """Return a row for each micro-batch, and one for each mode that is not allowed.

        The columns are mode, batch, kind, input_rows, watermark, state_rows, removed_rows, dropped_rows,
        emitted (a list of the emitted rows), and reason (why a mode is not allowed).
        """
        records: list[Json] = []
        for mode in self.modes:
            if mode.refusal is not None:
                refusal_values = {"kind": NOT_ALLOWED, "reason": mode.refusal.message, "emitted": None}
                records.append({"mode": mode.mode, **refusal_values})
            for batch in mode.batches:
                records.append({"mode": mode.mode, **{name: getattr(batch, name) for name in _BATCH_COLUMNS}})
        without_emitted = pa.Table.from_pylist(
            [{name: value for name, value in record.items() if name != "emitted"} for record in records],
            _SCHEMA,
        )
        emitted = _list_column([record["emitted"] for record in records])
        return without_emitted.add_column(
            without_emitted.schema.get_field_index("reason"), "emitted", emitted
        )

    def to_df(self, spark: SparkSession) -> DataFrame:
        """Return the rows of `to_arrow` as a DataFrame."""
        return spark.createDataFrame(self.to_arrow())

    def table(self) -> Group:
        """Return a rich table for each mode.

        Raises
        ------
        MissingDependencyError
            When rich is not installed.
        """
        return rich_tables(self.modes, self.time_zone)

    def picture(self, path: str | Path) -> Path:
        """Write an SVG picture, with a lane for each mode, and micro-batches from left to right.

        Parameters
        ----------
        path
            The file, which is replaced if it exists.
        """
        file = Path(path)
        file.write_text(svg(self.modes, self.time_zone), encoding="utf-8")
        return file

    def __str__(self) -> str:
        return text(self.modes, self.time_zone)

    def __rich__(self) -> Group:
        return self.table()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{svg(self.modes, self.time_zone)}</div>'


_SCHEMA = pa.schema(
    [
        ("mode", pa.string()),
        ("batch", pa.int64()),
        ("kind", pa.string()),
        ("input_rows", pa.int64()),
        ("watermark", pa.timestamp("us", "UTC")),
        ("state_rows", pa.int64()),
        ("removed_rows", pa.int64()),
        ("dropped_rows", pa.int64()),
        ("reason", pa.string()),
    ]
)
_BATCH_COLUMNS = (*_SCHEMA.names[1:-1], "emitted")


def _list_column(tables: Sequence[pa.Table | None]) -> pa.Array:
    """Return the rows of each table as a list of structs."""
    present = [table for table in tables if table is not None]
    if not present:
        return pa.nulls(len(tables), pa.list_(pa.struct([])))
    rows = pa.concat_tables(present).to_struct_array().combine_chunks()
    offsets, offset = [], 0
    for table in tables:
        offsets.append(None if table is None else offset)
        offset += 0 if table is None else table.num_rows
    return pa.ListArray.from_arrays(pa.array([*offsets, offset], pa.int32()), rows)
