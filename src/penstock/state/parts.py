"""Parts of an operator's state, and the options with which Spark's state data source reads each.

A stream-stream join keeps its sides in four stores (formats 1 and 2) or in one (formats 3 and 4), and is read
by side; a transformWithState is read by variable; any other operator has one part, which is its store (Spark
4.2 and 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.state.operators import ROCKSDB, StateOperator, StatePart

JOIN = "symmetricHashJoin"
TIMERS = "timers"
DEFAULT = "default"
_SIDES = ("left", "right")
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


@dataclass(frozen=True)
class ReadOptions:
    """The options that read a part."""

    store: str
    """The store with its files."""
    rows: Mapping[str, str]
    changes: Mapping[str, str] | None = None
    """The options that read its changes; None where Spark cannot."""


def parts_of(name: str | None, properties: Mapping[str, Any], stores: Iterable[str]) -> tuple[StatePart, ...]:
    """Return the parts of an operator with a name and properties."""
    if has_variables(name):
        kinds = {
            variable["stateName"]: variable.get("stateVariableType")
            for variable in properties.get("stateVariables", [])
        }
        # The names of Spark's own variables, such as the timers', begin with a dollar sign.
        variables = [StatePart(name, kind) for name, kind in kinds.items() if not name.startswith("$")]
        has_timers = properties.get("timeMode", "NoTime") != "NoTime"
        return (*variables, StatePart(TIMERS)) if has_timers else tuple(variables)
    if name == JOIN:
        return tuple(map(StatePart, _SIDES))
    return tuple(map(StatePart, sorted(stores)))


def has_variables(operator: str | None) -> bool:
    return (operator or "").startswith("transformWithState")


def is_timers(part: StatePart) -> bool:
    """Whether a part is the timers, which Spark does not count as rows of the operator."""
    return part.name == TIMERS and part.kind is None


def read_options(operator: StateOperator, part: StatePart) -> ReadOptions:
    """Return the options that read a part."""
    if operator.name == JOIN:
        options = {"joinSide": part.name}
        if operator.properties.get("useVirtualColumnFamilies"):
            return ReadOptions(DEFAULT, options)
        store = f"{part.name}-keyWithIndexToValue"
        return ReadOptions(store, options, {"storeName": store})
    if not has_variables(operator.name):
        options = {"storeName": part.name}
        return ReadOptions(part.name, options, options)
    if is_timers(part):
        return ReadOptions(DEFAULT, {"readRegisteredTimers": "true"})
    options = {"stateVarName": part.name}
    return ReadOptions(DEFAULT, options, options)


def why_no_changes(operator: StateOperator, options: ReadOptions, batch: int) -> str | None:
    """Return why the rows that a batch wrote and removed are unknown; None where the files have them."""
    if options.changes is None:
        return "Spark cannot read the changes of a join that keeps both sides in one store"
    stores = [store for store in operator.stores if store.name == options.store]
    if any(batch in store.batches_with_changes for store in stores):
        return None
    if any(store.kind == ROCKSDB for store in stores):
        return f"RocksDB keeps the changes of a batch only with {_CHANGELOG}=true"
    return "the files of the last committed batch's changes are missing"
