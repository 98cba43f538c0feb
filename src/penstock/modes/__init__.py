"""Output modes: what append, update and complete mode do with a query, known before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.modes.checking import check as check
    from penstock.modes.report import ModeReport as ModeReport
    from penstock.modes.report import Problem as Problem
    from penstock.modes.report import Report as Report

_HOMES = {
    "ModeReport": "penstock.modes.report",
    "Problem": "penstock.modes.report",
    "Report": "penstock.modes.report",
    "check": "penstock.modes.checking",
}

__all__ = ["ModeReport", "Problem", "Report", "check"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock.modes' has no attribute {name!r}")
