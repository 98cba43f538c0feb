"""The guards of a pump, each with what is there instead when it is taken away."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from penstock.feeds.postgres import unlogged
from penstock.feeds.postgres.backfill import Backfill
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.pump import appender
from penstock.pump.appender import Appender
from penstock.pump.backfills import Backfills, ChunkReader
from penstock.pump.run import PumpRun
from penstock.store.records import pumps
from tests.feeds.postgres.changing_tables import DEFINITIONS, KINDS


@dataclass(frozen=True)
class PumpFault:
    """A guard that a pump must not lack."""

    name: str
    owner: object
    attribute: str
    instead: Any
    definitions: Sequence[str] = DEFINITIONS
    kinds: Sequence[str] = KINDS

    def applied(self) -> AbstractContextManager[Any]:
        return patch.object(self.owner, self.attribute, self.instead)


def _without(name: str, owner: object, attribute: str, guard: str, instead: str = "False") -> PumpFault:
    """A fault of a function, in whose source something else stands in the place of a guard."""
    function = getattr(owner, attribute)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{attribute} has no {guard!r} any more"
    made: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(guard, instead)
    exec(code, sys.modules[function.__module__].__dict__, made)
    return PumpFault(name, owner, attribute, made[attribute])


_move_pump = pumps.move_pump


def _moves_anyway(*given: Any) -> bool:
    _move_pump(*given)
    return True


def _moves_for_anybody(tx: Any, name: str, owner: str, *places: Any) -> bool:
    record = pumps.find_pump(tx, name)
    assert record is not None
    return _move_pump(tx, name, record.owner or owner, *places)


def _passes(*_: object) -> None:
    """A check that never refuses."""


def _holds_none(sieve: Backfill, rows: Any) -> Any:
    return np.zeros(len(rows.transactions), bool)


def _has_none(*_: object) -> list[Any]:
    """A search that never finds anything."""
    return []


PUMP_FAULTS = (
    PumpFault("an append whose reply was lost is repeated", pumps, "move_pump", _moves_anyway),
    PumpFault("a pump that was taken over still appends", pumps, "move_pump", _moves_for_anybody),
    _without(
        "a place within a transaction is not stored",
        Appender,
        "append",
        "place.part_version, place.part_rows)",
        "0, 0)",
    ),
    PumpFault("a position without rows leaves no room for chunks", appender, "_RESERVED_BYTES", 0),
    PumpFault(
        "changes of rows that no chunk has had are not held back", Backfill, "rows_to_hold", _holds_none
    ),
    PumpFault(
        "held changes that are later than the chunk are lost",
        Backfill,
        "_later_changes",
        _has_none,
    ),
    PumpFault("held changes that chunks show are not forgotten", Backfill, "forget", _passes),
    PumpFault("keys that lack values are not read again", Backfill, "_add_gap", _passes),
    _without(
        "a chunk is appended before the log has come as far",
        Backfills,
        "step",
        "reached < self._ready_chunk[1].position",
    ),
    _without(
        "a chunk is appended between the parts of a transaction",
        PumpRun,
        "_append_chunk",
        "place.part_version",
    ),
    _without(
        "a chunk comes before held changes that it has",
        PumpRun,
        "_append_chunk",
        "max(appender.place.version, place.version)",
        "appender.place.version",
    ),
    _without(
        "a chunk in another form is appended",
        Backfills,
        "step",
        "chunk.table != readers.tables.by_name[table]",
    ),
    _without(
        "a backfill begins while transactions are open",
        ChunkReader,
        "_wait",
        "latest_snapshot.oldest < first_transaction",
    ),
    _without(
        "rows that are read again replace newer ones", Backfill, "_not_superseded", "not self._held", "True"
    ),
    _without(
        "the progress of a backfill is not stored",
        PumpRun,
        "_append_chunk",
        "appender.add_state_change(chunk.change)",
        "pass",
    ),
    PumpFault("keys to read again are not stored", Backfills, "changes", lambda _: iter(())),
    PumpFault("a renamed column is taken for a dropped one", TableReaders, "_renames", lambda *_: False),
    PumpFault("changes that the log does not show are not refused", unlogged, "refuse", _passes),
    PumpFault("what a refused commit has left is kept", TableReaders, "restore", _passes),
)
