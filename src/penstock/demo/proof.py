"""The demo's proof: what came out, against what went in, computed without Spark."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import penstock as ps
from penstock.demo.tables import CHANGES, DELAYS, ROWS, contents

_ROW = ["flight_id", "_commit_version", "_change_type"]
_HOUR = ["hour", "carrier"]


@dataclass(frozen=True)
class Proof:
    """Rows that a queue should have and has."""

    queue: str
    expected: int
    found: int
    lost: int
    repeated: int
    wrong: int

    @property
    def holds(self) -> bool:
        return self.lost == self.repeated == self.wrong == 0 and self.expected == self.found


def prove(store: ps.Store) -> list[Proof]:
    """Compare both outputs with the feed, row for row."""
    feed = contents(store.queue(CHANGES))
    return [
        _compare(ROWS, _expected_rows(feed), contents(store.queue(ROWS)), _ROW),
        _compare(DELAYS, _expected_delays(feed), contents(store.queue(DELAYS)), _HOUR),
    ]


def _expected_rows(feed: pa.Table) -> pa.Table:
    carried = pc.and_(
        pc.not_equal(feed["row_version"], feed["_commit_version"]), pc.equal(feed["_change_type"], "insert")
    )
    gained = pc.subtract(feed["arr_delay"], feed["dep_delay"])
    kept = feed.select(["flight_id", "carrier", "status", "_change_type", "_commit_version"])
    return kept.append_column("carried_over", carried).append_column("gained_minutes", gained)


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
        queue=name,
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
