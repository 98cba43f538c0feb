"""Errors of storage and catalog libraries: access denied, and messages without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from penstock.errors import FeedUnavailableError
from penstock.redaction import redact

_MAX_CHARACTERS = 500
_SHORTEST_SECRET = 4
_DENIED = re.compile(
    r"access.?denied|forbidden|unauthori[sz]ed|permission.?denied|necessary privileges|invalid.?access.?key"
    r"|signature.?does.?not.?match|(expired|invalid).?token|authorization.?expired",
    re.IGNORECASE,
)


def is_denied(error: BaseException) -> bool:
    """Whether an error is about credentials, which libraries report only in their message."""
    return _DENIED.search(f"{type(error).__name__} {error}") is not None


def access_denied(what: str, reason: str, where: str) -> FeedUnavailableError:
    """Return the error for credentials, configured ``where``, that are wrong or lack permission.

    The reason is the library's message, without secrets.
    """
    return FeedUnavailableError(
        f"{what} refuses access: {reason.rstrip('.')}. The credentials are wrong, have expired, or may not "
        f"read there: give others in {where}",
        condition="FEED_UNAVAILABLE.ACCESS_DENIED",
    )


def without_secrets(error: BaseException, properties: Mapping[str, object]) -> str:
    """Return the first line of an error message without the values of a catalog's properties."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    secrets = (str(value) for name, value in properties.items() if name not in ("type", "warehouse"))
    # Cut last: half of a secret would not be recognised.
    return redact(_masked(text, secrets))[:_MAX_CHARACTERS]


def one_line(text: str, options: Mapping[str, str]) -> str:
    """Return an error message of deltalake on one line, without the values of storage options."""
    # An XML body repeats what the text before it says.
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", " ", text.partition("<?xml")[0]).split())
    return _masked(words, sorted(options.values(), key=len, reverse=True))[:_MAX_CHARACTERS].rstrip(".")


def _masked(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "…")
    return text
