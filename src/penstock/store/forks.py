"""What must not cross a fork: connections, locks and threads belong to the process that made them.

A child that goes on with its parent's SQLite connection loses the file locks that the connection believes it has, and one
that closes its parent's PostgreSQL connection ends the parent's session. And a child whose parent was in the middle of a call
into SQLite in another thread waits for ever for a lock that this call holds. So a fork waits for the transactions in hand, pools
are emptied before it, and the child begins with nothing.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet


class Forkable:
    """Something that holds what a child process must not inherit."""

    def before_fork(self) -> None:
        """Let go, in the parent, of what can be made again."""

    def after_fork_in_parent(self) -> None:
        """Go on in the parent."""

    def after_fork_in_child(self) -> None:
        """Forget, in the child, what belongs to the parent."""


_known: WeakSet[Any] = WeakSet()
_guard = threading.Lock()


def watch(thing: Forkable) -> None:
    """Tell ``thing`` of forks for as long as it lives."""
    with _guard:
        _known.add(thing)


def _before() -> None:
    _guard.acquire()
    for thing in list(_known):
        thing.before_fork()


def _after_in_parent() -> None:
    for thing in list(_known):
        thing.after_fork_in_parent()
    _guard.release()


def _after_in_child() -> None:
    global _guard
    _guard = threading.Lock()
    for thing in list(_known):
        thing.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
