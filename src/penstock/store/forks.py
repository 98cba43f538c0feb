"""Keep connections, locks and threads out of forked child processes.

A child that uses its parent's SQLite connection loses the file locks that the connection believes it has, and
a child that closes its parent's PostgreSQL connection ends the parent's session. If another thread of the
parent is inside a call into SQLite during the fork, the child waits for ever for a lock that this call holds.
So a fork waits for running transactions, pools are emptied before it, and the child begins with empty pools.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class Forkable:
    """An object that holds what a child process must not inherit."""

    def before_fork(self) -> None:
        """Release, in the parent, what can be recreated."""

    def after_fork_in_parent(self) -> None:
        """Resume in the parent."""

    def after_fork_in_child(self) -> None:
        """Forget, in the child, what belongs to the parent."""


class Guard(Forkable):
    """A lock that is free in a child, even if it was held in the parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        watch(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()


_known: WeakSet[Forkable] = WeakSet()
_kept: list[object] = []
_guard = threading.Lock()
_forking = threading.Lock()


def watch(thing: Forkable) -> None:
    """Call the methods of ``thing`` at forks, for as long as it lives."""
    with _guard:
        _known.add(thing)


def keep(inherited: object) -> None:
    """Keep an object that belongs to the parent from being closed or collected in this child."""
    _kept.append(inherited)


def _before() -> None:
    _forking.acquire()
    ready: list[Forkable] = []
    while True:
        _guard.acquire()
        new = [thing for thing in _known if all(thing is not other for other in ready)]
        if not new:
            # No object can be added until this fork has happened.
            return
        # A thread that the fork waits for may have to add an object first.
        _guard.release()
        for thing in new:
            thing.before_fork()
        ready += new


def _after_in_parent() -> None:
    known = list(_known)
    _guard.release()
    for thing in known:
        thing.after_fork_in_parent()
    _forking.release()


def _after_in_child() -> None:
    global _guard, _forking
    _guard, _forking = threading.Lock(), threading.Lock()
    for thing in list(_known):
        thing.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
