"""The demo's proof: what came out, against what went in, computed without Spark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import penstock as ps
from penstock.demo.alerts import CASES, LATE_MINUTES
from penstock.demo.feed import final_state
from penstock.demo.tables import (
    BOARD,
    CANCELLED,
    CURRENT,
    DAY,
    DELAYS,
    FIRST,
    FLIGHTS,
    HOURS,
    TOTALS,
    contents,
    rows,
)

_ROW = ["flight_id", "_commit_version", "_change_type"]
_FLIGHT = ["flight_id", "_change_type"]
_HOUR = ["hour", "carrier"]
_NOW = ["flight_id", "carrier", "status", "gained_minutes"]
_TOTALS = ["carrier", "arrivals", "delay_minutes"]


@dataclass(frozen=True)
class Proof:
    """Rows that a queue or a table should have and has."""

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
    """What became of the feed's rows."""

    rows: int
    carryovers: int
    """Rows that were carried over, two for each flight and commit."""
    updates: int
    day: dict[str, int]
    """Flights that the last day made different, by change type."""


def prove(store: ps.Store, year: pa.Table) -> tuple[list[Proof], Count]:
    """Compare all outputs with the feed, row for row, and the last day with the table before and after it."""
    feed = contents(store.queue(FLIGHTS))
    board, day = contents(store.queue(BOARD)), contents(store.queue(DAY))
    last = pc.max(feed["_commit_version"]).as_py()
    proofs = [
        _compare(BOARD, _expected_board(feed), board, _ROW),
        _compare(DELAYS, _expected_delays(feed), contents(store.queue(DELAYS)), _HOUR),
        _compare(DAY, _expected_day(year, last), day, _FLIGHT),
        _compare(CURRENT, _expected_now(year, last), rows(store, CURRENT, _NOW), ["flight_id"]),
        _compare(CANCELLED, _expected_cancelled(store), contents(store.queue(CANCELLED)), ["flight_id"]),
        _compare(TOTALS, _expected_totals(_expected_delays(feed)), rows(store, TOTALS, _TOTALS), ["carrier"]),
    ]
    kinds = {each["values"]: each["counts"] for each in pc.value_counts(day["_change_type"]).to_pylist()}
    updates = pc.sum(pc.equal(board["_change_type"], "update_postimage")).as_py() or 0
    return proofs, Count(feed.num_rows, feed.num_rows - board.num_rows, updates, kinds)


def prove_alerts(store: ps.Store, departures: pa.Table) -> list[Proof]:
    """Compare the alerts that came exactly once, by either trigger, with the departures."""
    expected = departures.filter(pc.greater(departures["dep_delay"], LATE_MINUTES))
    return [
        _compare(f"alerts, {case.trigger}", expected, contents(store.queue(case.name)), ["flight_id"])
        for case in CASES
        if case.guarantee == "exactly_once"
    ]


def _expected_board(feed: pa.Table) -> pa.Table:
    """A flight that a commit has in two rows was updated if its newer row is the commit's own, and carried over otherwise."""
    flight, commit = feed["flight_id"].to_numpy(), feed["_commit_version"].to_numpy()
    _, row = np.unique(flight * (commit.max(initial=0) + 1) + commit, return_inverse=True)
    newest = np.zeros(row.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(newest, row, feed["row_version"].to_numpy())
    both = np.bincount(row)[row] == 2
    changed = pa.array(~both | (newest[row] == commit))
    rows = feed.append_column("both", pa.array(both)).filter(changed)
    images = pc.if_else(pc.equal(rows["_change_type"], "insert"), "update_postimage", "update_preimage")
    kinds = pc.if_else(rows["both"], images, rows["_change_type"])
    rows = rows.set_column(rows.schema.get_field_index("_change_type"), "_change_type", kinds)
    gained = pc.subtract(rows["arr_delay"], rows["dep_delay"])
    kept = rows.select(["flight_id", "carrier", "status", "_change_type", "_commit_version"])
    return kept.append_column("gained_minutes", gained)


def _expected_day(year: pa.Table, last: int) -> pa.Table:
    """The flights that are there before the day or after it, and not the same in both."""
    columns = ["flight_id", "status", "row_version"]
    before = final_state(year, until=last - HOURS).select(columns)
    after = final_state(year, until=last).select(columns)
    same = before.select(["flight_id", "row_version"])
    gone, come = (
        table.join(other, keys=["flight_id", "row_version"], join_type="left anti")
        for table, other in ((before, after.select(same.column_names)), (after, same))
    )
    return pa.concat_tables(
        [_kinds(gone, come, "delete", "update_preimage"), _kinds(come, gone, "insert", "update_postimage")]
    )


def _kinds(rows: pa.Table, others: pa.Table, alone: str, both: str) -> pa.Table:
    there = pc.is_in(rows["flight_id"], value_set=others["flight_id"].combine_chunks())
    return rows.append_column("_change_type", pc.if_else(there, both, alone))


def _expected_now(year: pa.Table, last: int) -> pa.Table:
    """The flights that are there after the last commit."""
    state = final_state(year, until=last)
    gained = pc.subtract(state["arr_delay"], state["dep_delay"])
    return state.append_column("gained_minutes", gained).select(_NOW)


def _expected_cancelled(store: ps.Store) -> pa.Table:
    """The first of each partition of the board, as many of it as were taken, and others where too few were."""
    taken = contents(store.queue(CANCELLED))["flight_id"]
    board = store.queue(BOARD)
    firsts, others = [], []
    for partition in range(board.partitions):
        changes = board.read(partition, 0).select(["flight_id", "carrier", "_commit_version", "_change_type"])
        gone = changes.filter(pc.equal(changes["_change_type"], "delete")).drop_columns(["_change_type"])
        count = pc.sum(pc.is_in(gone["flight_id"], value_set=taken)).as_py() or 0
        firsts.append(gone.slice(0, count))
        others.append(gone.slice(count))
    return pa.concat_tables([*firsts, *others]).slice(0, FIRST)


def _expected_totals(hours: pa.Table) -> pa.Table:
    sums = hours.group_by("carrier").aggregate([("arrivals", "sum"), ("delay_minutes", "sum")])
    return sums.rename_columns(_TOTALS)


def _expected_delays(feed: pa.Table) -> pa.Table:
    """The hours that the watermark has passed: those that end at or before the newest commit's time."""
    new = pc.and_(
        pc.and_(pc.equal(feed["_change_type"], "insert"), pc.equal(feed["status"], "arrived")),
        pc.equal(feed["row_version"], feed["_commit_version"]),
    )
    arrived = feed.filter(new)
    hours = pc.floor_temporal(arrived["_commit_timestamp"], unit="hour")
    grouped = arrived.append_column("hour", hours).group_by(_HOUR)
    totals = grouped.aggregate([("flight_id", "count"), ("arr_delay", "sum")])
    totals = totals.rename_columns([*_HOUR, "arrivals", "delay_minutes"])
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
