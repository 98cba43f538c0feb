"""What the printed arguments of a plan's operators say (Spark 4.2, 4.3)."""

from __future__ import annotations

import re

from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node, list_items

# A session window's column, and a column that is renamed.
_SESSION_WINDOW = re.compile(r"named_struct\(start, .*\) AS session_window#(\d+)(?:-T\d+ms)?", re.DOTALL)
# Spark Connect's withColumn takes the watermark away, and with it the mark of a session window.
_RENAMED = re.compile(r"[^()]*#(\d+)(-T\d+ms)? AS .+#(\d+)(-T\d+ms)?", re.DOTALL)
_GROUPED = re.compile(r"[^()]*#(\d+)(?:-T\d+ms)?")
_NO_TIME = ("NoTimeout", "NoTime")
# The options of a relation that reads a queue.
_QUEUE = re.compile(r", penstock, .*\[(?:[^\]]*, )?queue=([\w.-]+)[,\]]")
_WINDOW = re.compile(r"window#\d+")
_WATERMARK = re.compile(r"(?:[0-9a-f-]{36}, )?(.+?)#\d+L?(?:-T\d+ms)?(?:: [^,]+)?, (.+)$")
_COLUMN = re.compile(r"(.*)#(\d+)L?(?:-T\d+ms)?", re.DOTALL)


def watermark_of(node: Node) -> tuple[str, str]:
    """Return the column and the delay of a ``withWatermark``."""
    match = _WATERMARK.match(node.text)
    return (match[1], match[2]) if match else (node.text, "")


def read_by(node: Node) -> str:
    """Return the queue or the source that is read below an operator."""
    leaf = next((child for child in node.walk() if child.streaming and not child.children), node)
    queue = _QUEUE.search(leaf.text)
    return f"queue {queue[1]!r}" if queue else source_of(leaf)


def source_of(leaf: Node) -> str:
    """Return the name of the source that a relation reads."""
    # The arguments are provider, name, ...; of the older relation the source, such as FileSource[folder], ...
    place = 1 if leaf.name == "StreamingRelationV2" else 0
    return leaf.arguments[place] if len(leaf.arguments) > place else leaf.name


def grouping_expressions(node: Node) -> list[str]:
    """Return the grouping expressions of an aggregate, or the keys of a deduplication."""
    # An aggregate over all rows has no list of grouping expressions; its only list is that of the results.
    is_global = node.name == "Aggregate" and len(node.arguments) < 2
    return [] if is_global or not node.arguments else list_items(node.arguments[0])


def groups_by_session(node: Node) -> bool:
    """Return whether an aggregate groups by session windows, under any name."""
    columns = [match[1] for match in map(_GROUPED.fullmatch, grouping_expressions(node)) if match]
    return bool(columns) and not _session_windows(node).isdisjoint(columns)


def _session_windows(node: Node) -> set[str]:
    """Return the ids of the columns below a node that are session windows."""
    ids: set[str] = set()
    for below in reversed(list(node.below())):
        for item in list_items(below.text) if below.name == "Project" else ():
            window, renamed = _SESSION_WINDOW.fullmatch(item), _RENAMED.fullmatch(item)
            if window is not None:
                ids.add(window[1])
            elif renamed is not None and renamed[1] in ids and renamed[2] == renamed[4]:
                ids.add(renamed[3])
    return ids


def by_window(node: Node) -> bool:
    """Whether an aggregate groups by time or session windows."""
    return any(_WINDOW.match(expression) for expression in grouping_expressions(node)) or groups_by_session(
        node
    )


def join_type(node: Node) -> str:
    return node.arguments[0] if node.arguments else "Inner"


def own_mode(node: Node) -> str | None:
    """Return the output mode of a stateful function, in lower case."""
    known = {"Append": "append", "Update": "update", "Complete": "complete"}
    return next((known[argument] for argument in node.arguments if argument in known), None)


def keeps_forever(node: Node) -> bool:
    """Whether only a stateful function itself removes its state: it has no timeout, timer or time to live."""
    return any(argument in _NO_TIME for argument in node.arguments)


def is_map_groups(node: Node) -> bool:
    """Whether a stateful function of the JVM is ``mapGroupsWithState``."""
    arguments = list(node.arguments)
    places = [place for place, argument in enumerate(arguments) if argument in ("Append", "Update")]
    return bool(places) and arguments[places[0] + 1 : places[0] + 2] == ["true"]


def result_key(root: Node, aggregate: Node) -> tuple[str, ...]:
    """Return the names of an aggregate's grouping columns in the result; none where one is missing."""
    if len(aggregate.arguments) < 2:
        return ()
    key = [
        _output_column(expression, list_items(aggregate.arguments[1]))
        for expression in grouping_expressions(aggregate)
    ]
    for node in reversed(_above(root, aggregate)):
        if node.name == "Project":
            columns = list_items(node.arguments[0])
            key = [column and _output_column(column, columns) for column in key]
        elif Trait.NAMES_KEPT not in traits_of(node.name):
            return ()
    matches = [column and _COLUMN.fullmatch(column) for column in key]
    return tuple(match[1] for match in matches if match) if all(matches) else ()


def _above(root: Node, node: Node) -> list[Node]:
    """Return the operators between the result and one of them, from the top."""
    return [
        other for other in root.walk() if other is not node and any(below is node for below in other.below())
    ]


def _output_column(expression: str, columns: list[str]) -> str | None:
    """Return the output column that is an expression, by its own name or its alias."""
    for column in columns:
        if column == expression:
            return column
        if column.startswith(f"{expression} AS "):
            return column[len(expression) + len(" AS ") :]
    return None
