"""Limits on the rows of a stream or of each key, and their progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

if TYPE_CHECKING:
    from penstock.limits.per_key import first_rows as first_rows
    from penstock.limits.progress import LimitProgress as LimitProgress
    from penstock.limits.progress import limit_progress as limit_progress

_HOMES = {
    "LimitProgress": "penstock.limits.progress",
    "first_rows": "penstock.limits.per_key",
    "limit_progress": "penstock.limits.progress",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # Hide this from type checkers, so that they report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)
