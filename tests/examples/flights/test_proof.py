"""The demo's proof detects a row that is lost, repeated or wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock
from examples.flights.change_feed import commits
from examples.flights.dataset import load_flights
from examples.flights.plots import plot_delays
from examples.flights.proof import (
    Proof,
    _expected_board,
    _expected_current,
    _expected_day,
    _expected_delays,
    _expected_totals,
    prove,
)
from examples.flights.tables import (
    BOARD,
    CANCELLED,
    CANCELLED_LIMIT,
    CURRENT,
    DAY,
    DELAYS,
    FLIGHTS,
    TOTALS,
    create,
    read_queue,
)

UNTIL = 60


@pytest.fixture(scope="module")
def year() -> pa.Table:
    return load_flights()


def proofs(folder: Path, year: pa.Table, **changes: Callable[[pa.Table], pa.Table]) -> list[Proof]:
    """Fill the outputs with the expected rows, or with changed ones, and return what the proof finds."""
    url = f"sqlite:///{folder}/penstock.db"
    with penstock.connect(url) as store:
        feed = create(store, url)
        for commit in commits(year, until=UNTIL):
            rows = commit.rows.drop_columns(["_commit_version", "_commit_timestamp"])
            feed.append_commit(commit.version, commit.timestamp, rows)
        written = read_queue(store.queue(FLIGHTS))
        right = {
            BOARD: _expected_board(written),
            DELAYS: _expected_delays(written),
            DAY: _expected_day(year, pc.max(written["_commit_version"]).as_py()),
        }
        for name, rows in right.items():
            sink, change = store.queue(name), changes.get(name, lambda table: table)
            sink.append(change(rows).select(sink.schema.names).cast(sink.schema))
        taken = changes.get(CANCELLED, lambda table: table)(cancelled_flights(store))
        store.queue(CANCELLED).append(taken.slice(0, CANCELLED_LIMIT))
        last = pc.max(written["_commit_version"]).as_py()
        tables = {
            CURRENT: _expected_current(year, last),
            TOTALS: _expected_totals(_expected_delays(written)),
        }
        for name, rows in tables.items():
            create_table(store, name, changes.get(name, lambda table: table)(rows))
        found, count = prove(store, year)
        assert count.rows == written.num_rows
        plot_delays(read_queue(store.queue(DELAYS)), folder / "delays.png")
        assert (folder / "delays.png").read_bytes().startswith(b"\x89PNG")
        return found


def cancelled_flights(store: penstock.Store) -> pa.Table:
    """Return all cancelled flights, those of the board's second partition first."""
    board = store.queue(BOARD)
    changes = pa.concat_tables([board.read(partition, 0) for partition in (1, 0)])
    return changes.filter(pc.equal(changes["_change_type"], "delete")).select(
        store.queue(CANCELLED).schema.names
    )


def create_table(store: penstock.Store, name: str, rows: pa.Table) -> None:
    """Create a SQL table with rows."""
    with store.database.transaction() as tx:
        tx.execute(f"create table {name} ({', '.join(rows.column_names)})")
        marks = ", ".join("?" for _ in rows.column_names)
        columns = [column.to_pylist() for column in rows.columns]
        tx.load(f"insert into {name} values ({marks})", zip(*columns, strict=True))


def test_correct_outputs_pass_the_proof(tmp_path: Path, year: pa.Table) -> None:
    found = proofs(tmp_path, year)
    assert [proof.name for proof in found] == [BOARD, DELAYS, DAY, CURRENT, CANCELLED, TOTALS]
    assert all(proof.holds and proof.found == proof.expected > 0 for proof in found)


def test_rows_that_are_lost_or_repeated_or_wrong_are_counted(tmp_path: Path, year: pa.Table) -> None:
    def repeat(rows: pa.Table) -> pa.Table:
        return pa.concat_tables([rows, rows.slice(0, 1)])

    def spoil(rows: pa.Table) -> pa.Table:
        place = rows.schema.get_field_index("status")
        return rows.set_column(place, "status", pa.repeat("arrived?", rows.num_rows))

    def skip(rows: pa.Table) -> pa.Table:
        return rows.slice(1)

    changes = {BOARD: skip, DELAYS: repeat, DAY: spoil, CURRENT: spoil, CANCELLED: skip, TOTALS: repeat}
    board, delays, day, current, cancelled, totals = proofs(tmp_path, year, **changes)
    assert (current.lost, current.repeated, current.wrong > 0) == (0, 0, True)
    assert (totals.lost, totals.repeated, totals.wrong) == (0, 1, 0)
    assert (board.lost, board.repeated, board.wrong) == (1, 0, 0)
    assert (delays.lost, delays.repeated, delays.wrong) == (0, 1, 0)
    assert (day.lost, day.repeated, day.wrong) == (0, 0, day.expected)
    assert (cancelled.lost, cancelled.holds) == (1, False)
    assert not board.holds
    assert not delays.holds
    assert not day.holds


def test_the_board_has_updates_inserts_and_deletes_but_no_carried_over_rows() -> None:
    change = [
        # flight, commit, change, the commit that wrote the content
        (1, 5, "insert", 5),
        (2, 5, "delete", 3),
        (3, 5, "delete", 4),
        (3, 5, "insert", 5),
        (4, 5, "delete", 2),
        (4, 5, "insert", 2),
        (4, 6, "delete", 2),
        (4, 6, "insert", 6),
    ]
    flight, commit, kind, version = (list(column) for column in zip(*change, strict=True))
    count = len(change)
    feed = pa.table(
        {
            "flight_id": flight,
            "_commit_version": commit,
            "_change_type": kind,
            "row_version": version,
            "carrier": ["AA"] * count,
            "status": ["arrived"] * count,
            "dep_delay": [4.0] * count,
            "arr_delay": [1.0] * count,
        }
    )
    board = _expected_board(feed).select(["flight_id", "_commit_version", "_change_type", "gained_minutes"])
    assert [tuple(row.values()) for row in board.to_pylist()] == [
        (1, 5, "insert", -3.0),
        (2, 5, "delete", -3.0),
        (3, 5, "update_preimage", -3.0),
        (3, 5, "update_postimage", -3.0),
        (4, 6, "update_preimage", -3.0),
        (4, 6, "update_postimage", -3.0),
    ]
