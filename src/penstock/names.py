"""Names in error messages: cut where they are long, and the nearest known one where they are mistyped."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN_CHARACTERS = 100


def brief(text: str) -> str:
    """Return a text without its middle where it is too long for a message."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = (_SHOWN_CHARACTERS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def in_quotes(name: object) -> str:
    """Return a name, or another value that somebody wrote, as a message quotes it: with escapes, and brief."""
    return brief(repr(name))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the nearest known name, to be put behind an error message.

    Parameters
    ----------
    name
        What the caller wrote.
    known
        The names that exist.

    Returns
    -------
    str
        ``" Did you mean 'x'?"`` with a leading space, or ``""`` when nothing is near.
    """
    by_folded: dict[str, str] = {}
    for candidate in known:
        by_folded.setdefault(candidate.casefold(), candidate)
    nearest = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {in_quotes(by_folded[nearest[0]])}?" if nearest else ""
