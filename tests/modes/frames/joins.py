"""Joins."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.modes.frames.frame import (
    FOR_EVER,
    NO_AGGREGATION,
    Inputs,
    says,
)

_RANGE = "k = k2 and ts between ts2 and ts2 + interval 1 minute"
_ENDLESS = ("PENSTOCK_JOIN_STATE_FOR_EVER",)
_NEVER = ("PENSTOCK_OUTER_ROWS_NEVER_COME", *_ENDLESS)
_UNBOUND = ("PENSTOCK_OUTER_JOIN_WITHOUT_TIME",)
_MODE = ("PENSTOCK_JOIN_MODE",)


@says(append=_ENDLESS, update=_ENDLESS, complete=(*NO_AGGREGATION, *_ENDLESS))
def joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"))


@says(
    append=(*_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
    update=(*_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
    complete=(*NO_AGGREGATION, *_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
)
def joined_with_watermarks(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2"))


_POLICY = ("PENSTOCK_WATERMARK_POLICY_MIN",)


@says(append=_POLICY, update=_POLICY, complete=(*NO_AGGREGATION, *_POLICY))
def joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE))


@says(
    append=("PENSTOCK_WATERMARK_POLICY_MAX",),
    update=("PENSTOCK_WATERMARK_POLICY_MAX",),
    complete=(*NO_AGGREGATION, "PENSTOCK_WATERMARK_POLICY_MAX"),
    spark__sql__streaming__multipleWatermarkPolicy="max",
)
def joined_by_the_fastest_watermark(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE))


_SEVERAL = ("PENSTOCK_SEVERAL_EVENT_TIMES", *_POLICY)


@says(append=_SEVERAL, update=_SEVERAL, complete=(*NO_AGGREGATION, *_SEVERAL))
def windows_joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.withColumn("minute", F.window("ts", "1 minute")).join(t.timed_others, F.expr(_RANGE))


@says(append=_POLICY, update=_POLICY, complete=(*NO_AGGREGATION, *_POLICY))
def joined_in_a_range_with_windows(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE)).withColumn("minute", F.window("ts", "1 minute"))


@says(append=_UNBOUND, update=(*_MODE, *_UNBOUND), complete=(*NO_AGGREGATION, *_UNBOUND))
def left_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_outer")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def left_joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_outer")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def full_joined_at_equal_times(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 and ts = ts2"), "full_outer")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def left_joined_again_with_the_same_stream(t: Inputs) -> DataFrame:
    return (
        t.timed.join(t.timed_others, F.expr(_RANGE))
        .selectExpr("ts", "k + 100 as k", "value2 as value")
        .join(t.timed_others, F.expr(_RANGE), "left_outer")
    )


@says(
    append=(*_ENDLESS, *_POLICY),
    update=(*_ENDLESS, *_POLICY),
    complete=(*NO_AGGREGATION, *_ENDLESS, *_POLICY),
)
def joined_in_a_range_by_a_recreated_time(t: Inputs) -> DataFrame:
    return t.timed.withColumn("ts", F.col("ts").cast("string").cast("timestamp")).join(
        t.timed_others, F.expr(_RANGE)
    )


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def left_joined_by_an_exploded_key(t: Inputs) -> DataFrame:
    return t.timed.select("ts", F.explode(F.array("k")).alias("k")).join(
        t.timed_others, F.expr(_RANGE), "left_outer"
    )


@says(append=_UNBOUND, update=_UNBOUND, complete=(*NO_AGGREGATION, *_UNBOUND))
def semi_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_semi")


_ANTI = ("PENSTOCK_ANTI_JOIN",)


@says(append=_ANTI, update=_ANTI, complete=(*NO_AGGREGATION, *_ANTI))
def anti_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_anti")


_BATCH = ("PENSTOCK_JOIN_WITH_BATCH",)


@says(append=_BATCH, update=_BATCH, complete=(*NO_AGGREGATION, *_BATCH))
def batch_left_joined(t: Inputs) -> DataFrame:
    return t.batch.join(t.events, F.expr("k = k2"), "left_outer")


@says(
    append=_POLICY,
    update=_POLICY,
    complete=(*_MODE, *FOR_EVER, *_POLICY),
)
def windows_of_joined(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE)).groupBy(F.window("ts", "1 minute")).count()


@says(append=_POLICY, update=_POLICY, complete=(*NO_AGGREGATION, *_POLICY))
def semi_joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_semi")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def without_a_match(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_outer").where("k2 is null")


@says(append=_NEVER, update=(*_MODE, *_NEVER), complete=(*NO_AGGREGATION, *_NEVER))
def left_joined_with_a_watermark_on_the_right(t: Inputs) -> DataFrame:
    return t.events.join(t.timed_others, F.expr(_RANGE), "left_outer")


@says(append=_UNBOUND, update=(*_MODE, *_UNBOUND), complete=(*NO_AGGREGATION, *_UNBOUND))
def left_joined_with_a_watermark_on_the_left(t: Inputs) -> DataFrame:
    return t.timed.join(t.others, F.expr(_RANGE), "left_outer")


@says(append=_NEVER, update=(*_MODE, *_NEVER), complete=(*NO_AGGREGATION, *_NEVER))
def right_joined_with_a_watermark_on_the_left(t: Inputs) -> DataFrame:
    return t.timed.join(t.others, F.expr(_RANGE), "right_outer")


@says(update=_MODE)
def right_joined_at_equal_times_with_one_watermark(t: Inputs) -> DataFrame:
    return t.timed.join(t.others, F.expr("k = k2 and ts = ts2"), "right_outer")


@says(
    append=(*_UNBOUND, *_POLICY),
    update=(*_MODE, *_UNBOUND, *_POLICY),
    complete=(*NO_AGGREGATION, *_UNBOUND, *_POLICY),
)
def left_joined_with_any_later_row(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 and ts <= ts2"), "left_outer")


@says(
    append=(*_NEVER, *_POLICY),
    update=(*_MODE, *_NEVER, *_POLICY),
    complete=(*NO_AGGREGATION, *_NEVER, *_POLICY),
)
def full_joined_with_any_earlier_row(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 and ts + interval 1 minute > ts2"), "full_outer")


@says(
    append=(*_UNBOUND, *_POLICY),
    update=(*_UNBOUND, *_POLICY),
    complete=(*NO_AGGREGATION, *_UNBOUND, *_POLICY),
)
def semi_joined_on_equal_days(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 and date(ts) = date(ts2)"), "left_semi")


@says(
    append=(*_UNBOUND, *_POLICY),
    update=(*_MODE, *_UNBOUND, *_POLICY),
    complete=(*NO_AGGREGATION, *_UNBOUND, *_POLICY),
)
def left_joined_by_key_or_time(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 or ts = ts2"), "left_outer")
