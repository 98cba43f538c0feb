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
    ROCKSDB,
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


def _with_state(frame: DataFrame, mode: str, timeout: str = "NoTimeout") -> DataFrame:
    return frame.groupBy("k").applyInPandasWithState(_pandas, "k long", "n long", mode, timeout)


def _transformed(frame: DataFrame, mode: str) -> DataFrame:
    return frame.groupBy("k").transformWithStateInPandas(_Processor(), "k long", mode, "none")


@says(append=FOR_EVER, update=("PENSTOCK_FUNCTION_MODE", *FOR_EVER), complete=(*NO_AGGREGATION, *FOR_EVER))
def function_in_append(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append")


@says(append=("PENSTOCK_FUNCTION_MODE", *FOR_EVER), update=FOR_EVER, complete=(*NO_AGGREGATION, *FOR_EVER))
def function_in_update(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update")


_TIMEOUT = ("PENSTOCK_FUNCTION_TIMEOUT_WITHOUT_WATERMARK",)


@says(
    append=_TIMEOUT,
    update=("PENSTOCK_FUNCTION_MODE", *_TIMEOUT),
    complete=(*NO_AGGREGATION, *_TIMEOUT),
)
def function_with_a_timeout_and_no_watermark(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append", "EventTimeTimeout")


@says(update=("PENSTOCK_FUNCTION_MODE",))
def function_with_a_timeout(t: Inputs) -> DataFrame:
    return _with_state(t.timed, "append", "EventTimeTimeout")


@says(
    append=_TIMEOUT,
    update=("PENSTOCK_FUNCTION_MODE", *_TIMEOUT),
    complete=(*NO_AGGREGATION, *_TIMEOUT),
)
def function_with_a_timeout_after_the_event_time_is_dropped(t: Inputs) -> DataFrame:
    return _with_state(t.timed.drop("ts"), "append", "EventTimeTimeout")


@says(
    append=(*CHAIN, *FOR_EVER),
    update=(*CHAIN, "PENSTOCK_FUNCTION_MODE", "PENSTOCK_FUNCTION_MODE_DIFFERS", *FOR_EVER),
    complete=(*CHAIN, *NO_AGGREGATION, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def function_with_a_timeout_transformed(t: Inputs) -> DataFrame:
    return _transformed(_with_state(t.timed, "append", "EventTimeTimeout"), "append")


_AFTER = ("PENSTOCK_FUNCTION_AFTER_AGGREGATION",)


@says(
    append=(*_AFTER, *FOR_EVER),
    update=(*_AFTER, *CHAIN, *FOR_EVER),
    complete=(*_AFTER, *CHAIN, *FOR_EVER, *FOR_EVER),
)
def function_after_windows(t: Inputs) -> DataFrame:
    return _with_state(t.windows.drop("window"), "append")


_COUNTED = ("PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",)


@says(
    append=(*WITHOUT_WATERMARK, *_COUNTED, *FOR_EVER),
    update=(*_COUNTED, *EACH_KEY, *FOR_EVER),
    complete=(*_COUNTED, *EACH_KEY, *FOR_EVER),
)
def function_in_update_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update").groupBy("k").count()


_SEVERAL = ("PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",)


@says(
    append=(*_SEVERAL, *FOR_EVER, *FOR_EVER),
    update=(*_SEVERAL, "PENSTOCK_FUNCTION_MODE", "PENSTOCK_FUNCTION_MODE", *FOR_EVER, *FOR_EVER),
    complete=(*_SEVERAL, *NO_AGGREGATION, *FOR_EVER, *FOR_EVER),
)
def two_functions(t: Inputs) -> DataFrame:
    return _with_state(_with_state(t.events, "append"), "append")


_NEEDS = ("PENSTOCK_FUNCTION_NEEDS_ROCKSDB",)


@says(
    append=(*_NEEDS, *FOR_EVER),
    update=(*_NEEDS, "PENSTOCK_FUNCTION_MODE_DIFFERS", *FOR_EVER),
    complete=(*_NEEDS, *NO_AGGREGATION, *FOR_EVER),
)
def transformed_without_rocksdb(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


@says(
    append=FOR_EVER,
    update=("PENSTOCK_FUNCTION_MODE_DIFFERS", *FOR_EVER),
    complete=(*NO_AGGREGATION, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def transformed_with_state(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


@says(append=(*WITHOUT_WATERMARK, *FOR_EVER), update=(*EACH_KEY, *FOR_EVER), complete=(*EACH_KEY, *FOR_EVER))
def function_in_append_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append").groupBy("k").count()


@says(
    append=("PENSTOCK_FUNCTION_MODE_DIFFERS", *FOR_EVER),
    update=FOR_EVER,
    complete=(*NO_AGGREGATION, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def transformed_in_update(t: Inputs) -> DataFrame:
    return _transformed(t.events, "update")


_BOTH = (*FOR_EVER, *FOR_EVER)
_TWICE = ("PENSTOCK_FUNCTION_MODE_DIFFERS", "PENSTOCK_FUNCTION_MODE_DIFFERS")


@says(
    append=_BOTH,
    update=(*_TWICE, *_BOTH),
    complete=(*NO_AGGREGATION, *_BOTH),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def transformed_twice(t: Inputs) -> DataFrame:
    return _transformed(_transformed(t.events, "append"), "append")


@says(
    append=FOR_EVER,
    update=("PENSTOCK_FUNCTION_MODE_DIFFERS", *CHAIN, *FOR_EVER),
    complete=(*CHAIN, *FOR_EVER, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def transformed_after_windows(t: Inputs) -> DataFrame:
    return _transformed(t.windows.drop("window"), "append")


_IN_ONE_STAGE = ("PENSTOCK_ROCKSDB_CHAIN",)


@says(
    append=(*_IN_ONE_STAGE, *FOR_EVER),
    update=("PENSTOCK_FUNCTION_MODE_DIFFERS", *CHAIN, *FOR_EVER),
    complete=(*CHAIN, *FOR_EVER, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def times_transformed(t: Inputs) -> DataFrame:
    counts = t.timed.groupBy("ts").count()
    return counts.groupBy("ts").transformWithStateInPandas(_Processor(), "k timestamp", "append", "none")
