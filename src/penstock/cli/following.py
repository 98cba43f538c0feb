"""Waiting for what comes next, for commands that follow."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

_FASTEST, _SLOWEST = 0.05, 1.0


def polls(shown: Callable[[], int]) -> Iterator[None]:
    """Come back soon while more is shown, seldom while nothing is; end when nobody reads the output any more.

    Parameters
    ----------
    shown
        How much has been shown so far.
    """
    pause = _FASTEST
    while not output_is_closed(pause):
        before = shown()
        yield
        pause = _FASTEST if shown() > before else min(pause * 2, _SLOWEST)


def output_is_closed(seconds: float) -> bool:
    """Wait so long, or until the reader of our pipe goes away, which is told without being asked for."""
    poller = select.poll()
    with suppress(OSError, ValueError):
        poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(seconds * 1000))
