"""The year of flights as the change feed of a copy-on-write table.

Each simulated hour is a commit. A flight is announced a day ahead (insert), departs and arrives (delete +
insert), or is cancelled (delete). The table keeps the flights of a (day, carrier) group in data files of a
few flights, in order of schedule, and a change rewrites its whole file: the other flights of the file are
carried over, each as a delete and an identical insert. Rewriting whole (day, carrier) groups instead would
give nearly twenty million change rows for the same changes.

The feed's contract: row id `flight_id`, row version `row_version`, carry-over rows, updates as delete +
insert, whole commits, intermediate changes (a flight changes in several commits, at most once in each)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from examples.flights.dataset import FLIGHTS_SCHEMA, INSTANT

ANNOUNCED_AHEAD = timedelta(hours=24)
CANCELLED_AFTER = timedelta(hours=3)
FLIGHTS_PER_FILE = 5

# The year's first flight is scheduled for 10:15 UTC: hour 1 announces it.
FIRST_HOUR = datetime(2013, 1, 1, 10, tzinfo=UTC) - ANNOUNCED_AHEAD

STATE_SCHEMA = pa.schema(
    [
        *(FLIGHTS_SCHEMA.field(n) for n in ("flight_id", "carrier", "flight", "origin", "dest", "tailnum")),
        FLIGHTS_SCHEMA.field("scheduled"),
        pa.field("status", pa.string(), nullable=False),
        *(FLIGHTS_SCHEMA.field(name) for name in ("dep_delay", "arr_delay", "air_time", "distance")),
        pa.field("row_version", pa.int64(), nullable=False),
    ]
)
FEED_SCHEMA = pa.schema(
    [
        *STATE_SCHEMA,
        pa.field("_change_type", pa.string(), nullable=False),
        pa.field("_commit_version", pa.int64(), nullable=False),
        pa.field("_commit_timestamp", INSTANT, nullable=False),
    ]
)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NEVER = np.iinfo(np.int64).max
_STATUSES = ("scheduled", "departed", "arrived")
_CHANGE_TYPES = pa.array(["delete", "insert"])


@dataclass(frozen=True)
class Commit:
    """One simulated hour in which something changed.

    Parameters
    ----------
    version
        Number of the hour, from 1; hours without a change have no commit.
    timestamp
        The hour's end, UTC.
    rows
        The change rows, in `FEED_SCHEMA`.
    """

    version: int
    timestamp: datetime
    rows: pa.Table


@dataclass(frozen=True)
class Summary:
    """Counts of what a feed holds; `rows` = `inserts` + `deletes` + 2 * `updates` + 2 * `carryovers`.

    Parameters
    ----------
    commits, rows
        Commits, and change rows in all of them.
    inserts, updates, deletes
        Announced flights, changes of content (a departure and an arrival in one hour are one), cancelled
        flights.
    carryovers
        Pairs of a delete and an identical insert.
    """

    commits: int
    rows: int
    inserts: int
    updates: int
    deletes: int
    carryovers: int

    @property
    def written(self) -> dict[str, int]:
        """Rows of each `_change_type` in the feed."""
        rewritten = self.updates + self.carryovers
        return {"insert": self.inserts + rewritten, "delete": self.deletes + rewritten}

    @property
    def changed(self) -> dict[str, int]:
        """Rows of each `_change_type` once carry-overs are dropped and updates are computed."""
        return {
            "insert": self.inserts,
            "delete": self.deletes,
            "update_preimage": self.updates,
            "update_postimage": self.updates,
        }


def commits(flights: pa.Table, *, until: int | None = None) -> Iterator[Commit]:
    """Generate the commits of the year, one for each hour with changes.

    Parameters
    ----------
    flights
        The flights, in `FLIGHTS_SCHEMA`.
    until
        The last version, inclusive; None for the whole year. A shorter feed is a prefix of the whole one.

    Returns
    -------
    Iterator[Commit]
        The commits by ascending version and timestamp. Within a commit a flight's delete comes right before
        its insert.

    Raises
    ------
    ValueError
        When `flights` is not in `FLIGHTS_SCHEMA`.
    """
    timeline = _timeline(flights)
    return _slices(_contents(timeline), _rewrites(timeline, until))


def final_state(flights: pa.Table, *, until: int | None = None) -> pa.Table:
    """Compute the table after the last commit from the flights' instants, without the feed.

    Parameters
    ----------
    flights
        The flights, in `FLIGHTS_SCHEMA`.
    until
        The last version to take into account, inclusive; None for all of them.

    Returns
    -------
    pa.Table
        One row for each flight that is announced and not cancelled, in `STATE_SCHEMA`, sorted by `flight_id`.

    Raises
    ------
    ValueError
        When `flights` is not in `FLIGHTS_SCHEMA`.
    """
    _check(flights)
    now = pa.scalar(_end_of(until) if until is not None else datetime.max.replace(tzinfo=UTC), INSTANT)
    announced = pc.subtract(flights["scheduled"], pa.scalar(ANNOUNCED_AHEAD))
    cancelled = pc.and_(
        pc.is_null(flights["departed"]),
        pc.less(pc.add(flights["scheduled"], pa.scalar(CANCELLED_AFTER)), now),
    )
    departed = pc.fill_null(pc.less(flights["departed"], now), False)
    arrived = pc.fill_null(pc.less(flights["arrived"], now), False)
    changed = pc.if_else(arrived, flights["arrived"], pc.if_else(departed, flights["departed"], announced))
    since = pc.subtract(changed, pa.scalar(FIRST_HOUR, INSTANT)).cast(pa.int64())
    unknown = pa.scalar(None, pa.float64())
    columns = {name: flights[name] for name in STATE_SCHEMA.names if name in flights.column_names} | {
        "status": pc.if_else(arrived, "arrived", pc.if_else(departed, "departed", "scheduled")),
        "dep_delay": pc.if_else(departed, flights["dep_delay"], unknown),
        "arr_delay": pc.if_else(arrived, flights["arr_delay"], unknown),
        "air_time": pc.if_else(arrived, flights["air_time"], unknown),
        "row_version": pc.add(pc.divide(since, 3_600_000_000), 1),
    }
    state = pa.Table.from_arrays([columns[name] for name in STATE_SCHEMA.names], schema=STATE_SCHEMA)
    alive = pc.and_(pc.less(announced, now), pc.invert(cancelled))
    return state.filter(alive).sort_by("flight_id").combine_chunks()


def summary(flights: pa.Table, *, until: int | None = None) -> Summary:
    """Count what the feed holds: changes from the flights alone, carry-overs from the files they share.

    Parameters
    ----------
    flights
        The flights, in `FLIGHTS_SCHEMA`.
    until
        The last version to count, inclusive; None for all of them.

    Raises
    ------
    ValueError
        When `flights` is not in `FLIGHTS_SCHEMA`.
    """
    timeline = _timeline(flights)
    rewrites = _rewrites(timeline, until)
    end = _NEVER - 1 if until is None else until
    departures = (timeline.departed <= end) & (timeline.departed != timeline.arrived)
    kept = (rewrites.before >= 0) & (rewrites.before == rewrites.after)
    return Summary(
        commits=len(np.unique(rewrites.version)),
        rows=int((rewrites.before >= 0).sum() + (rewrites.after >= 0).sum()),
        inserts=int((timeline.announced <= end).sum()),
        updates=int(departures.sum() + (timeline.arrived <= end).sum()),
        deletes=int((timeline.cancelled <= end).sum()),
        carryovers=int(kept.sum()),
    )


@dataclass(frozen=True)
class _Timeline:
    """The flights in file order, with the data file and the versions of the events (or _NEVER) of each."""

    flights: pa.Table
    file: Ints
    announced: Ints
    departed: Ints
    arrived: Ints
    cancelled: Ints

    @property
    def events(self) -> tuple[Ints, ...]:
        return self.announced, self.departed, self.arrived, self.cancelled


@dataclass(frozen=True)
class _Rewrites:
    """Each flight of each rewritten file, by version: its row in the contents before and after, or -1."""

    version: Ints
    before: Ints
    after: Ints


def _timeline(flights: pa.Table) -> _Timeline:
    _check(flights)
    flights, file = _files(flights)
    scheduled = flights["scheduled"].to_numpy()
    departed = flights["departed"].to_numpy()
    cancelled = _versions(scheduled + np.timedelta64(CANCELLED_AFTER))
    return _Timeline(
        flights=flights,
        file=file,
        announced=_versions(scheduled - np.timedelta64(ANNOUNCED_AHEAD)),
        departed=_versions(departed),
        arrived=_versions(flights["arrived"].to_numpy()),
        cancelled=np.where(np.isnat(departed), cancelled, _NEVER),
    )


def _check(flights: pa.Table) -> None:
    if not flights.schema.equals(FLIGHTS_SCHEMA):
        raise ValueError(
            f"A table with the columns {', '.join(flights.column_names) or '(none)'} does not have the "
            "schema of load_flights(). Pass the table which that returns, or a slice of it."
        )


def _files(flights: pa.Table) -> tuple[pa.Table, Ints]:
    keys = ("day", "carrier", "scheduled", "flight_id")
    flights = flights.sort_by([(key, "ascending") for key in keys]).combine_chunks()
    day = flights["day"].cast(pa.int32()).to_numpy()
    carrier = flights["carrier"].combine_chunks().dictionary_encode().indices.to_numpy()
    row = np.arange(flights.num_rows)
    new_group = np.ones(flights.num_rows, dtype=np.bool_)
    new_group[1:] = (day[1:] != day[:-1]) | (carrier[1:] != carrier[:-1])
    within = row - np.maximum.accumulate(np.where(new_group, row, 0))
    return flights, np.cumsum(within % FLIGHTS_PER_FILE == 0) - 1


def _versions(instants: npt.NDArray[np.datetime64]) -> Ints:
    hours = instants.astype("datetime64[h]") - np.datetime64(FIRST_HOUR.replace(tzinfo=None), "h")
    return np.where(np.isnat(instants), _NEVER, hours.astype(np.int64) + 1)


def _end_of(version: int) -> datetime:
    return FIRST_HOUR + timedelta(hours=version)


def _rewrites(timeline: _Timeline, until: int | None) -> _Rewrites:
    version, file = _touched(timeline, until)
    size = np.bincount(timeline.file)
    start = np.cumsum(size) - size
    # Every flight of every touched file: a run of `size` consecutive flights from `start`.
    runs = size[file]
    offset = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
    flight = np.repeat(start[file], runs) + offset
    version = np.repeat(version, runs)
    before, after = _content_at(timeline, flight, version - 1), _content_at(timeline, flight, version)
    alive = (before >= 0) | (after >= 0)
    return _Rewrites(version[alive], before[alive], after[alive])


def _touched(timeline: _Timeline, until: int | None) -> tuple[Ints, Ints]:
    version = np.concatenate(timeline.events)
    file = np.tile(timeline.file, len(timeline.events))
    chosen = version < _NEVER if until is None else version <= until
    # One integer for each (version, file), so that one sort both orders them and drops duplicates.
    files = timeline.file.max(initial=0) + 1
    return np.divmod(np.unique(version[chosen] * files + file[chosen]), files)


def _content_at(timeline: _Timeline, flight: Ints, version: Ints) -> Ints:
    status = (timeline.departed[flight] <= version).astype(np.int64) + (timeline.arrived[flight] <= version)
    exists = (timeline.announced[flight] <= version) & (version < timeline.cancelled[flight])
    return np.where(exists, status * len(timeline.file) + flight, -1)


def _contents(timeline: _Timeline) -> pa.Table:
    """All flights as scheduled, then all as departed, then all as arrived, in `STATE_SCHEMA`."""
    flights = timeline.flights
    unknown = pa.nulls(flights.num_rows, pa.float64())
    tables = []
    for rank, (status, version) in enumerate(zip(_STATUSES, timeline.events, strict=False)):
        columns = {name: flights[name] for name in STATE_SCHEMA.names if name in flights.column_names} | {
            "status": pa.repeat(status, flights.num_rows),
            "dep_delay": flights["dep_delay"] if rank >= 1 else unknown,
            "arr_delay": flights["arr_delay"] if rank >= 2 else unknown,
            "air_time": flights["air_time"] if rank >= 2 else unknown,
            "row_version": pa.array(version),
        }
        tables.append(pa.Table.from_arrays([columns[n] for n in STATE_SCHEMA.names], schema=STATE_SCHEMA))
    return pa.concat_tables(tables).combine_chunks()


def _slices(contents: pa.Table, rewrites: _Rewrites) -> Iterator[Commit]:
    # A flight's delete and insert are adjacent; -1 marks a side that does not exist.
    content = np.stack([rewrites.before, rewrites.after], axis=1).ravel()
    kind = np.tile(np.array([0, 1], dtype=np.int8), len(rewrites.version))
    version = np.repeat(rewrites.version, 2)
    exists = content >= 0
    content, kind, version = content[exists], kind[exists], version[exists]
    versions = np.unique(version)
    starts, ends = np.searchsorted(version, versions), np.searchsorted(version, versions, side="right")
    for number, start, end in zip(versions.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield _commit(number, contents.take(pa.array(content[start:end])), kind[start:end])


def _commit(version: int, contents: pa.Table, kind: npt.NDArray[np.int8]) -> Commit:
    timestamp = _end_of(version)
    change_type = _CHANGE_TYPES.take(pa.array(kind))
    versions = pa.repeat(pa.scalar(version, pa.int64()), contents.num_rows)
    timestamps = pa.repeat(pa.scalar(timestamp, INSTANT), contents.num_rows)
    columns = [*contents.columns, change_type, versions, timestamps]
    return Commit(version, timestamp, pa.Table.from_arrays(columns, schema=FEED_SCHEMA))
