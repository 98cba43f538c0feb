"""Removal of passwords from texts.

A text may come from other programs, such as an error message, so every function takes time proportional to
its length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.arguments import truncated

SEARCHED_CHARACTERS = 1 << 18
"""The number of characters of a text that are searched for passwords; the rest is cut off."""

_RUN = re.compile(r"\S+")
# Matches also without a scheme, as in //user:password@host.
_USER = re.compile(r"//[^\s/:@]*:")
# The user info of these URLs is often a token without a password, or with a meaningless one. In other
# schemes it is the name of a user.
_USER_INFO = r"""(\b(?:https?|nats)://)[^\s/?#@:"'<>,\\]++(?=@|:(?:x-oauth-basic)?@"""
_TOKEN_IN_URL = re.compile(rf"{_USER_INFO})", re.IGNORECASE)
_TOKEN_IN_CUT_URL = re.compile(rf"{_USER_INFO}|(?::[a-z-]{{0,13}}+)?\Z)", re.IGNORECASE)
# Literals in PostgreSQL's SQL; an unterminated one extends to the end of the text.
_LITERAL = re.compile(
    r"""(?<![\w$])[eE]'(?:[^'\\]|''|\\.|(?!))*+(?:'|\\?\Z)|'(?:[^']|''|(?!))*+'?|(?<![\w$])\$(\w*+)\$.*?(?:\$\1\$|\Z)""",
    re.DOTALL,
)
SHORTEST_SECRET = 4
"""The minimum length of a secret that is searched for in a text; a shorter one would redact many letters."""
_SCHEME = r"\bpostgres(?:ql)?://"


def secrets_of(url: str) -> list[str]:
    """Return the passwords in a URL, percent-encoded and decoded, the longest first."""
    try:
        query = parse_qs(urlsplit(url).query)
    except ValueError:
        query = {}
    user_info = url.partition("://")[2].partition("?")[0].rpartition("@")[0]
    passwords = {user_info.partition(":")[2], *query.get("password", []), *query.get("sslpassword", [])}
    passwords |= {unquote(secret) for secret in passwords}
    # A shorter secret would redact many letters; it is still removed from URLs.
    return sorted((secret for secret in passwords if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)


def without(text: str, secret: str) -> str:
    """Return a text without a secret, except in the scheme of a URL, for a secret such as ``postgres``."""
    return re.sub(rf"({_SCHEME})|{re.escape(secret)}", lambda match: match[1] or "***", text)


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text, or the beginning of a very long one, without passwords, keys and tokens."""
    from penstock import secret_patterns as patterns

    for secret in secrets:
        text = without(text, secret)
    cut = len(text) > SEARCHED_CHARACTERS
    # Private keys first: patterns for values that end with their line would leave the other lines of a key.
    shown = patterns.PRIVATE_KEY.sub(r"\1***", text[:SEARCHED_CHARACTERS])
    shown = without_user_info(shown, cut=cut)
    shown = patterns.ENCODED.sub(r"\1***", patterns.IN_QUERY.sub(r"\1***", shown))
    for command, password in patterns.IN_COMMANDS:
        shown = command.sub(partial(_starred_inside, password), shown)
    for pattern in patterns.PATTERNS:
        shown = pattern.sub(_starred, shown)
    return f"{shown}…" if cut else shown


def without_literals(query: str) -> str:
    """Return a PostgreSQL statement without its literals, which may be personal data."""
    return _LITERAL.sub("'…'", query)


def _starred(match: re.Match[str]) -> str:
    return f"{match[match.lastindex or 1]}***"


def _starred_inside(password: re.Pattern[str], match: re.Match[str]) -> str:
    return password.sub(_starred, match[0])


def without_user_info(text: str, *, cut: bool = False) -> str:
    """Return a text without the passwords in its URLs, and without the tokens before the @ of HTTP URLs.

    A password ends at the last @ before a blank, since it may contain one.
    """

    tokenless = (_TOKEN_IN_CUT_URL if cut else _TOKEN_IN_URL).sub(r"\1***", text)

    def starred(run: re.Match[str]) -> str:
        # Search for the last @ only once, not from each position where a URL may begin.
        open_ended = cut and run.end() == len(tokenless)
        end = len(run[0]) if open_ended else run[0].rfind("@")
        user = _USER.search(run[0], 0, end) if end > 0 else None
        return run[0] if user is None else f"{run[0][: user.end()]}***{run[0][end:]}"

    return _RUN.sub(starred, tokenless)


def sentence(text: str, most: int, secrets: Sequence[str] = ()) -> str:
    """Return a text as one line of at most ``most`` characters, without passwords, keys and tokens."""
    return truncated(" ".join(redact(text, secrets).split()), most)


def redacted_message(error: BaseException) -> str:
    """Return an error's message for a log, without passwords, keys and tokens, since it may come from user
    code or a library.
    """
    return redact(str(error))
