"""Output modes: checks and previews of a query in append, update and complete mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

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
    # Hidden, so that type checkers report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)
