"""Help for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
    return f" Did you mean {by_folded[nearest[0]]!r}?" if nearest else ""
