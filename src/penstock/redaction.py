"""Removal of passwords from texts.

A text may come from outside, such as an error's message, so every function takes time proportional to its
length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.arguments import truncated

SEARCHED_CHARACTERS = 1 << 18
"""Characters of a text that are searched for passwords. The rest is cut off."""

_RUN = re.compile(r"\S+")
# Also without a scheme, as in //user:password@host.
_USER = re.compile(r"//[^\s/:@]*:")
# A quote that is not closed is redacted to the end of the text.
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?)"""


def _named(words: str) -> str:
    """Return a pattern for a name that contains one of the words, with the quote around it."""
    return rf"""(?<![\w.?&-])(?=[\w.-]*?(?:{words}))[\w.-]++["']?+[ \t]*+"""


# A quoted value, as in JSON and SQL, ends with its quote. Any other may contain blanks, as in libpq's
# keyword strings and in YAML, so that it is redacted to the end of the line.
_PASSWORD = re.compile(
    rf"({_named('password|passphrase')}(?::[ \t]*+)?+){_QUOTED}|({_named('password|passphrase')}[=:])[^\n]*",
    re.IGNORECASE | re.DOTALL,
)
# The last one is that of Azure's signed URLs; as part of a longer word it means something else.
_KEYS = (
    "secret|token|credential|passwd|pwd|authorization|signature|(?:access|api|private|account)[._-]?key"
    r"|(?<![^\W_])sig(?![^\W_])"
)
_OTHER = re.compile(
    rf"({_named(_KEYS)}[=:]\s*+(?:(?:bearer|basic)\s++)?+)(?:{_QUOTED}|[^\s,;&)}}\]]+)",
    re.IGNORECASE | re.DOTALL,
)
_IN_QUERY = re.compile(
    rf"([?&](?=[\w.-]{{0,100}}?(?:password|{_KEYS}))[\w.-]{{1,200}}=)[^\s&'\")]*", re.IGNORECASE
)
# A header's value without its name, which may be cut off, and libpq's variable as some programs print it.
# Words of a sentence are no secrets.
_ALONE = re.compile(
    r"(\b(?i:bearer)[ \t]++)(?:[\w.~+/=-]{8,}+|[\w.~+/=-]++\Z)"
    r"|(\bPGPASSWORD[ \t]++)(?!(?:and|for|from|in|is|or|to)\b)\S++"
)
# The literals of PostgreSQL's SQL; one that is not closed is cut off there.
_LITERAL = re.compile(
    r"""(?<![\w$])[eE]'(?:[^'\\]|''|\\.)*+(?:'|\\?\Z)|'(?:[^']|'')*+'?|(?<![\w$])\$(\w*+)\$.*?(?:\$\1\$|\Z)""",
    re.DOTALL,
)
_SHORTEST_SECRET = 4
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
    # A shorter one would redact letters everywhere; it is still removed from URLs.
    return sorted((secret for secret in passwords if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)


def without(text: str, secret: str) -> str:
    """Return a text without a secret; a secret such as ``postgres`` is kept in the scheme of a URL."""
    return re.sub(rf"({_SCHEME})|{re.escape(secret)}", lambda match: match[1] or "***", text)


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without passwords, keys and tokens; of a very long text, the beginning."""
    for secret in secrets:
        text = without(text, secret)
    cut = len(text) > SEARCHED_CHARACTERS
    shown = without_user_info(text[:SEARCHED_CHARACTERS], cut=cut)
    shown = _PASSWORD.sub(_starred, _IN_QUERY.sub(r"\1***", shown))
    shown = _ALONE.sub(_starred, _OTHER.sub(r"\1***", shown))
    return f"{shown}…" if cut else shown


def without_literals(query: str) -> str:
    """Return a statement of PostgreSQL without the values in it, which may be anybody's data."""
    return _LITERAL.sub("'…'", query)


def _starred(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}***"


def without_user_info(text: str, *, cut: bool = False) -> str:
    """Return a text without the passwords of its URLs; each ends at the last @ before a blank, as it may
    contain one.
    """

    def starred(run: re.Match[str]) -> str:
        # The last @ is searched for once, not from each place where a URL may begin.
        open_ended = cut and run.end() == len(text)
        end = len(run[0]) if open_ended else run[0].rfind("@")
        user = _USER.search(run[0], 0, end) if end > 0 else None
        return run[0] if user is None else f"{run[0][: user.end()]}***{run[0][end:]}"

    return _RUN.sub(starred, text)


def sentence(text: str, most: int, secrets: Sequence[str] = ()) -> str:
    """Return a text as one line of at most ``most`` characters, without passwords, keys and tokens."""
    return truncated(" ".join(redact(text, secrets).split()), most)


def shown(error: BaseException) -> str:
    """Return an error's message for a log, without passwords, keys and tokens: it may be that of a user's
    function or of a library.
    """
    return redact(str(error))
