"""State: what the checkpoint of a streaming query holds, without starting the query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.limits.progress import limit_progress as limit_progress
    from penstock.state.logs import Batch as Batch
    from penstock.state.logs import Source as Source
    from penstock.state.reading import read as read
    from penstock.state.render import show as show
    from penstock.state.result import CheckpointState as CheckpointState
    from penstock.state.result import StateOperator as StateOperator
    from penstock.state.result import StatePart as StatePart
    from penstock.state.result import StateStore as StateStore

_HOMES = {
    "Batch": "penstock.state.logs",
    "CheckpointState": "penstock.state.result",
    "Source": "penstock.state.logs",
    "StateOperator": "penstock.state.result",
    "StatePart": "penstock.state.result",
    "StateStore": "penstock.state.result",
    "limit_progress": "penstock.limits.progress",
    "read": "penstock.state.reading",
    "show": "penstock.state.render",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # A type checker would take any name for one that is there.
    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from penstock.extras import load

            return load(_HOMES[name], name, f"penstock.state.{name}")
        raise AttributeError(f"module 'penstock.state' has no attribute {name!r}")
