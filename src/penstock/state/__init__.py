"""Read what a streaming query's checkpoint contains, without starting the query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

if TYPE_CHECKING:
    from penstock.limits.progress import limit_progress as limit_progress
    from penstock.state.logs import Batch as Batch
    from penstock.state.logs import Source as Source
    from penstock.state.operators import StateOperator as StateOperator
    from penstock.state.operators import StatePart as StatePart
    from penstock.state.operators import StateStore as StateStore
    from penstock.state.reading import read as read
    from penstock.state.showing import CheckpointState as CheckpointState
    from penstock.state.showing import show as show

_HOMES = {
    "Batch": "penstock.state.logs",
    "CheckpointState": "penstock.state.showing",
    "Source": "penstock.state.logs",
    "StateOperator": "penstock.state.operators",
    "StatePart": "penstock.state.operators",
    "StateStore": "penstock.state.operators",
    "limit_progress": "penstock.limits.progress",
    "read": "penstock.state.reading",
    "show": "penstock.state.showing",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # Hide this from type checkers, so that they report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)
