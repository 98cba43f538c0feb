"""Interpretation of the printed arguments of a plan's operators (Spark 4.2, 4.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node, has_watermark, list_items, split_list, without_ids

# A column of time windows, and a renamed column.
_NEW_WINDOW = re.compile(r"named_struct\(start, .*\) AS ((?:session_)?window)#(\d+)(?:-T\d+ms)?", re.DOTALL)
# Spark Connect's withColumn removes the watermark, and with it the mark of a session window.
_RENAMED = re.compile(r"[^()]*#(\d+)(-T\d+ms)? AS .+#(\d+)(-T\d+ms)?", re.DOTALL)
_GROUPED = re.compile(r"[^()]*#(\d+)(?:-T\d+ms)?(\.start|\.end)?")
# Overlapping windows: an Expand with a row for each window.
_OVERLAPPING = re.compile(r"window#(\d+)(?:-T\d+ms)?")
_WINDOW, _SESSION = "window", "session_window"
_NO_TIME = ("NoTimeout", "NoTime")
_EVENT_TIME_TIMEOUT = "EventTimeTimeout"
# The options of a relation that reads a queue.
_QUEUE = re.compile(r", penstock, .*\[(?:[^\]]*, )?queue=([\w.-]+)[,\]]")
_WATERMARK = re.compile(r"(?:[0-9a-f-]{36}, )?(.+?)#\d+L?(?:-T\d+ms)?(?:: [^,]+)?, (.+)$")
_COLUMN = re.compile(r"(.*)#(\d+)L?(?:-T\d+ms)?", re.DOTALL)
_WATERMARKS = ("EventTimeWatermark", "UpdateEventTimeWatermarkColumn")
_EVENT_TIME = re.compile(r"(?:[0-9a-f-]{36}, )?.+?#(\d+)L?(?:-T\d+ms)?(?:: |, )", re.DOTALL)
_INDICES = re.compile(r"\[\d+(, \d+)*\]")
_WATERMARK_SUFFIX = re.compile(r"-T\d+ms$")
_PYTHON_CALL = re.compile(r"([\w<>.]+)\(([^()]*)\)#\d+")
_RESTORES = ("StateStoreRestore", "SessionWindowStateStoreRestore")
_WRITES = (
    "StreamingDeduplicate",
    "StreamingDeduplicateWithinWatermark",
    "StreamingGlobalLimit",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPySpark",
)
"""Physical operators that open their state for writing before they read their input."""
_BY_ALL_COLUMNS = ("Distinct", "Except")
"""Operators that Spark plans as aggregations by all their columns."""
_OWN_COLUMNS = ("Project", "Aggregate", "Expand")
"""Operators that print their output columns, in addition to leaves and functions."""


def watermark_of(node: Node) -> tuple[str, str]:
    """Return the column and the delay of a ``withWatermark``."""
    match = _WATERMARK.match(node.text)
    return (match[1], match[2]) if match else (node.text, "")


def source_below(node: Node) -> str:
    """Return the queue or the source that an operator's descendants read."""
    leaf = next((child for child in node.walk() if child.streaming and not child.children), node)
    queue = _QUEUE.search(leaf.text)
    return f"queue {queue[1]!r}" if queue else source_of(leaf)


def source_of(leaf: Node) -> str:
    """Return the name of the source that a relation reads."""
    # The arguments are provider, name, ...; for a source of V1, the source, such as FileSource[folder], ...
    index = 1 if leaf.name == "StreamingRelationV2" else 0
    return leaf.arguments[index] if len(leaf.arguments) > index else leaf.name


def output_columns(node: Node) -> list[str]:
    """Return the output columns of an operator, with watermark suffixes, without aliased expressions.

    For an unknown operator, return its input columns.
    """
    if not node.children or node.name in _OWN_COLUMNS or Trait.NEW_COLUMNS in traits_of(node.name):
        lists = [text for text in node.arguments if text.startswith("[") and "#" in text]
        return [without_expression(item) for item in list_items(lists[-1])] if lists else []
    # A union has the columns of its first input, and a semi join those of its left side.
    is_first = node.name == "Union" or join_type(node) in ("LeftSemi", "LeftAnti")
    children = node.children[:1] if is_first else node.children
    columns = [column for child in children for column in output_columns(child)]
    if node.name == "Generate":
        return [*_required_columns(columns, node), *list_items(node.arguments[-1])]
    event_time = _EVENT_TIME.match(node.text) if node.name in _WATERMARKS else None
    return columns if event_time is None else [_with_event_time(column, event_time[1]) for column in columns]


def _required_columns(columns: list[str], generate: Node) -> list[str]:
    """Return the input columns of a ``Generate``, without those that the optimizer marked as unused."""
    unused = next(filter(_INDICES.fullmatch, generate.arguments), "")
    return [column for index, column in enumerate(columns) if str(index) not in list_items(unused)]


def _with_event_time(column: str, event_time: str) -> str:
    """Return a column after a ``withWatermark``, which removes the watermarks of other columns."""
    column_name = _WATERMARK_SUFFIX.sub("", column)
    return f"{column_name}-T0ms" if column_name.removesuffix("L").endswith(f"#{event_time}") else column_name


def without_expression(item: str) -> str:
    """Return the column of a printed ``<expression> AS <column>``."""
    depth = 0
    for position, character in enumerate(item):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and item.startswith(" AS ", position):
            return item[position + len(" AS ") :]
    return item


def grouping_expressions(node: Node) -> list[str]:
    """Return the grouping expressions of an aggregation, or the keys of a deduplication."""
    if node.name in _BY_ALL_COLUMNS:
        return output_columns(node.children[0])
    # An aggregate over all rows has no list of grouping expressions, only the list of its results.
    is_global = node.name == "Aggregate" and len(node.arguments) < 2
    return [] if is_global or not node.arguments else list_items(node.arguments[0])


def groups_by_session(node: Node) -> bool:
    """Return whether an aggregate groups by session windows, under any name."""
    return any(_are_sessions(node))


def groups_by_session_alone(node: Node) -> bool:
    """Return whether an aggregate groups by session windows, and by nothing else."""
    sessions = _are_sessions(node)
    return bool(sessions) and all(sessions)


def _are_sessions(node: Node) -> list[bool]:
    """Return for each grouping expression whether it is a session window."""
    windows = _time_windows(node)
    matches = map(_GROUPED.fullmatch, grouping_expressions(node))
    return [match is not None and not match[2] and windows.get(match[1]) == _SESSION for match in matches]


def groups_by_time(node: Node) -> bool:
    """Return whether an aggregation groups by time or session windows, or by a window's bound."""
    windows = _time_windows(node)
    matches = map(_GROUPED.fullmatch, grouping_expressions(node))
    return any(match is not None and match[1] in windows for match in matches)


def _time_windows(node: Node) -> dict[str, str]:
    """Return the ids of all time window columns below a node, with the kind of each."""
    kinds: dict[str, str] = {}
    for descendant in reversed(list(node.descendants())):
        if descendant.name == "Expand":
            kinds |= {
                match[1]: _WINDOW
                for match in map(_OVERLAPPING.fullmatch, output_columns(descendant))
                if match
            }
        elif descendant.name in ("Project", "Aggregate") and descendant.arguments:
            for item in list_items(descendant.arguments[-1]):
                window, renamed = _NEW_WINDOW.fullmatch(item), _RENAMED.fullmatch(item)
                if window is not None:
                    kinds[window[2]] = window[1]
                elif renamed is not None and renamed[1] in kinds and renamed[2] == renamed[4]:
                    kinds[renamed[3]] = kinds[renamed[1]]
    return kinds


def has_subtotals_over_time(node: Node) -> bool:
    """Return whether a cube, a rollup or a grouping set leaves out a grouping column with a watermark."""
    expand = node.children[0] if node.children else node
    if expand.name != "Expand" or len(expand.arguments) < 2:
        return False
    watermarked = {column for column in grouping_expressions(node) if has_watermark(column)}
    rows = [list_items(row) for row in list_items(expand.arguments[0])]
    return any(
        row[index] == "null"
        for index, column in enumerate(list_items(expand.arguments[1]))
        if column in watermarked
        for row in rows
        if index < len(row)
    )


def python_aggregate(node: Node, known_calls: frozenset[str] | None) -> str | None:
    """Return the name of a Python function that aggregates.

    ``known_calls`` has the printed calls of such functions. Without it, only functions are found that are
    called with a column by which the aggregate does not group; other Python functions cannot be called like
    that.
    """
    text = node.arguments[-1] if node.arguments else ""
    if known_calls is not None:
        return next((call[: call.index("(")] for call in sorted(known_calls) if call in text), None)
    grouping = grouping_expressions(node)
    for call in _PYTHON_CALL.finditer(text):
        if any("#" in term and term not in grouping for term in split_list(call[2])):
            return call[1]
    return None


def join_type(node: Node) -> str:
    return node.arguments[0] if node.arguments else "Inner"


def function_output_mode(node: Node) -> str | None:
    """Return the output mode of a stateful function, in lower case."""
    modes = {"Append": "append", "Update": "update", "Complete": "complete"}
    return next((modes[argument] for argument in node.arguments if argument in modes), None)


def lacks_expiry(node: Node) -> bool:
    """Whether a stateful function has no timeout, timer or time to live, so only it can remove its state."""
    return any(argument in _NO_TIME for argument in node.arguments)


def times_out_by_event_time(node: Node) -> bool:
    """Whether a stateful function's state times out when the watermark passes it."""
    return _EVENT_TIME_TIMEOUT in node.arguments


def is_map_groups(node: Node) -> bool:
    """Whether a stateful function of the JVM is ``mapGroupsWithState``."""
    arguments = list(node.arguments)
    indices = [index for index, argument in enumerate(arguments) if argument in ("Append", "Update")]
    return bool(indices) and arguments[indices[0] + 1 : indices[0] + 2] == ["true"]


@dataclass(frozen=True)
class ResultKey:
    """The grouping columns of an aggregate in the result."""

    columns: tuple[str, ...] = ()
    """Their names, if the result has all of them."""
    missing: tuple[str, ...] = ()
    """The grouping expressions that the result lacks."""


def result_key(root: Node, aggregate: Node) -> ResultKey:
    """Find the grouping columns of an aggregate in the result; none if an operator above may change them."""
    expressions = grouping_expressions(aggregate)
    by_all_columns = aggregate.name in _BY_ALL_COLUMNS
    if not by_all_columns and len(aggregate.arguments) < 2:
        return ResultKey()
    columns = expressions if by_all_columns else list_items(aggregate.arguments[1])
    windows = _time_windows(aggregate)
    key = [_output_column(expression, columns) for expression in expressions]
    for node in reversed(_operators_above(root, aggregate)):
        if node.name == "Project":
            columns = list_items(node.arguments[0])
            key = [column and _kept_column(column, columns, windows) for column in key]
        elif Trait.NAMES_KEPT not in traits_of(node.name):
            return ResultKey()
    matches = [column and _COLUMN.fullmatch(column) for column in key]
    missing = [expression for expression, match in zip(expressions, matches, strict=True) if not match]
    if missing:
        return ResultKey(missing=tuple(map(without_ids, missing)))
    return ResultKey(tuple(match[1] for match in matches if match))


def _operators_above(root: Node, node: Node) -> list[Node]:
    """Return the operators above a node, from the top."""
    return [
        operator
        for operator in root.walk()
        if operator is not node and any(descendant is node for descendant in operator.descendants())
    ]


def _kept_column(column: str, columns: list[str], windows: Mapping[str, str]) -> str | None:
    """Return the output column that equals a column, or that is a bound of it if it is a time window."""
    kept = _output_column(column, columns)
    match = _GROUPED.fullmatch(column)
    if kept is None and match is not None and match[1] in windows:
        bounds = (_output_column(f"{column}.{bound}", columns) for bound in ("start", "end"))
        kept = next(filter(None, bounds), None)
    return kept


def _output_column(expression: str, columns: list[str]) -> str | None:
    """Return the output column that equals an expression, by its name or by its alias."""
    for column in columns:
        if column == expression:
            return column
        if column.startswith(f"{expression} AS "):
            return column[len(expression) + len(" AS ") :]
    return None


def has_aggregation_in_stage(physical: Node) -> bool:
    """Return whether a physical plan has an aggregation, and above it another operator that writes state, in
    one stage: with no exchange of rows in between.
    """
    return any(
        below.name in _RESTORES
        for node in physical.walk()
        if node.name in _WRITES
        for below in _below_in_stage(node)
    )


def _below_in_stage(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.name != "Exchange":
            yield child
            yield from _below_in_stage(child)
