"""Wait on a condition instead of sleeping for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T], timeout: float = 30, message: str = "", *, interval: float = 0.02
) -> T:
    """Poll `predicate` until it returns something true, and return that.

    Raises AssertionError with `message` and the last value after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {message or predicate!r} (last value: {value!r})")
        time.sleep(interval)
    return value
