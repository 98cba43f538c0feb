"""What an aggregate or a deduplication of a printed plan goes by (Spark 4.2, 4.3)."""

from __future__ import annotations

import re

from penstock.spark.internals.plan_text import Node, items

# What Spark makes a session window's column of, and a column that is another one by a new name.
_SESSION = re.compile(r"named_struct\(start, .*\) AS session_window#(\d+)(?:-T\d+ms)?", re.DOTALL)
# Spark Connect's withColumn takes the watermark away, and with it the mark of a session window.
_RENAMED = re.compile(r"[^()]*#(\d+)(-T\d+ms)? AS .+#(\d+)(-T\d+ms)?", re.DOTALL)
_COLUMN = re.compile(r"[^()]*#(\d+)(?:-T\d+ms)?")


def grouping(node: Node) -> list[str]:
    """What an aggregate groups by, or a deduplication's keys."""
    # An aggregate over all rows has no list of what it groups by: the only one are its results.
    alone = node.name == "Aggregate" and len(node.arguments) < 2
    return [] if alone or not node.arguments else items(node.arguments[0])


def by_session(node: Node) -> bool:
    """Whether an aggregate groups by session windows, under their own name or another."""
    columns = [match[1] for match in map(_COLUMN.fullmatch, grouping(node)) if match]
    return bool(columns) and not _sessions(node).isdisjoint(columns)


def _sessions(node: Node) -> set[str]:
    """The numbers of the columns below a node that are session windows."""
    found: set[str] = set()
    for below in reversed(list(node.below())):
        for item in items(below.text) if below.name == "Project" else ():
            made, renamed = _SESSION.fullmatch(item), _RENAMED.fullmatch(item)
            if made is not None:
                found.add(made[1])
            elif renamed is not None and renamed[1] in found and renamed[2] == renamed[4]:
                found.add(renamed[3])
    return found
