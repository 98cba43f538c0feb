"""Rules of stateful functions: ``transformWithState``, ``applyInPandasWithState`` and
``flatMapGroupsWithState``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from penstock.modes.checking.plan import Plan, above_aggregation, is_map_groups, own_mode
from penstock.modes.checking.report import WARNING, Problem
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node
from penstock.spark.internals.sessions import ROCKSDB_PROVIDER

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"


def functions(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for stateful functions (4.2, 4.3)."""
    older = [node for node in plan.functions if Trait.TRANSFORM not in traits_of(node.name)]
    if len(older) > 1 and (
        any(Trait.PYTHON_STATE in traits_of(node.name) for node in older)
        or any(own_mode(node) != "append" for node in older)
    ):
        yield Problem.at(
            older[0],
            "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",
            "a query may have one applyInPandasWithState, or several flatMapGroupsWithState if all are in "
            "append mode",
            fix="transformWithState, of which there may be several; or two queries with a queue between them",
        )
    for node in older:
        yield from _older(plan, node, mode)
    for node in plan.functions:
        own = own_mode(node)
        if node not in older and own is not None and own != mode and mode != "complete":
            yield Problem.at(
                node,
                "PENSTOCK_FUNCTION_MODE_DIFFERS",
                f"the function has output mode {own} and the query {mode}: Spark accepts that, and emits the "
                "rows that the function returns",
                WARNING,
                fix=f"transformWithState(..., outputMode='{mode}', ...)",
            )


def missing_requirements(plan: Plan) -> Iterator[Problem]:
    """Report what ``transformWithState`` lacks, which Spark (4.2, 4.3) reports only when the query runs."""
    transforms = [node for node in plan.functions if Trait.TRANSFORM in traits_of(node.name)]
    if not transforms:
        return
    if not plan.settings.get(_PROVIDER, "").endswith("RocksDBStateStoreProvider"):
        yield Problem.at(
            transforms[0],
            "PENSTOCK_FUNCTION_NEEDS_ROCKSDB",
            "transformWithState needs the RocksDB state store, and the session has another one",
            fix=f"spark.conf.set('{_PROVIDER}', '{ROCKSDB_PROVIDER}')",
        )
    if Trait.PYTHON_STATE in traits_of(transforms[0].name) and not _has_protobuf():
        yield Problem.at(
            transforms[0],
            "PENSTOCK_FUNCTION_NEEDS_PROTOBUF",
            "transformWithState in Python needs the package protobuf, which is not installed",
            fix="pip install protobuf",
        )


def _has_protobuf() -> bool:
    return find_spec("google") is not None and find_spec("google.protobuf") is not None


def _older(plan: Plan, node: Node, mode: str) -> Iterator[Problem]:
    own = own_mode(node)
    if is_map_groups(node) and mode != "update":
        yield Problem.at(
            node,
            "PENSTOCK_MAP_GROUPS_MODE",
            "mapGroupsWithState emits a row whenever a key changes, which only update mode allows",
            fix="outputMode('update'); or flatMapGroupsWithState in append mode",
        )
        return
    if above_aggregation(node):
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_AFTER_AGGREGATION",
            "a stateful function cannot take the rows of an aggregation, which may be emitted again",
            fix="transformWithState; or write the aggregation into a queue and read that",
        )
    elif own == "update" and plan.aggregates:
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",
            "a stateful function in update mode emits rows again, which an aggregation would count twice",
            fix="set outputMode='append' for the function",
        )
    elif not plan.aggregates and own is not None and own != mode and mode != "complete":
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_MODE",
            f"the function has {own} mode and the query {mode} mode, and both must be the same",
            fix=f"outputMode('{own}') for the query, or '{mode}' for the function",
        )
