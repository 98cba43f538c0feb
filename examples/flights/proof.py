"""The proof: each output compared with what the input should give, computed without Spark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import penstock
from examples.flights.alerts import CASES, LATE_MINUTES
from examples.flights.change_feed import final_state
from examples.flights.tables import (
    BOARD,
    CANCELLED,
    CANCELLED_LIMIT,
    CURRENT,
    DAY,
    DELAYS,
    FLIGHTS,
    LAST_DAY_HOURS,
    TOTALS,
    read_queue,
    read_table,
)

_CHANGE_KEY = ["flight_id", "_commit_version", "_change_type"]
_NET_CHANGE_KEY = ["flight_id", "_change_type"]
_HOUR_KEY = ["hour", "carrier"]
_CURRENT_COLUMNS = ["flight_id", "carrier", "status", "gained_minutes"]
_TOTALS_COLUMNS = ["carrier", "arrivals", "delay_minutes"]


@dataclass(frozen=True)
class Proof:
    """The comparison of the rows that a queue or table has with those that it should have."""

    name: str
    expected: int
    found: int
    lost: int
    repeated: int
    wrong: int

    @property
    def holds(self) -> bool:
        return self.lost == self.repeated == self.wrong == 0 and self.expected == self.found


@dataclass(frozen=True)
class Count:
    """The feed's rows, by what the queries made of them."""

    rows: int
    carryovers: int
    """Carried-over rows, two for each flight and commit."""
    updates: int
    day: dict[str, int]
    """Net changes of the last day, by change type."""


def prove(store: penstock.Store, year: pa.Table) -> tuple[list[Proof], Count]:
    """Compare all outputs with the feed, row by row, and the last day with the table before and after it."""
    feed = read_queue(store.queue(FLIGHTS))
    board, day = read_queue(store.queue(BOARD)), read_queue(store.queue(DAY))
    last = pc.max(feed["_commit_version"]).as_py()
    proofs = [
        _compare(BOARD, _expected_board(feed), board, _CHANGE_KEY),
        _compare(DELAYS, _expected_delays(feed), read_queue(store.queue(DELAYS)), _HOUR_KEY),
        _compare(DAY, _expected_day(year, last), day, _NET_CHANGE_KEY),
        _compare(
            CURRENT,
            _expected_current(year, last),
            read_table(store, CURRENT, _CURRENT_COLUMNS),
            ["flight_id"],
        ),
        _compare(CANCELLED, _expected_cancelled(store), read_queue(store.queue(CANCELLED)), ["flight_id"]),
        _compare(
            TOTALS,
            _expected_totals(_expected_delays(feed)),
            read_table(store, TOTALS, _TOTALS_COLUMNS),
            ["carrier"],
        ),
    ]
    kinds = {kind["values"]: kind["counts"] for kind in pc.value_counts(day["_change_type"]).to_pylist()}
    updates = pc.sum(pc.equal(board["_change_type"], "update_postimage")).as_py() or 0
    return proofs, Count(feed.num_rows, feed.num_rows - board.num_rows, updates, kinds)


def prove_alerts(store: penstock.Store, departures: pa.Table) -> list[Proof]:
    """Compare the alerts of the exactly-once queries with the departures."""
    expected = departures.filter(pc.greater(departures["dep_delay"], LATE_MINUTES))
    return [
        _compare(f"alerts, {case.trigger}", expected, read_queue(store.queue(case.name)), ["flight_id"])
        for case in CASES
        if case.guarantee == "exactly_once"
    ]


def _expected_board(feed: pa.Table) -> pa.Table:
    """Compute the board. Two rows of a flight in a commit are an update if it wrote the newer one."""
    flight, commit = feed["flight_id"].to_numpy(), feed["_commit_version"].to_numpy()
    _, row = np.unique(flight * (commit.max(initial=0) + 1) + commit, return_inverse=True)
    newest = np.zeros(row.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(newest, row, feed["row_version"].to_numpy())
    paired = np.bincount(row)[row] == 2
    changed = pa.array(~paired | (newest[row] == commit))
    rows = feed.append_column("paired", pa.array(paired)).filter(changed)
    images = pc.if_else(pc.equal(rows["_change_type"], "insert"), "update_postimage", "update_preimage")
    kinds = pc.if_else(rows["paired"], images, rows["_change_type"])
    rows = rows.set_column(rows.schema.get_field_index("_change_type"), "_change_type", kinds)
    gained = pc.subtract(rows["arr_delay"], rows["dep_delay"])
    kept = rows.select(["flight_id", "carrier", "status", "_change_type", "_commit_version"])
    return kept.append_column("gained_minutes", gained)


def _expected_day(year: pa.Table, last: int) -> pa.Table:
    """Compute the net changes: flights that are not the same before and after the last day."""
    columns = ["flight_id", "status", "row_version"]
    before = final_state(year, until=last - LAST_DAY_HOURS).select(columns)
    after = final_state(year, until=last).select(columns)
    same = before.select(["flight_id", "row_version"])
    removed, added = (
        table.join(other, keys=["flight_id", "row_version"], join_type="left anti")
        for table, other in ((before, after.select(same.column_names)), (after, same))
    )
    return pa.concat_tables(
        [
            _with_change_type(removed, added, "delete", "update_preimage"),
            _with_change_type(added, removed, "insert", "update_postimage"),
        ]
    )


def _with_change_type(rows: pa.Table, others: pa.Table, alone: str, both: str) -> pa.Table:
    in_both = pc.is_in(rows["flight_id"], value_set=others["flight_id"].combine_chunks())
    return rows.append_column("_change_type", pc.if_else(in_both, both, alone))


def _expected_current(year: pa.Table, last: int) -> pa.Table:
    state = final_state(year, until=last)
    gained = pc.subtract(state["arr_delay"], state["dep_delay"])
    return state.append_column("gained_minutes", gained).select(_CURRENT_COLUMNS)


def _expected_cancelled(store: penstock.Store) -> pa.Table:
    """Compute the first deletes of each partition, as many as the query took from it."""
    found = read_queue(store.queue(CANCELLED))["flight_id"]
    board = store.queue(BOARD)
    first, others = [], []
    for partition in range(board.partitions):
        changes = board.read(partition, 0).select(["flight_id", "carrier", "_commit_version", "_change_type"])
        deletes = changes.filter(pc.equal(changes["_change_type"], "delete")).drop_columns(["_change_type"])
        count = pc.sum(pc.is_in(deletes["flight_id"], value_set=found)).as_py() or 0
        first.append(deletes.slice(0, count))
        others.append(deletes.slice(count))
    return pa.concat_tables([*first, *others]).slice(0, CANCELLED_LIMIT)


def _expected_totals(hours: pa.Table) -> pa.Table:
    sums = hours.group_by("carrier").aggregate([("arrivals", "sum"), ("delay_minutes", "sum")])
    return sums.rename_columns(_TOTALS_COLUMNS)


def _expected_delays(feed: pa.Table) -> pa.Table:
    """Aggregate the hours that the watermark has passed: those that end at or before the newest commit."""
    new_arrival = pc.and_(
        pc.and_(pc.equal(feed["_change_type"], "insert"), pc.equal(feed["status"], "arrived")),
        pc.equal(feed["row_version"], feed["_commit_version"]),
    )
    arrived = feed.filter(new_arrival)
    hours = pc.floor_temporal(arrived["_commit_timestamp"], unit="hour")
    grouped = arrived.append_column("hour", hours).group_by(_HOUR_KEY)
    totals = grouped.aggregate([("flight_id", "count"), ("arr_delay", "sum")])
    totals = totals.rename_columns([*_HOUR_KEY, "arrivals", "delay_minutes"])
    newest = pc.max(arrived["_commit_timestamp"])
    return totals.filter(
        pc.less_equal(pc.add(totals["hour"], pa.scalar(3_600_000_000, pa.duration("us"))), newest)
    )


def _compare(name: str, expected: pa.Table, found: pa.Table, key: list[str]) -> Proof:
    counted = found.group_by(key).aggregate([([], "count_all")])
    columns = expected.schema.names
    matched = expected.join(found.select(columns), keys=key, join_type="inner", right_suffix="_found")
    values = [column for column in columns if column not in key]
    wrong = sum(_differing(matched[column], matched[f"{column}_found"]) for column in values)
    missing = expected.select(key).join(counted, keys=key, join_type="left anti")
    return Proof(
        name=name,
        expected=expected.num_rows,
        found=found.num_rows,
        lost=missing.num_rows,
        repeated=found.num_rows - counted.num_rows,
        wrong=wrong,
    )


def _differing(expected: pa.ChunkedArray, found: pa.ChunkedArray) -> int:
    both_null = pc.and_(pc.is_null(expected), pc.is_null(found))
    same = pc.or_(pc.fill_null(pc.equal(expected, found), False), both_null)
    return len(same) - (pc.sum(same).as_py() or 0)
