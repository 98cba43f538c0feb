"""Suppresses log records while a test repeats a logged action many times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only(level: int, name: str) -> Iterator[None]:
    """Let a logger pass only records of a level and above, and restore its level in the end."""
    logger = logging.getLogger(name)
    previous = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(previous)
