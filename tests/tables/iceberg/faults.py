"""What may become of a request to a catalog."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

Fault = Callable[[Callable[[], Any]], Any]


def lost_reply(commit: Callable[[], Any]) -> Any:
    commit()
    raise CommitStateUnknownException("502: the proxy has gone away, password=geheim")


def lost_reply_as_conflict(commit: Callable[[], Any]) -> Any:
    """As when something between the client and the catalog repeats a request."""
    commit()
    raise CommitFailedException("Requirement failed: branch main has changed")


def lost_request(commit: Callable[[], Any]) -> Any:
    raise ConnectionError("connection refused")


def conflict(commit: Callable[[], Any]) -> Any:
    raise CommitFailedException("Requirement failed: branch main has changed")


class Killed(BaseException):
    pass


def killed(commit: Callable[[], Any]) -> Any:
    raise Killed


def killed_after(commit: Callable[[], Any]) -> Any:
    commit()
    raise Killed
