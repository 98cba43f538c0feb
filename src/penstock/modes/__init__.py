"""Output modes: checks and previews of a query in append, update and complete mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.modes.checking.check import check as check
    from penstock.modes.checking.report import ModeReport as ModeReport
    from penstock.modes.checking.report import Problem as Problem
    from penstock.modes.checking.report import Report as Report
    from penstock.modes.previewing.preview import preview as preview
    from penstock.modes.previewing.result import Preview as Preview

_HOMES = {
    "ModeReport": "penstock.modes.checking.report",
    "Preview": "penstock.modes.previewing.result",
    "Problem": "penstock.modes.checking.report",
    "Report": "penstock.modes.checking.report",
    "check": "penstock.modes.checking.check",
    "preview": "penstock.modes.previewing.preview",
}

__all__ = ["ModeReport", "Preview", "Problem", "Report", "check", "preview"]


if not TYPE_CHECKING:
    # A type checker would accept any name.
    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from penstock.extras import load

            return load(_HOMES[name], name, f"penstock.modes.{name}")
        raise AttributeError(f"module 'penstock.modes' has no attribute {name!r}")
