"""Output modes: what append, update and complete mode do with a query, known before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.modes.checking import check as check
    from penstock.modes.preview_result import Preview as Preview
    from penstock.modes.previewing import preview as preview
    from penstock.modes.report import ModeReport as ModeReport
    from penstock.modes.report import Problem as Problem
    from penstock.modes.report import Report as Report

_HOMES = {
    "ModeReport": "penstock.modes.report",
    "Preview": "penstock.modes.preview_result",
    "Problem": "penstock.modes.report",
    "Report": "penstock.modes.report",
    "check": "penstock.modes.checking",
    "preview": "penstock.modes.previewing",
}

__all__ = ["ModeReport", "Preview", "Problem", "Report", "check", "preview"]


if not TYPE_CHECKING:
    # A type checker would take any name for one that is there.
    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from penstock.extras import load

            return load(_HOMES[name], name, f"penstock.modes.{name}")
        raise AttributeError(f"module 'penstock.modes' has no attribute {name!r}")
