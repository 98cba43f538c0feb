"""Filters that are pushed down mean the same as in Spark."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as filters
from pyspark.sql.datasource import Filter

from penstock import Store
from penstock.spark.queue_readers import NO_ROW, row_bounds, to_arrow_expression
from tests.support.spark_queues import batch, fill, make_queue

SETTING = "spark.sql.python.filterPushdown.enabled"
NAN = float("nan")
NAIVE = datetime.fromisoformat("2024-01-01")

ROWS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "i": (pa.int32(), [1, 2, None, -5, 2**31 - 1, 0]),
    "l": (pa.int64(), [1, None, 3, -(2**63), 2**63 - 1, 5]),
    "s": (pa.string(), ["a", "", None, "ab", "B", "ünï"]),
    "d": (
        pa.decimal128(10, 2),
        [Decimal("1.50"), Decimal("-0.01"), None, Decimal("99999999.99"), Decimal(0), Decimal(2)],
    ),
    "t": (
        pa.timestamp("us", "UTC"),
        [datetime(2024, 1, 1, tzinfo=UTC), None, datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)]
        + [datetime(2024, 1, 1, 5, tzinfo=UTC)] * 3,
    ),
    "n": (
        pa.timestamp("us"),
        [NAIVE, None, NAIVE.replace(hour=5)] + [NAIVE.replace(year=1)] * 3,
    ),
    "dt": (
        pa.date32(),
        [date(2024, 1, 1), None, date(1969, 12, 31), date(9999, 12, 31)] + [date(2024, 2, 29)] * 2,
    ),
    "b": (pa.bool_(), [True, False, None, True, False, None]),
    "f": (pa.float64(), [1.5, NAN, None, float("inf"), -0.0, 0.0]),
    "bin": (pa.binary(), [b"\x00", b"", None, b"\xff", b"a", b"ab"]),
    "st": (pa.struct([("a", pa.int32())]), [{"a": 1}, {"a": None}, None, {"a": 2}, {"a": 1}, {"a": 3}]),
}

TIMES = [
    "t > timestamp'2024-01-01 00:00:00'",
    "t = timestamp'2024-01-01 00:00:00-05:00'",
    "t in (timestamp'2024-01-01 00:00:00', timestamp'2024-01-01 05:00:00Z')",
    "n >= timestamp_ntz'2024-01-01 00:00:00'",
    "dt = date'2024-02-29' or dt is null",
    "dt > date'1970-01-01'",
]
CONDITIONS = [
    *TIMES,
    "i = 1",
    "i <=> 1",
    "i <=> null",
    "not (i <=> 1)",
    "i != 1",
    "i in (1, 2)",
    "i in (1, null)",
    "i not in (1, 2)",
    "i not in (1, null)",
    "i is null and s is null",
    "i is not null and not b",
    "b",
    "b = false",
    "i > -5 and i < 2147483647",
    "l >= 1 and l <= 3",
    "l between -9223372036854775808 and 0",
    "i > 1.5",
    "s = 'a'",
    "s > 'B'",
    "s like 'a%'",
    "s like '%b'",
    "s like '%n%'",
    "s not like 'a%'",
    "s in ('', 'ünï')",
    "d = 1.5",
    "d = 1.505",
    "d in (1.5, 2, 0)",
    "d < 99999999.99",
    "f = 'NaN'",
    "f > 1.5",
    "f = 0",
    "f is null",
    "bin = x'ff'",
    "bin > x'61'",
    "st.a = 1",
    "st is null",
    "abs(i) = 5 or l = 3",
]


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(SETTING, "true")
    yield
    spark.conf.unset(SETTING)


@pytest.fixture(scope="module")
def both(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, DataFrame]:
    """A queue of unusual rows, and the same rows as a DataFrame without pushdown."""
    import penstock

    data = pa.table([pa.array(values, kind) for kind, values in ROWS.values()], names=list(ROWS))
    url = f"sqlite:///{tmp_path_factory.mktemp('filters')}/penstock.db"
    with penstock.connect(url) as store:
        store.create_queue("orders", data.schema).append(data)
    plain = batch(spark, url)
    return url, spark.createDataFrame(plain.collect(), plain.schema)


@pytest.mark.usefixtures("pushing")
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_pushdown_changes_no_result(spark: SparkSession, both: tuple[str, DataFrame], zone: str) -> None:
    url, local = both
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        for condition in CONDITIONS if zone == "UTC" else TIMES:
            found = batch(spark, url).where(condition).select("l", "s")
            assert _bag(found) == _bag(local.where(condition).select("l", "s")), condition
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def _bag(frame: DataFrame) -> list[str]:
    return sorted(str(tuple(row)) for row in frame.collect())


@pytest.mark.usefixtures("pushing")
def test_a_pushed_filter_is_not_evaluated_by_spark(spark: SparkSession, both: tuple[str, DataFrame]) -> None:
    plan = (
        batch(spark, both[0])
        .where("i = 1 and s like 'a%' and f > 1")
        ._jdf.queryExecution()
        .executedPlan()
        .toString()
    )
    left = plan[: plan.index("BatchScan")]
    assert "Filter" in left
    assert "i#" not in left[left.index("Filter") :].split("\n")[0]
    assert "f#" in left


def test_filters_on_metadata_columns_select_the_tasks(
    spark: SparkSession, store: Store, store_url: str
) -> None:
    queue = make_queue(store, partitions=2)
    for partition in (0, 1):
        fill(queue, range(partition * 100, partition * 100 + 10), partition=partition, each=3)
    for pushdown in ("true", "false"):
        spark.conf.set(SETTING, pushdown)
        try:
            frame = batch(spark, store_url, includeMetadataColumns=True, rowsPerTask=2)
            few = frame.where("_partition = 1 and _row_index >= 3 and _row_index < 5")
            assert sorted(row["id"] for row in few.collect()) == [103, 104]
            assert few.rdd.getNumPartitions() == (2 if pushdown == "true" else 10)
            none = batch(spark, store_url, includeMetadataColumns=True).where(
                "_partition = 0 and _partition = 1"
            )
            assert none.collect() == []
        finally:
            spark.conf.unset(SETTING)


def test_the_pushdown_setting_may_change_between_reads(
    spark: SparkSession, both: tuple[str, DataFrame]
) -> None:
    for pushdown in ("false", "true", "false"):
        spark.conf.set(SETTING, pushdown)
        assert batch(spark, both[0]).where("i = 1").count() == 1
        assert batch(spark, both[0]).count() == 6
    spark.conf.unset(SETTING)


# The expressions against SQL's logic of three values.

_SCHEMA = pa.schema([(name, kind) for name, (kind, _) in ROWS.items()])
_VALUES = {
    "i": st.sampled_from([1, 2, -5, 0]),
    "s": st.sampled_from(["a", "", "ab", "B"]),
    "d": st.sampled_from([Decimal("1.50"), Decimal(0)]),
    "b": st.booleans(),
    "bin": st.sampled_from([b"", b"a", b"\xff"]),
}
_COMPARE = {
    filters.EqualTo: operator.eq,
    filters.GreaterThan: operator.gt,
    filters.GreaterThanOrEqual: operator.ge,
    filters.LessThan: operator.lt,
    filters.LessThanOrEqual: operator.le,
}
_TEXT = {
    filters.StringStartsWith: str.startswith,
    filters.StringEndsWith: str.endswith,
    filters.StringContains: str.__contains__,
}


@st.composite
def _filters(draw: st.DrawFn) -> Filter:
    name = draw(st.sampled_from(sorted(_VALUES)))
    kind = draw(st.sampled_from(["compare", "safe", "in", "null", "text"]))
    value = draw(_VALUES[name])
    if kind == "compare":
        found: Filter = draw(st.sampled_from(list(_COMPARE)))((name,), value)
    elif kind == "safe":
        found = filters.EqualNullSafe((name,), value)
    elif kind == "in":
        found = filters.In((name,), draw(st.lists(st.none() | _VALUES[name], min_size=1, max_size=3)))
    elif kind == "null":
        found = draw(st.sampled_from([filters.IsNull, filters.IsNotNull]))((name,))
    else:
        found = draw(st.sampled_from(list(_TEXT)))(("s",), draw(_VALUES["s"]))
    return filters.Not(found) if draw(st.booleans()) else found


def _sql(found: Filter, value: Any) -> bool | None:
    if isinstance(found, filters.Not):
        inner = _sql(found.child, value)
        return None if inner is None else not inner
    if isinstance(found, filters.IsNull | filters.IsNotNull):
        return (value is None) == isinstance(found, filters.IsNull)
    if isinstance(found, filters.EqualNullSafe):
        return value is not None and value == found.value
    if value is None:
        return None
    if isinstance(found, filters.In):
        return True if value in found.value else None if None in found.value else False
    if type(found) in _TEXT:
        return bool(_TEXT[type(found)](value, found.value))
    return bool(_COMPARE[type(found)](value, found.value))


@given(found=_filters(), data=st.data())
def test_expressions_have_sql_semantics(found: Filter, data: st.DataObject) -> None:
    name = (found.child if isinstance(found, filters.Not) else found).attribute[0]
    values = data.draw(st.lists(st.none() | _VALUES[name], max_size=6))
    taken = to_arrow_expression(found, _SCHEMA)
    assert taken is not None
    batch = pa.record_batch([pa.array(values, _SCHEMA.field(name).type)], names=[name])
    assert batch.filter(taken).column(0).to_pylist() == [v for v in values if _sql(found, v) is True]


@pytest.mark.parametrize(
    "found",
    [
        filters.EqualTo(("f",), 1.5),
        filters.Not(filters.GreaterThan(("f",), 1.5)),
        filters.EqualTo(("st", "a"), 1),
        filters.EqualTo(("gone",), 1),
        filters.EqualTo(("i",), 2**40),
        filters.EqualTo(("d",), Decimal("1.505")),
        filters.StringStartsWith(("bin",), "a"),
        filters.EqualTo(("i",), None),
    ],
    ids=str,
)
def test_unsupported_filters_are_left_to_spark(found: Filter) -> None:
    assert to_arrow_expression(found, _SCHEMA) is None


def test_row_bounds_are_taken_from_filters() -> None:
    row, part = ("_row_index",), ("_partition",)
    assert row_bounds([]) == (None, 0, NO_ROW)
    assert row_bounds([filters.EqualTo(row, 5), filters.EqualTo(part, 2)]) == (2, 5, 6)
    assert row_bounds([filters.GreaterThan(row, 5), filters.LessThanOrEqual(row, 9)]) == (None, 6, 10)
    assert row_bounds([filters.Not(filters.EqualTo(row, 5)), filters.In(row, [1])]) == (None, 0, NO_ROW)
