"""Statistics of data files: no reader that skips files by them misses a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.lake.storage import DeltaLocation
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.rows_commit import RowsCommit
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.statistics import FileStatistics, indexed_columns

INSTANTS = st.one_of(
    st.integers(-(1 << 55), 1 << 55),
    st.integers(-62_135_596_800_000_000 - 2000, -62_135_596_800_000_000 + 2000),
    st.integers(253_402_300_799_999_000 - 2000, 253_402_300_799_999_000 + 2000),
    st.integers(-2500, 2500),
)
DAYS = st.one_of(
    st.integers(-(1 << 22), 1 << 22), st.integers(-719_165, -719_160), st.integers(2_932_890, 2_932_900)
)
LAST = "\U0010ffff"
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=["a", LAST, "\x00", "\x7f", "é", "😀", "\ue000"], min_size=30, max_size=36),
    st.integers(30, 40).map(lambda n: LAST * n),
)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Any]:
    most = 10**precision - 1
    numbers = st.one_of(st.integers(-most, most), st.sampled_from([most, -most, 0, 1, -1]))
    return numbers.map(lambda n: Decimal(n).scaleb(-scale, context=Context(prec=50)))


VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "int64": (
        pa.int64(),
        st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers((1 << 53) - 3, (1 << 53) + 3)),
    ),
    "float32": (
        pa.float32(),
        st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf])),
    ),
    "float64": (
        pa.float64(),
        st.one_of(st.floats(), st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf])),
    ),
    "decimal of 9": (pa.decimal128(9, 2), decimals(9, 2)),
    "decimal of 20": (pa.decimal128(20, 0), decimals(20, 0)),
    "decimal of 38": (pa.decimal128(38, 10), decimals(38, 10)),
    "string": (pa.string(), TEXTS),
    "binary": (pa.binary(), st.binary(max_size=40)),
    "boolean": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), DAYS),
    "timestamp": (pa.timestamp("us", "UTC"), INSTANTS),
    "timestamp_ntz": (pa.timestamp("us"), INSTANTS),
}


def literal(scalar: pa.Scalar) -> str:
    """In deltalake's SQL."""
    kind = scalar.type
    if pa.types.is_string(kind):
        return "'" + scalar.as_py().replace("'", "''") + "'"
    if pa.types.is_binary(kind):
        return f"arrow_cast(X'{scalar.as_py().hex()}', 'Binary')"
    if pa.types.is_date(kind):
        return f"arrow_cast({scalar.cast(pa.int32()).as_py()}, 'Date32')"
    if pa.types.is_timestamp(kind):
        zone = "None" if kind.tz is None else 'Some("UTC")'
        return f"arrow_cast({scalar.cast(pa.int64()).as_py()}, 'Timestamp(Microsecond, {zone})')"
    if pa.types.is_decimal(kind):
        return f"arrow_cast('{scalar.as_py():f}', 'Decimal128({kind.precision}, {kind.scale})')"
    if pa.types.is_floating(kind):
        return f"arrow_cast('{scalar.as_py()!r}', 'Float{kind.bit_width}')"
    if pa.types.is_boolean(kind):
        return str(scalar.as_py())
    return f"arrow_cast('{scalar.as_py()}', 'Int{kind.bit_width}')"


class Pair:
    """A table, and one with the same rows and without statistics."""

    def __init__(self, folder: Path, schema: pa.Schema, parts: list[pa.Table]) -> None:
        self.rows = pa.concat_tables(parts)
        location, self.bare = DeltaLocation(str(folder / "ours")), str(folder / "bare")
        self.path = location.path
        indexed = indexed_columns(schema, location.create(schema).metadata().configuration)
        stage = DeltaStage(location, DeltaLayout(schema, ()), "app", 0, indexed)
        files = [file for part in parts if (file := stage.write(iter(part.to_batches(max_chunksize=2))))]
        stage.require_files(files)
        RowsCommit(stage, files, "append", None)(location.open(), {})
        plain = DeltaTable.create(self.bare, deltalake.Schema.from_arrow(schema))
        pq.write_table(self.rows, f"{self.bare}/all.parquet", write_statistics=False)
        size = Path(self.bare, "all.parquet").stat().st_size
        stats = json.dumps({"numRecords": self.rows.num_rows})
        actions = [DataFile("all.parquet", self.rows.num_rows, size, stats).add_action()]
        plain.create_write_transaction(actions, "append", plain.schema())
        self.tables = QueryBuilder().register("ours", DeltaTable(self.path))
        self.tables.register("bare", DeltaTable(self.bare))
        self.dataset = DeltaTable(self.path).to_pyarrow_dataset()

    def run(self, query: str) -> pa.Table:
        return pa.table(self.tables.execute(query).read_all())

    def check(self, conditions: Sequence[str]) -> None:
        """Each condition selects the same rows in both tables."""
        # A query without a condition skips no file.
        columns = ", ".join(f"({each}) AS c{number}" for number, each in enumerate(conditions))
        bare = self.run(f"SELECT id, {columns} FROM bare")
        for number, condition in enumerate(conditions):
            found = self.run(f"SELECT id FROM ours WHERE {condition}")["id"].to_pylist()
            assert sorted(found) == sorted(bare.filter(bare[f"c{number}"])["id"].to_pylist()), condition

    def check_dataset(self, condition: ds.Expression) -> None:
        found = self.dataset.to_table(filter=condition)
        assert sorted(found["id"].to_pylist()) == self.rows.filter(condition)["id"].to_pylist(), condition


def parts_of(kind: pa.DataType, lists: list[list[Any]]) -> Iterator[pa.Table]:
    number = 0
    for values in lists:
        ids = pa.array(range(number, number + len(values)), pa.int64())
        number += len(values)
        yield pa.table({"id": ids, "v": pa.array(values, kind)})


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VALUES)
def test_filters_at_the_bounds_of_files_find_all_rows(tmp_path: Path, name: str) -> None:
    kind, values = VALUES[name]
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    numbers = iter(range(100_000))
    files = st.lists(st.lists(st.one_of(st.none(), values), min_size=1, max_size=4), min_size=1, max_size=3)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(lists=files)
    def check(lists: list[list[Any]]) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        pair = Pair(folder, schema, list(parts_of(kind, lists)))
        conditions = [
            f"v {operator} {literal(scalar)}"
            for scalar in pair.rows["v"].drop_null()
            for operator in ("=", "<>", "<", "<=", ">", ">=")
        ]
        pair.check(["v IS NULL", "v IS NOT NULL", *conditions])
        for scalar in pair.rows["v"].drop_null():
            # Arrow orders no NaN, and makes Python objects of dates and times.
            if not pa.types.is_temporal(kind) and scalar.as_py() == scalar.as_py():
                field = ds.field("v")
                for condition in (field == scalar, field <= scalar, field >= scalar):
                    pair.check_dataset(condition)

    check()


def stats_of(kind: pa.DataType, *values: Any) -> Any:
    statistics = FileStatistics.of(pa.schema([("v", kind)]), ["v"])
    for value in values:
        statistics.add(pa.record_batch([pa.array([value], kind)], names=["v"]))
    return json.loads(statistics.to_json(), parse_int=str, parse_float=str)


def bounds_of(kind: pa.DataType, *values: Any) -> tuple[Any, Any]:
    stats = stats_of(kind, *values)
    return tuple(stats[part].get("v") if part in stats else None for part in ("minValues", "maxValues"))  # type: ignore[return-value]


def test_statistics_have_the_form_of_the_protocol() -> None:
    zone, local = pa.timestamp("us", "UTC"), pa.timestamp("us")
    at = datetime(2026, 1, 31, 12, 0, 0, 123456)  # noqa: DTZ001 - of a column without a zone
    assert stats_of(pa.int64(), 3, None, -1) == {
        "numRecords": "3",
        "minValues": {"v": "-1"},
        "maxValues": {"v": "3"},
        "nullCount": {"v": "1"},
    }
    assert bounds_of(pa.float64(), 0.0) == ("-0.0", "0.0")
    assert bounds_of(pa.float64(), 1.5, math.nan, 2.5) == (None, None)
    assert bounds_of(pa.float64(), 1.5, math.inf) == (None, None)
    assert bounds_of(zone, 1_769_860_800_123_456) == ("2026-01-31T12:00:00.123Z", "2026-01-31T12:00:00.124Z")
    assert bounds_of(local, at) == ("2026-01-31T12:00:00.123", "2026-01-31T12:00:00.124")
    assert bounds_of(pa.date32(), date(1, 1, 1), date(2026, 1, 31)) == ("0001-01-01", "2026-01-31")
    assert bounds_of(pa.date32(), 3_000_000) == (None, None)
    assert bounds_of(pa.string(), "a" * 40) == ("a" * 32, "a" * 32 + LAST)
    assert bounds_of(pa.string(), LAST * 34 + "b") == (LAST * 32, LAST * 35)
    assert bounds_of(pa.decimal128(38, 4), Decimal("12345678901234567.8901")) == (
        "12345678901234500",
        "12345678901234600",
    )
    assert bounds_of(pa.decimal128(16, 0), Decimal(9_999_999_999_999_999)) == (
        "9999999999999990",
        "9999999999999999",
    )
    assert bounds_of(pa.binary(), b"x") == (None, None)
    assert stats_of(pa.bool_(), True, None)["maxValues"] == {"v": True}


def test_a_reader_skips_files_by_their_statistics(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    parts = [pa.table({"id": [n], "v": [f"{n}" * 50]}, schema) for n in range(4)]
    table = DeltaTable(Pair(tmp_path, schema, parts).path)
    for predicate in ("id >= 2", "v > '2'"):
        assert len(table.file_uris(file_pruning_predicate=predicate)) == 2


def test_text_that_is_no_utf_8_has_no_bounds() -> None:
    broken = pa.array([b"\xff"], pa.binary()).view(pa.string())
    statistics = FileStatistics.of(pa.schema([("v", pa.string())]), ["v"])
    statistics.add(pa.record_batch([broken], names=["v"]))
    assert json.loads(statistics.to_json()) == {"numRecords": 1, "nullCount": {"v": 0}}


def test_the_table_s_properties_choose_the_columns_with_statistics() -> None:
    pair = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = pa.schema([("pair", pair), *((f"c{n}", pa.int64()) for n in range(40)), ("a,`b", pa.int64())])
    assert indexed_columns(schema, {}) == tuple(f"c{n}" for n in range(30))
    assert indexed_columns(schema, {"delta.dataSkippingNumIndexedCols": "3"}) == ("c0",)
    assert indexed_columns(schema, {"delta.dataSkippingNumIndexedCols": "0"}) == ()
    assert len(indexed_columns(schema, {"delta.dataSkippingNumIndexedCols": "-1"})) == 41
    named = {"delta.dataSkippingStatsColumns": "C39, `a,``b`,pair.x", "delta.dataSkippingNumIndexedCols": "1"}
    assert indexed_columns(schema, named) == ("c39", "a,`b")


def test_nested_columns_are_read_and_have_no_statistics(tmp_path: Path) -> None:
    kind = pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int64()))])
    schema = pa.schema([("id", pa.int64()), ("v", kind), ("m", pa.map_(pa.string(), pa.int64()))])
    rows = [
        {"id": 0, "v": {"x": math.nan, "y": [1]}, "m": [("a", 1)]},
        {"id": 1, "v": None, "m": None},
        {"id": 2, "v": {"x": 1.0, "y": None}, "m": []},
    ]
    pair = Pair(tmp_path, schema, [pa.Table.from_pylist([row], schema) for row in rows])
    for condition in ("v['x'] > 5", "v['x'] = 1.0", "v['x'] IS NULL", "v IS NULL", "m IS NOT NULL"):
        pair.check([condition])
    for expression in (ds.field("v", "x") == 1.0, ds.field("v", "x").is_null(), ds.field("id") < 2):
        pair.check_dataset(expression)


def test_columns_without_statistics_are_found(tmp_path: Path) -> None:
    """Beyond the first 32, where another has NaN, and where a file has no values at all."""
    schema = pa.schema([("id", pa.int64()), *((f"c{n}", pa.float64()) for n in range(40))])
    rows = [
        {"id": n, **{f"c{m}": [math.nan, None, 1.0][(n + m // 4) % 3] for m in range(40)}} for n in range(6)
    ]
    rows.append({"id": 6, "c39": 1.0})
    pair = Pair(tmp_path, schema, [pa.Table.from_pylist([row], schema) for row in rows])
    for name in ("id", "c0", "c4", "c30", "c31", "c39"):
        pair.check([f'"{name}" >= 1.0', f'"{name}" IS NULL'])
        pair.check_dataset(ds.field(name) == 1.0)
        pair.check_dataset(ds.field(name).is_null())
