"""Texts without passwords."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit

_USER_INFO = re.compile(r"(\w://[^\s/:@]*):[^\s]*@")
_IN_QUERY = re.compile(r"([?&](?:ssl)?password=)[^\s&'\")]*", re.IGNORECASE)
# In a keyword string of libpq there may be blanks around the =, and quotes: only the line's end is sure to be behind it.
_IN_KEYWORDS = re.compile(r"(?<![?&])\b((?:ssl)?password\s*=)[^\n]*", re.IGNORECASE)
_OTHER = re.compile(
    r"""((?:secret|token|access[._-]?key|credential|passwd|pwd)[\w.-]{0,200}["']?\s*[=:]\s*)"""
    r"""("[^"]*"|'[^']*'|[^\s,;&)}\]]+)""",
    re.IGNORECASE,
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
    """Return a text without passwords."""
    for secret in secrets:
        text = without(text, secret)
    return _IN_KEYWORDS.sub(r"\1***", _IN_QUERY.sub(r"\1***", _USER_INFO.sub(r"\1:***@", text)))


def sentence(text: str, most: int, secrets: Sequence[str] = ()) -> str:
    """Return a text in one line of ``most`` characters, without passwords, keys and tokens: what others may be shown."""
    hidden = redact(text, secrets)
    line = " ".join(_OTHER.sub(r"\1***", hidden).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
