"""Session windows, whose keys change as they grow, are nothing to upsert by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

from penstock.errors import TableRefused

# The mark that Spark puts into the metadata of a session window's column (4.2, 4.3).
_MARK = "spark.sessionWindow"


def refuse_session_windows(frame: DataFrame) -> None:
    """Refuse a plan with a session window, for output mode update; only classic sessions show their plan.

    Raises
    ------
    TableRefused
    """
    java = getattr(frame, "_jdf", None)
    if java is None or not any(map(_groups_by_session, _nodes(java.queryExecution().analyzed()))):
        return
    raise TableRefused(
        "the query has a session window, and a session's key changes as it grows: in output mode update its earlier rows would "
        "stay in the table for ever. Use output mode append with a watermark, which writes each session once it is closed, or "
        "complete",
        condition="TABLE_REFUSED.SESSION_WINDOW",
    )


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for number in range(children.size()):
        yield from _nodes(children.apply(number))


def _groups_by_session(node: Any) -> bool:
    if node.nodeName() != "Aggregate":
        return False
    keys = node.groupingExpressions()
    found = (keys.apply(number) for number in range(keys.size()))
    return any(_is_session(key) for key in found)


def _is_session(key: Any) -> bool:
    # A grouping key is a column, or an expression that is computed before.
    references = key.references().toSeq()
    columns = (references.apply(number) for number in range(references.size()))
    return any(column.metadata().contains(_MARK) for column in columns)
