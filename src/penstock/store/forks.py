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


class Guard(Forkable):
    """A lock that a child finds free, whoever held it in the parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        watch(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()


_known: WeakSet[Any] = WeakSet()
_guard = threading.Lock()
_forking = threading.Lock()


def watch(thing: Forkable) -> None:
    """Tell ``thing`` of forks for as long as it lives."""
    with _guard:
        _known.add(thing)


def _before() -> None:
    _forking.acquire()
    ready: list[Any] = []
    while True:
        _guard.acquire()
        new = [thing for thing in _known if all(thing is not other for other in ready)]
        if not new:
            # Nobody else can be told of forks until this one has happened.
            return
        # A thread that is waited for may have to tell of something new first.
        _guard.release()
        for thing in new:
            thing.before_fork()
        ready += new


def _after_in_parent() -> None:
    there = list(_known)
    _guard.release()
    for thing in there:
        thing.after_fork_in_parent()
    _forking.release()


def _after_in_child() -> None:
    global _guard, _forking
    _guard, _forking = threading.Lock(), threading.Lock()
    for thing in list(_known):
        thing.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
