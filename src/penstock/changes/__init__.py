"""Row-level change feeds: carry-over removal, update detection and net changes, batch and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

if TYPE_CHECKING:
    from penstock.changes.differences import diff as diff
    from penstock.changes.finality import finalized_until as finalized_until
    from penstock.changes.post_processing import post_process as post_process
    from penstock.changes.reading import read as read
    from penstock.changes.reading import read_stream as read_stream
    from penstock.feeds.contract import DEAD_LETTERS as DEAD_LETTERS
    from penstock.feeds.urls import parse as parse

_HOMES = {
    "DEAD_LETTERS": "penstock.feeds.contract",
    "diff": "penstock.changes.differences",
    "finalized_until": "penstock.changes.finality",
    "parse": "penstock.feeds.urls",
    "post_process": "penstock.changes.post_processing",
    "read": "penstock.changes.reading",
    "read_stream": "penstock.changes.reading",
}

__all__ = ["DEAD_LETTERS", "diff", "finalized_until", "parse", "post_process", "read", "read_stream"]


if not TYPE_CHECKING:
    # Hidden, so that type checkers report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)
