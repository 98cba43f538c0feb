"""Tests of streaming queries: rows given micro-batch by micro-batch, what each emits, and crashes where they hurt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.crashes import Crash as Crash
    from penstock.testing.crashes import crash_at as crash_at
    from penstock.testing.crashes import replay_last_batch as replay_last_batch
    from penstock.testing.memory import MemoryStream as MemoryStream
    from penstock.testing.running import StreamTest as StreamTest
    from penstock.testing.running import run as run
    from penstock.testing.stores import temporary_store as temporary_store
    from penstock.testing.stores import temporary_store_url as temporary_store_url

_HOMES = {
    "Crash": "penstock.testing.crashes",
    "MemoryStream": "penstock.testing.memory",
    "StreamTest": "penstock.testing.running",
    "crash_at": "penstock.testing.crashes",
    "replay_last_batch": "penstock.testing.crashes",
    "run": "penstock.testing.running",
    "temporary_store": "penstock.testing.stores",
    "temporary_store_url": "penstock.testing.stores",
}

__all__ = [
    "Crash",
    "MemoryStream",
    "StreamTest",
    "crash_at",
    "replay_last_batch",
    "run",
    "temporary_store",
    "temporary_store_url",
]


if not TYPE_CHECKING:
    # A type checker would take any name for one that is there.
    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from penstock.extras import load

            return load(_HOMES[name], name, f"penstock.testing.{name}")
        raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
