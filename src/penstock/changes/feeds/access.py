"""Whether a storage or a catalog lets nobody in with what it was given."""

from __future__ import annotations

import re

from penstock.errors import FeedUnavailable

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
