"""Checks of arguments, and names as error messages quote them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import UnionType

from penstock.errors import InvalidInputError

_SHOWN_CHARACTERS = 100
_MAY_BE_SECRET = re.compile(r"://|password|secret|token|key", re.IGNORECASE)


def brief(text: str) -> str:
    """Return a text for a message; if it is long, only the beginning and the end."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = (_SHOWN_CHARACTERS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def truncated(text: str, characters: int) -> str:
    """Return a text, truncated with an ellipsis if it is longer than ``characters``."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def in_quotes(name: object) -> str:
    """Return a user's value in quotes for a message, escaped, and shortened if it is long."""
    return brief(repr(name))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` to append to a message, or ``""`` if no known name is similar."""
    by_folded: dict[str, str] = {}
    for candidate in known:
        by_folded.setdefault(candidate.casefold(), candidate)
    nearest = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {in_quotes(by_folded[nearest[0]])}?" if nearest else ""


def refused_arguments(function: Callable[..., object], *values: object, **named: object) -> str | None:
    """Return why a function cannot be called with the arguments; None if it can, or if that is unknown."""
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        return str(error)
    except ValueError:
        # Some C functions do not report their parameters.
        return None
    return None


def require(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    if not isinstance(value, kind):
        raise refusal(name, value, wanted)


def column_names(name: str, value: object) -> tuple[str, ...]:
    """Return the columns that an argument names: one name, or an iterable of names."""
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(column, str) for column in names):
        raise refusal(name, value, "a column's name, or several such as ['id', 'name']")
    return names


def path_text(name: str, value: object) -> str:
    """Return a path or URL as text; an empty one is refused, because it would mean the working directory."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise refusal(name, value, "a path, or a URL")
    return text


def refusal(name: str, value: object, wanted: str) -> InvalidInputError:
    """Return the error for an argument of the wrong type; a value that may hold a password is not shown."""
    text = repr(value)
    shown = f"this {type(value).__name__}" if _MAY_BE_SECRET.search(text) else brief(text)
    return InvalidInputError(f"{name} is {wanted}, not {shown}", parameter=name, value=shown)
