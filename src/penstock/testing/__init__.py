"""Helpers for tests of streaming queries: add rows, check the output of each micro-batch, and crash the query
at critical points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

if TYPE_CHECKING:
    from penstock.testing.stores import temporary_store as temporary_store
    from penstock.testing.stores import temporary_store_url as temporary_store_url
    from penstock.testing.streams import Crash as Crash
    from penstock.testing.streams import MemoryStream as MemoryStream
    from penstock.testing.streams import StreamTest as StreamTest
    from penstock.testing.streams import crash_at as crash_at
    from penstock.testing.streams import replay_last_batch as replay_last_batch
    from penstock.testing.streams import run as run

_HOMES = {
    "Crash": "penstock.testing.streams",
    "MemoryStream": "penstock.testing.streams",
    "StreamTest": "penstock.testing.streams",
    "crash_at": "penstock.testing.streams",
    "replay_last_batch": "penstock.testing.streams",
    "run": "penstock.testing.streams",
    "temporary_store": "penstock.testing.stores",
    "temporary_store_url": "penstock.testing.stores",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # Hide this from type checkers, so that they report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)
