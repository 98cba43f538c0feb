"""Run work that waits for a network in several threads.

This does not use an executor, which refuses work while the program is ending, when maintenance and threads
that outlive the main thread may still have work to do.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 16
_END = object()


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Map a function over items in threads, since most of the time is spent waiting for the storage.

    After an error no further item is started, and the error of the first item that failed is raised. This
    thread also works, so that everything is done even if no other thread can be started.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    found: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    places = itertools.count()

    def some() -> None:
        while not errors and (place := next(places)) < len(items):
            try:
                found[place] = work(items[place])
            except BaseException as error:  # raised below, by the thread that waits
                errors[place] = error

    helpers = [_Made(some) for _ in range(min(_THREADS, len(items)) - 1)]
    some()
    for helper in helpers:
        helper.wait()
    # Raise an interrupt, for example, before an error that a caller may ignore.
    for error in errors.values():
        if not isinstance(error, Exception):
            raise error
    if errors:
        raise errors[min(errors)]
    return [found[place] for place in range(len(items))]


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items; the next one is computed in another thread while the caller uses the current one."""
    made = _Made(lambda: next(items, _END))
    try:
        while (item := made.result()) is not _END:
            made = _Made(lambda: next(items, _END))
            yield cast("T", item)
    finally:
        made.wait()


class _Made(Generic[R]):
    """The result of a function that runs in another thread, or in this one if no thread can be started."""

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._results: list[R] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="penstock-parallel", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can be started, for example while the program is ending.
            self._thread = None
            self._run()

    def _run(self) -> None:
        try:
            self._results.append(self._make())
        except BaseException as error:  # raised by the thread that asks for the result
            self._error = error

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def result(self) -> R:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
