"""Keep connections, locks and threads out of forked child processes.

A child must not use its parent's connections. A SQLite connection does not hold its file locks in the child,
although it believes that it does. Closing a PostgreSQL connection in the child ends the parent's session. If
another thread of the parent is inside a call into SQLite during the fork, that call's lock stays locked in
the child for ever. So before a fork, this module waits for running transactions and empties the pools, and
the child begins with empty pools.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class Forkable:
    """An object with connections, locks or threads that a child process must not inherit."""

    def before_fork(self) -> None:
        """Before the fork, release in the parent whatever can be recreated."""

    def after_fork_in_parent(self) -> None:
        """After the fork, resume work in the parent."""

    def after_fork_in_child(self) -> None:
        """After the fork, drop in the child whatever belongs to the parent."""


class ForkSafeLock(Forkable):
    """A lock that is free in a forked child, even if the parent held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        register(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()


_registered: WeakSet[Forkable] = WeakSet()
_inherited: list[object] = []
_registry_lock = threading.Lock()
_fork_lock = threading.Lock()


def register(forkable: Forkable) -> None:
    """Call the methods of ``forkable`` at each fork, as long as the object exists."""
    with _registry_lock:
        _registered.add(forkable)


def keep_inherited(inherited: object) -> None:
    """Keep a reference to an object of the parent, so that this child's garbage collector never closes it."""
    _inherited.append(inherited)


def _before_fork() -> None:
    _fork_lock.acquire()
    prepared: list[Forkable] = []
    while True:
        _registry_lock.acquire()
        new = [forkable for forkable in _registered if all(forkable is not earlier for earlier in prepared)]
        if not new:
            # No object can be registered until this fork is done.
            return
        # A thread that the fork waits for may have to register an object first.
        _registry_lock.release()
        for forkable in new:
            forkable.before_fork()
        prepared += new


def _after_fork_in_parent() -> None:
    registered = list(_registered)
    _registry_lock.release()
    for forkable in registered:
        forkable.after_fork_in_parent()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock, _fork_lock
    _registry_lock, _fork_lock = threading.Lock(), threading.Lock()
    for forkable in list(_registered):
        forkable.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
