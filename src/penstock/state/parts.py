"""The parts of an operator's state, as Spark's state data source is asked for them one at a time.

A stream-stream join keeps its sides in four stores (formats 1 and 2) or in one (formats 3 and 4), and is read by side; a
transformWithState is read by variable; any other operator has one part, which is its store (Spark 4.2 and 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.state.result import ROCKSDB, StateOperator, StatePart

JOIN = "symmetricHashJoin"
TIMERS = "timers"
DEFAULT = "default"
_SIDES = ("left", "right")
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


@dataclass(frozen=True)
class Way:
    """How a part is asked for."""

    store: str
    """Where its files are."""
    rows: Mapping[str, str]
    changes: Mapping[str, str] | None = None
    """Options for its changes; None where Spark does not read them."""


def parts_of(name: str | None, properties: Mapping[str, Any], stores: Iterable[str]) -> tuple[StatePart, ...]:
    """The parts of an operator of that name."""
    if has_variables(name):
        found = properties.get("stateVariables", [])
        named = {each["stateName"]: each.get("stateVariableType") for each in found}
        # Those of Spark's own, such as the timers', begin with a dollar sign.
        variables = [StatePart(name, kind) for name, kind in named.items() if not name.startswith("$")]
        has_timers = properties.get("timeMode", "NoTime") != "NoTime"
        return (*variables, StatePart(TIMERS)) if has_timers else tuple(variables)
    if name == JOIN:
        return tuple(map(StatePart, _SIDES))
    return tuple(map(StatePart, sorted(stores)))


def has_variables(operator: str | None) -> bool:
    return (operator or "").startswith("transformWithState")


def is_of_timers(part: StatePart) -> bool:
    """Whether it is the timers; Spark does not count them as rows of the operator."""
    return part.name == TIMERS and part.kind is None


def way_to(operator: StateOperator, part: StatePart) -> Way:
    """How Spark is asked for a part."""
    if operator.name == JOIN:
        asked = {"joinSide": part.name}
        if operator.properties.get("useVirtualColumnFamilies"):
            return Way(DEFAULT, asked)
        store = f"{part.name}-keyWithIndexToValue"
        return Way(store, asked, {"storeName": store})
    if not has_variables(operator.name):
        asked = {"storeName": part.name}
        return Way(part.name, asked, asked)
    if is_of_timers(part):
        return Way(DEFAULT, {"readRegisteredTimers": "true"})
    asked = {"stateVarName": part.name}
    return Way(DEFAULT, asked, asked)


def why_no_changes(operator: StateOperator, way: Way, batch: int) -> str | None:
    """Why the files do not tell which rows a batch wrote and removed; None where they do."""
    if way.changes is None:
        return "Spark does not read the changes of a join that keeps both sides in one store"
    stores = [each for each in operator.stores if each.name == way.store]
    if any(batch in store.batches_with_changes for store in stores):
        return None
    if any(store.kind == ROCKSDB for store in stores):
        return f"RocksDB keeps the changes of a batch only with {_CHANGELOG}=true"
    return "the files of the last committed batch's changes are missing"
