"""Limits: the first rows of a stream or of each key, and how many rows have passed a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    # Hidden, so that type checkers report unknown names.
    def __getattr__(name: str) -> object:
        # Lazily: Spark's workers import modules of this package, and need only those.
        if name in _HOMES:
            from penstock.extras import load

            return load(_HOMES[name], name, f"penstock.limits.{name}")
        raise AttributeError(f"module 'penstock.limits' has no attribute {name!r}")
