"""Fewer log records while a test does what is logged a thousand times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only(level: int, name: str) -> Iterator[None]:
    """Have a logger pass records of a level and above, and afterwards what it passed before."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
