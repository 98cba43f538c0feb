"""Whether a storage or a catalog lets nobody in with what it was given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import FeedUnavailable
from penstock.redaction import redact

_WORDS = re.compile(
    r"access.?denied|forbidden|unauthori[sz]ed|permission.?denied|necessary privileges|invalid.?access.?key"
    r"|signature.?does.?not.?match|(expired|invalid).?token|authorization.?expired",
    re.IGNORECASE,
)


def is_denied(error: BaseException) -> bool:
    """Whether an error is about credentials; libraries tell it in their words only."""
    return _WORDS.search(f"{type(error).__name__} {error}") is not None


def access_denied(what: str, told: str, where: str) -> FeedUnavailable:
    """The error for credentials that are wrong or may not read.

    Parameters
    ----------
    told
        What the library says, without secrets.
    where
        Where the credentials are given.
    """
    return FeedUnavailable(
        f"{what} refuses access: {told.rstrip('.')}. The credentials are wrong, have expired, or may not read there: give others "
        f"in {where}",
        condition="FEED_UNAVAILABLE.ACCESS_DENIED",
    )


# ---- secrets: What libraries say, without what they should not say.

_CHARACTERS = 500
_SHORTEST_SECRET = 4


def without_secrets(error: Any, properties: Mapping[str, Any]) -> str:
    """The first line of a library's error, without the values of a catalog's properties."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    for name, value in properties.items():
        if len(str(value)) >= _SHORTEST_SECRET and name not in ("type", "warehouse"):
            text = text.replace(str(value), "…")
    # Cut last: half of a secret would not be recognised.
    return redact(text)[:_CHARACTERS]
