"""A preview as one Arrow table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.modes.previewing.result import NOT_ALLOWED, MicroBatch, ModePreview, Preview


def arrow_table(preview: Preview) -> pa.Table:
    """One row for each micro-batch and for each mode that is not allowed; ``emitted`` is a list of structs."""
    cells = [cell for mode in preview.modes for cell in _rows(mode)]
    tables = [cell["emitted"] for cell in cells]
    plain = pa.Table.from_pylist(
        [{name: value for name, value in cell.items() if name != "emitted"} for cell in cells], _PLAIN
    )
    return plain.add_column(plain.schema.get_field_index("reason"), "emitted", _lists(tables))


_PLAIN = pa.schema(
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


def _rows(mode: ModePreview) -> list[dict[str, Any]]:
    if mode.refusal is not None:
        return [{"mode": mode.mode, "kind": NOT_ALLOWED, "reason": mode.refusal.message, "emitted": None}]
    return [_row(mode.mode, batch) for batch in mode.batches]


def _row(mode: str, batch: MicroBatch) -> dict[str, Any]:
    names = (
        "batch",
        "kind",
        "input_rows",
        "watermark",
        "state_rows",
        "removed_rows",
        "dropped_rows",
        "emitted",
    )
    return {"mode": mode} | {name: getattr(batch, name) for name in names}


def _lists(tables: list[pa.Table | None]) -> pa.Array:
    there = [table for table in tables if table is not None]
    if not there:
        return pa.nulls(len(tables), pa.list_(pa.struct([])))
    rows = pa.concat_tables(there).to_struct_array().combine_chunks()
    if isinstance(rows, pa.ChunkedArray):
        rows = pa.concat_arrays(rows.chunks) if rows.num_chunks else pa.array([], rows.type)
    offsets, place = [], 0
    for table in tables:
        offsets.append(None if table is None else place)
        place += 0 if table is None else table.num_rows
    return pa.ListArray.from_arrays(pa.array([*offsets, place], pa.int32()), rows)
