"""Session windows, whose keys change as they grow, are nothing to upsert by."""

from __future__ import annotations

from pyspark.sql import DataFrame

from penstock.errors import TableRefused
from penstock.spark.internals.plan_text import by_session, tree_of


def refuse_session_windows(frame: DataFrame) -> None:
    """Refuse an aggregation by session windows, for output mode update.

    Raises
    ------
    TableRefused
    """
    if not any(node.name == "Aggregate" and by_session(node) for node in tree_of(frame).walk()):
        return
    raise TableRefused(
        "the query has a session window, and a session's key changes as it grows: in output mode update its earlier rows would "
        "stay in the table for ever. Use output mode append with a watermark, which writes each session once it is closed, or "
        "complete",
        condition="TABLE_REFUSED.SESSION_WINDOW",
    )
