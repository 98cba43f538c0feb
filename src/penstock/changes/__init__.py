"""Row-level change feeds: carry-over removal, update detection and net changes, batch and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.changes.plans import post_process as post_process

__all__ = ["post_process"]


def __getattr__(name: str) -> Any:
    # Late: Spark's workers import modules of this package, and need no more than those.
    if name == "post_process":
        from importlib import import_module

        return import_module("penstock.changes.plans").post_process
    raise AttributeError(f"module 'penstock.changes' has no attribute {name!r}")
