"""Functions with a state of their own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from penstock.modes.checking.plan import Plan, above_aggregation, is_map_groups, own_mode
from penstock.modes.checking.report import WARNING, Problem
from penstock.spark.internals.plan_text import Node
from penstock.spark.internals.sources import ROCKSDB

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_IN_PANDAS = "FlatMapGroupsInPandasWithState"


def functions(plan: Plan, mode: str) -> Iterator[Problem]:
    """What Spark's checker says of ``applyInPandasWithState``, ``flatMapGroupsWithState`` and their kind (4.2, 4.3)."""
    older = [node for node in plan.functions if not node.name.startswith("TransformWithState")]
    if len(older) > 1 and (
        any(node.name == _IN_PANDAS for node in older) or any(own_mode(node) != "append" for node in older)
    ):
        yield Problem.at(
            older[0],
            "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",
            "a query has room for one applyInPandasWithState; of flatMapGroupsWithState for several, if all are in append mode",
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
                f"the function says {own} and the query {mode}: Spark lets that be, and what comes out are the rows that the "
                "function gives",
                WARNING,
                fix=f"transformWithState(..., outputMode='{mode}', ...)",
            )


def missing_requirements(plan: Plan) -> Iterator[Problem]:
    """What ``transformWithState`` cannot run without, which Spark (4.2, 4.3) finds out when the query runs."""
    found = [node for node in plan.functions if node.name.startswith("TransformWithState")]
    if not found:
        return
    if not plan.settings.get(_PROVIDER, "").endswith("RocksDBStateStoreProvider"):
        yield Problem.at(
            found[0],
            "PENSTOCK_FUNCTION_NEEDS_ROCKSDB",
            "transformWithState keeps its state in RocksDB, and the session has another state store",
            fix=f"spark.conf.set('{_PROVIDER}', '{ROCKSDB}')",
        )
    if found[0].name.endswith("InPySpark") and not _has_protobuf():
        yield Problem.at(
            found[0],
            "PENSTOCK_FUNCTION_NEEDS_PROTOBUF",
            "transformWithState talks to Python in protocol buffers, and the package protobuf is not there",
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
            "mapGroupsWithState gives a row for each key whenever it changes, which is update mode",
            fix="outputMode('update'); or flatMapGroupsWithState in append mode",
        )
        return
    if above_aggregation(node):
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_AFTER_AGGREGATION",
            "a stateful function cannot take the rows of an aggregation, which may come again",
            fix="transformWithState; or write the aggregation into a queue and read that",
        )
    elif own == "update" and plan.aggregates:
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",
            "a stateful function in update mode gives rows again, which an aggregation would count twice",
            fix="give the function outputMode='append'",
        )
    elif not plan.aggregates and own is not None and own != mode and mode != "complete":
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_MODE",
            f"the function was given {own} mode and the query {mode} mode, and both have to be the same",
            fix=f"outputMode('{own}') for the query, or '{mode}' for the function",
        )
