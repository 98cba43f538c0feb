"""What a sink that is given as an object refuses itself, asked of the check that a pipeline's start makes."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.modes.report import Problem


def table_refusals(
    frame: DataFrame, sink: object, mode: str, *, continuous: bool = False
) -> Iterator[Problem]:
    """Why a pipeline of these rows into a ``ps.TableSink`` would not start in a mode."""
    ask = getattr(sink, "refusal", None)
    error = None if ask is None else ask(frame, mode, continuous=continuous)
    if error is not None:
        yield Problem(
            "PENSTOCK_TABLE_REFUSES",
            error.message,
            fix=_plain_keys(frame, getattr(sink, "keys", ())),
            condition=error.condition,
        )


def _plain_keys(frame: DataFrame, keys: tuple[str, ...]) -> str | None:
    """Fields of nested keys as columns of their own, such as the start of a window."""
    nested = {each.name: each.dataType for each in frame.schema if isinstance(each.dataType, StructType)}
    for key in keys:
        if key in nested:
            field = nested[key].names[0]
            return f"select('{key}.{field}', ...), with '{field}' among the keys in place of '{key}'"
    return None
