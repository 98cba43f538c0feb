"""Stateful functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StatefulProcessor

from tests.modes.frames.frame import (
    CHAIN,
    EACH_KEY,
    FOR_EVER,
    NO_AGGREGATION,
    WITHOUT_WATERMARK,
    Inputs,
    says,
)


def _pandas(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    import pandas

    yield pandas.DataFrame({"k": [key[0]]})


class _Processor(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timer: Any) -> Iterator[Any]:  # noqa: N802 - Spark's name
        import pandas

        for _ in rows:
            pass
        yield pandas.DataFrame({"k": [key[0]]})

    def close(self) -> None: ...


def _with_state(frame: DataFrame, mode: str) -> DataFrame:
    return frame.groupBy("k").applyInPandasWithState(_pandas, "k long", "n long", mode, "NoTimeout")


def _transformed(frame: DataFrame, mode: str) -> DataFrame:
    return frame.groupBy("k").transformWithStateInPandas(_Processor(), "k long", mode, "none")


@says(update=("PENSTOCK_FUNCTION_MODE",))
def function_in_append(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append")


@says(append=("PENSTOCK_FUNCTION_MODE",))
def function_in_update(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update")


_AFTER = ("PENSTOCK_FUNCTION_AFTER_AGGREGATION",)


@says(append=_AFTER, update=(*_AFTER, *CHAIN), complete=(*_AFTER, *CHAIN, *FOR_EVER))
def function_after_windows(t: Inputs) -> DataFrame:
    return _with_state(t.windows.drop("window"), "append")


_COUNTED = ("PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",)


@says(append=(*WITHOUT_WATERMARK, *_COUNTED), update=(*_COUNTED, *EACH_KEY), complete=(*_COUNTED, *EACH_KEY))
def function_in_update_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update").groupBy("k").count()


_SEVERAL = ("PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",)


@says(
    append=_SEVERAL,
    update=(*_SEVERAL, "PENSTOCK_FUNCTION_MODE", "PENSTOCK_FUNCTION_MODE"),
    complete=(*_SEVERAL, *NO_AGGREGATION),
)
def two_functions(t: Inputs) -> DataFrame:
    return _with_state(_with_state(t.events, "append"), "append")


_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_NEEDS = ("PENSTOCK_FUNCTION_NEEDS_ROCKSDB",)


@says(
    append=_NEEDS,
    update=(*_NEEDS, "PENSTOCK_FUNCTION_MODE_DIFFERS"),
    complete=(*_NEEDS, *NO_AGGREGATION),
)
def transformed_without_rocksdb(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


@says(update=("PENSTOCK_FUNCTION_MODE_DIFFERS",), spark__sql__streaming__stateStore__providerClass=_ROCKSDB)
def transformed_with_state(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def function_in_append_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append").groupBy("k").count()


@says(spark__sql__streaming__stateStore__providerClass=_ROCKSDB, append=("PENSTOCK_FUNCTION_MODE_DIFFERS",))
def transformed_in_update(t: Inputs) -> DataFrame:
    return _transformed(t.events, "update")


_TWICE = ("PENSTOCK_FUNCTION_MODE_DIFFERS", "PENSTOCK_FUNCTION_MODE_DIFFERS")


@says(spark__sql__streaming__stateStore__providerClass=_ROCKSDB, update=_TWICE)
def transformed_twice(t: Inputs) -> DataFrame:
    return _transformed(_transformed(t.events, "append"), "append")


@says(
    append=(),
    update=("PENSTOCK_FUNCTION_MODE_DIFFERS", *CHAIN),
    complete=(*CHAIN, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=_ROCKSDB,
)
def transformed_after_windows(t: Inputs) -> DataFrame:
    return _transformed(t.windows.drop("window"), "append")
