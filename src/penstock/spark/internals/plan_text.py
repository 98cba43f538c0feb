"""A query's analysed plan as Spark prints it, as a tree of nodes (Spark 4.2, 4.3).

Text is what both kinds of session give, in one call: a walk over the JVM's objects costs several calls a node, and the plan's own
JSON leaves out which columns have a watermark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

_LINE = re.compile(r"^((?:[:|] {2}| {3})*)([:+]- )?(['!~]*)([A-Z]\w*)(?:$|(?= ))(.*)$")
NOT_PLANNED = "NotPlanned"
"""Stands for the plan that a server could not make."""
_WHOLE = 2**31 - 1
_ANALYZED = re.compile(r"== Analyzed Logical Plan ==\n.*?\n(.*?)\n?\n== Optimized", re.DOTALL)
# An attribute as it is printed: its number, an L for a bigint, and the watermark's delay.
_MARKED = re.compile(r"#\d+L?-T\d+ms$")
_NUMBER = re.compile(r"#\d+L?(-T\d+ms)?")
_SHOWN = 200
# Their printed form lacks the mark of a streaming operator.
_STREAMS = ("StreamingRelation", "StreamingExecutionRelation")


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of the plan; each is equal to itself alone."""

    name: str
    text: str
    """Its arguments, as they are printed."""
    streaming: bool
    number: int
    """Its place in the plan, from the top."""
    children: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """The node and all below it, from the top."""
        yield self
        for child in self.children:
            yield from child.walk()

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(split_list(self.text))

    @property
    def line(self) -> str:
        """The line in the plan, shortened for people."""
        text = _NUMBER.sub("", f"{self.name} {self.text}".strip())
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"

    def below(self) -> Iterator[Node]:
        for child in self.children:
            yield from child.walk()


def plan_tree(frame: DataFrame) -> Node:
    """The plan of a DataFrame, classic or of Spark Connect."""
    given: Any = frame
    if not hasattr(given, "_jdf"):
        return _told_by_the_server(given)
    plan = given._jdf.queryExecution().analyzed()
    tree = parse(str(plan.treeString(True, False, _WHOLE, False, False)))
    leaves = sum(not node.children for node in tree.walk())
    # A text in the query may look like a line of its plan.
    return tree if leaves == plan.collectLeaves().size() else _walked(plan, count())


def _told_by_the_server(given: Any) -> Node:
    """The plan over Spark Connect, which prints all stages of it or none, and shortens long lists of columns."""
    try:
        found = _ANALYZED.search(given._explain_string(extended=True))
    except PySparkException as error:
        return Node(NOT_PLANNED, str(error).splitlines()[0], True, 0, ())
    return parse("" if found is None else found.group(1))


def _walked(plan: Any, numbers: Iterator[int]) -> Node:
    """The tree by the JVM's objects, several calls for each."""
    number, children = next(numbers), plan.children()
    name = str(plan.nodeName())
    text = str(plan.simpleString(_WHOLE)).lstrip("'!~").removeprefix(name).strip()
    below = tuple(_walked(children.apply(place), numbers) for place in range(children.size()))
    return Node(name, text, plan.isStreaming(), number, below)


def parse(text: str) -> Node:
    """The tree in a printed plan."""
    rows: list[tuple[int, str, str, bool]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        depth = 0 if match is None else (len(match[1]) + len(match[2] or "")) // 3
        if match is None or (rows and (not match[2] or depth > rows[-1][0] + 1)):
            # A literal with a line break in it.
            if rows:
                rows[-1] = (*rows[-1][:2], f"{rows[-1][2]}\n{line}", rows[-1][3])
            continue
        rows.append((depth, match[4], match[5].strip(), "~" in match[3] or match[4] in _STREAMS))
    return _node(rows, 0)[0] if rows else Node("", "", True, 0, ())


def _node(rows: list[tuple[int, str, str, bool]], place: int) -> tuple[Node, int]:
    depth, name, text, streaming = rows[place]
    children, after = [], place + 1
    while after < len(rows) and rows[after][0] > depth:
        child, after = _node(rows, after)
        children.append(child)
    return Node(name, text, streaming, place, tuple(children)), after


def split_list(text: str) -> Iterator[str]:
    """The parts of a printed list, at the commas that are in no brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def list_items(argument: str) -> list[str]:
    """What is in a list in square brackets."""
    inner = argument[1:-1] if argument.startswith("[") and argument.endswith("]") else argument
    return list(split_list(inner))


def has_watermark(expression: str) -> bool:
    """Whether an expression is a column with a watermark."""
    return _MARKED.search(expression) is not None


def without_ids(expression: str) -> str:
    """An expression without the numbers of its columns."""
    return _NUMBER.sub("", expression)


# ---- grouping: What an aggregate or a deduplication of a printed plan goes by (Spark 4.2, 4.3).

# What Spark makes a session window's column of, and a column that is another one by a new name.
_SESSION = re.compile(r"named_struct\(start, .*\) AS session_window#(\d+)(?:-T\d+ms)?", re.DOTALL)
# Spark Connect's withColumn takes the watermark away, and with it the mark of a session window.
_RENAMED = re.compile(r"[^()]*#(\d+)(-T\d+ms)? AS .+#(\d+)(-T\d+ms)?", re.DOTALL)
_COLUMN = re.compile(r"[^()]*#(\d+)(?:-T\d+ms)?")


def grouping_expressions(node: Node) -> list[str]:
    """What an aggregate groups by, or a deduplication's keys."""
    # An aggregate over all rows has no list of what it groups by: the only one are its results.
    alone = node.name == "Aggregate" and len(node.arguments) < 2
    return [] if alone or not node.arguments else list_items(node.arguments[0])


def groups_by_session(node: Node) -> bool:
    """Whether an aggregate groups by session windows, under their own name or another."""
    columns = [match[1] for match in map(_COLUMN.fullmatch, grouping_expressions(node)) if match]
    return bool(columns) and not _sessions(node).isdisjoint(columns)


def _sessions(node: Node) -> set[str]:
    """The numbers of the columns below a node that are session windows."""
    found: set[str] = set()
    for below in reversed(list(node.below())):
        for item in list_items(below.text) if below.name == "Project" else ():
            made, renamed = _SESSION.fullmatch(item), _RENAMED.fullmatch(item)
            if made is not None:
                found.add(made[1])
            elif renamed is not None and renamed[1] in found and renamed[2] == renamed[4]:
                found.add(renamed[3])
    return found
