"""Texts without passwords.

The texts may come from anybody, as the message of an error may, so the time that they take is proportional to their length, whatever
is in them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit

LOOKED_AT = 1 << 18
"""Characters of a text that are searched for passwords. The rest is cut off."""

_RUN = re.compile(r"\S+")
_USER = re.compile(r"\w://[^\s/:@]*:")
_IN_QUERY = re.compile(r"([?&][\w.-]{0,100}password=)[^\s&'\")]*", re.IGNORECASE)
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?)"""
"""A quote that nothing closes is struck out to the end of the text."""


def _named(words: str) -> str:
    """A name with one of some words in it, searched once, from its beginning; and the quote around it."""
    return rf"""(?<![\w.?&-])(?=[\w.-]*?(?:{words}))[\w.-]++["']?+[ \t]*+"""


# As JSON and SQL have it, where a quote ends the value. Else there may be blanks in it, as in a keyword string of libpq and in YAML: only the
# line's end is sure to be behind it.
_PASSWORD = re.compile(
    rf"({_named('password|passphrase')}(?::[ \t]*+)?+){_QUOTED}|({_named('password|passphrase')}[=:])[^\n]*",
    re.IGNORECASE | re.DOTALL,
)
_KEYS = "secret|token|credential|passwd|pwd|authorization|signature|(?:access|api|private|account)[._-]?key"
_OTHER = re.compile(
    rf"({_named(_KEYS)}[=:]\s*+(?:(?:bearer|basic)\s++)?+)(?:{_QUOTED}|[^\s,;&)}}\]]+)",
    re.IGNORECASE | re.DOTALL,
)
_SHORTEST_SECRET = 4
_SCHEME = r"\bpostgres(?:ql)?://"


def secrets_of(url: str) -> list[str]:
    """Return the passwords in a URL, as written and as meant, the longest first."""
    try:
        query = parse_qs(urlsplit(url).query)
    except ValueError:
        query = {}
    user_info = url.partition("://")[2].partition("?")[0].rpartition("@")[0]
    found = {user_info.partition(":")[2], *query.get("password", []), *query.get("sslpassword", [])}
    found |= {unquote(secret) for secret in found}
    # A shorter one would strike out letters everywhere; it is still struck from URLs.
    return sorted((secret for secret in found if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)


def without(text: str, secret: str) -> str:
    """Return a text without a secret; one such as ``postgres`` stays in the scheme of a URL, where it tells nothing."""
    return re.sub(rf"({_SCHEME})|{re.escape(secret)}", lambda found: found[1] or "***", text)


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without passwords; of a very long one the beginning."""
    for secret in secrets:
        text = without(text, secret)
    cut = len(text) > LOOKED_AT
    shown = without_user_info(text[:LOOKED_AT], cut=cut)
    shown = _PASSWORD.sub(_struck, _IN_QUERY.sub(r"\1***", shown))
    return f"{shown}…" if cut else shown


def _struck(found: re.Match[str]) -> str:
    return f"{found[1] or found[2]}***"


def without_user_info(text: str, *, cut: bool = False) -> str:
    """Return a text without the passwords of its URLs: each goes up to the last @ before a blank, in case it has one itself.

    Parameters
    ----------
    cut
        Whether the text is the beginning of a longer one, which may have the @ of its last URL.
    """

    def struck(run: re.Match[str]) -> str:
        # The last @ is searched for once, rather than from each place where a URL may begin.
        open_ended = cut and run.end() == len(text)
        end = len(run[0]) if open_ended else run[0].rfind("@")
        user = _USER.search(run[0], 0, end) if end > 0 else None
        return run[0] if user is None else f"{run[0][: user.end()]}***{run[0][end:]}"

    return _RUN.sub(struck, text)


def sentence(text: str, most: int, secrets: Sequence[str] = ()) -> str:
    """Return a text in one line of ``most`` characters, without passwords, keys and tokens: what others may be shown."""
    hidden = redact(text, secrets)
    line = " ".join(_OTHER.sub(r"\1***", hidden).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
