"""Checks of the names, partitions, row indexes and versions that callers pass."""

from __future__ import annotations

import re

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError, InvalidNameError, InvalidPositionError
from penstock.store.records.catalog import QueueRecord

MAX_CHARACTERS = 255
_URL = re.compile(r"([a-z][a-z0-9+.-]*:)+//", re.IGNORECASE)
METADATA_COLUMNS = ("_queue", "_generation", "_partition", "_row_index", "_timestamp")
"""The metadata columns that a Spark read can add to a queue's columns."""


def check_name(kind: str, name: object) -> str:
    """Return the name if it is valid, that is, Unicode text that both databases can store."""
    if not isinstance(name, str):
        raise InvalidNameError(f"the name of a {kind} is text, not {type(name).__name__}")
    if not 1 <= len(name) <= MAX_CHARACTERS:
        raise InvalidNameError(f"the name of a {kind} has 1 to {MAX_CHARACTERS} characters, not {len(name)}")
    if "\0" in name or any(0xD800 <= ord(character) <= 0xDFFF for character in name):
        raise InvalidNameError(
            f"the name of a {kind} may not contain NUL or lone surrogates: {in_quotes(name)}"
        )
    if _URL.match(name):
        # This mistake would store the URL's password and show it.
        raise InvalidNameError(
            f"the name of a {kind} may not be a URL: pass the store's URL to penstock.connect, or as the "
            "option url"
        )
    return name


def check_whole_partition(partition: object) -> None:
    """Refuse a partition that is not a whole number. True and False are not whole numbers."""
    if type(partition) is not int:
        raise InvalidInputError(f"a partition is a whole number, not {partition!r}")


def check_whole_index(*indexes: object) -> None:
    """Refuse row indexes that are not whole numbers."""
    for index in indexes:
        if type(index) is not int:
            raise InvalidPositionError(f"a row index is a whole number, not {index!r}")


def refuse_feed(queue: QueueRecord) -> None:
    """Refuse a queue that holds a change feed, which accepts only whole commits."""
    if queue.contract is not None:
        raise InvalidInputError(
            f"queue {queue.name!r} holds a change feed, which accepts only whole commits: "
            "use QueueFeed.append_commit",
            condition="INVALID_INPUT.CHANGE_FEED_QUEUE",
            queue=queue.name,
        )
