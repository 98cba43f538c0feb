"""Waits for conditions instead of sleeping for a fixed time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T], timeout: float = 30, message: str = "", *, interval: float = 0.02
) -> T:
    """Poll `predicate` until it returns a true value, and return that value.

    Raises AssertionError with `message` and the last value after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {message or predicate!r} (last value: {value!r})")
        time.sleep(interval)
    return value


def readable(file: Any, seconds: float) -> bool:
    """Return whether a file becomes readable within some seconds.

    Unlike ``select``, this supports descriptors above 1023.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
