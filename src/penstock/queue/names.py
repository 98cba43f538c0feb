"""Names of queues, consumers and sessions: any Unicode text, as data."""

from __future__ import annotations

from penstock.arguments import in_quotes
from penstock.errors import InvalidName

MAX_CHARACTERS = 255
SERVICE_COLUMNS = ("_queue", "_generation", "_partition", "_row_index", "_timestamp")
"""What a Spark read puts beside a queue's columns where it is asked to."""


def check_name(kind: str, name: object) -> str:
    """The name, if it is one.

    Raises
    ------
    InvalidName
        When it is not text, empty, longer than 255 characters, or has characters that no database can store.
    """
    if not isinstance(name, str):
        raise InvalidName(f"the name of a {kind} is text, not {type(name).__name__}")
    if not 1 <= len(name) <= MAX_CHARACTERS:
        raise InvalidName(f"the name of a {kind} has 1 to {MAX_CHARACTERS} characters, not {len(name)}")
    if "\0" in name or any(0xD800 <= ord(character) <= 0xDFFF for character in name):
        raise InvalidName(f"the name of a {kind} may not contain NUL or lone surrogates: {in_quotes(name)}")
    return name
