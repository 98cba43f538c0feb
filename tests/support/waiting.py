"""Wait on a condition instead of sleeping for a guess."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, TypeVar

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


def readable(file: Any, seconds: float) -> bool:
    """Whether there is something to read within some seconds.

    Its descriptor may have any number; ``select`` takes only 1,024.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
