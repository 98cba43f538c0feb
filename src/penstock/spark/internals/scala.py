"""Scala collections, and the trees that Spark's plans and expressions are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def listed(sequence: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [sequence.apply(place) for place in range(sequence.size())]


def sequence(jvm: Any, items: Iterable[Any]) -> Any:
    """A Scala sequence of some objects of the JVM's."""
    return jvm.PythonUtils.toSeq(list(items))


def children(tree: Any) -> list[Any]:
    """The children of a plan's node or of an expression."""
    return listed(tree.children())


def walk(tree: Any) -> Iterator[Any]:
    """A plan's node or an expression, and all below it, from the top."""
    yield tree
    for child in children(tree):
        yield from walk(child)


def name_of(tree: Any) -> str:
    """What Spark calls a plan's node or an expression, such as Project or Alias."""
    return str(tree.nodeName())
