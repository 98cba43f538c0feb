"""For each problem a query that has it, and the same query with the fix that the report proposes."""

from __future__ import annotations

from tests.modes.cells import Cell

FIXES: dict[str, tuple[Cell, Cell]] = {
    "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING": (
        Cell("ranked", "append"),
        Cell("latest_in_windows", "append"),
    ),
    "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK": (
        Cell("windows_without_watermark", "append"),
        Cell("windows", "append"),
    ),
    "PENSTOCK_ANTI_JOIN": (Cell("anti_joined", "append"), Cell("without_a_match", "append")),
    "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION": (Cell("filtered", "complete"), Cell("filtered", "append")),
    "PENSTOCK_CONTINUOUS_NOW": (
        Cell("rate_now", "append", "noop", "continuous"),
        Cell("filtered", "append", "noop", "availableNow"),
    ),
    "PENSTOCK_DEDUPLICATION_OF_RESULTS": (
        Cell("results_deduplicated", "update"),
        Cell("aggregation_of_deduplicated", "update"),
    ),
    "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK": (
        Cell("deduplicated_within_no_watermark", "append"),
        Cell("deduplicated_within_watermark", "append"),
    ),
    "PENSTOCK_DISTINCT_AGGREGATE": (
        Cell("distinct_values", "update"),
        Cell("approximately_distinct_values", "update"),
    ),
    "PENSTOCK_EVENT_TIME_LOST": (Cell("event_time_recreated", "append"), Cell("windows", "append")),
    "PENSTOCK_EXCEPT_STREAM": (Cell("stream_taken_away", "append"), Cell("without_a_match", "append")),
    "PENSTOCK_EXPRESSION": (Cell("rows_numbered", "append"), Cell("rows_with_a_uuid", "append")),
    "PENSTOCK_FUNCTION_AFTER_AGGREGATION": (
        Cell("function_after_windows", "append"),
        Cell("transformed_after_windows", "append"),
    ),
    "PENSTOCK_FUNCTION_MODE": (Cell("function_in_update", "append"), Cell("function_in_update", "update")),
    "PENSTOCK_FUNCTION_MODE_DIFFERS": (
        Cell("transformed_with_state", "update"),
        Cell("transformed_in_update", "update"),
    ),
    "PENSTOCK_FUNCTION_NEEDS_ROCKSDB": (
        Cell("transformed_without_rocksdb", "append"),
        Cell("transformed_with_state", "append"),
    ),
    "PENSTOCK_FUNCTION_TIMEOUT_WITHOUT_WATERMARK": (
        Cell("function_with_a_timeout_and_no_watermark", "append"),
        Cell("function_with_a_timeout", "append"),
    ),
    "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION": (
        Cell("function_in_update_counted", "update"),
        Cell("function_in_append_counted", "update"),
    ),
    "PENSTOCK_SESSIONS_OF_ALL_ROWS": (
        Cell("sessions_of_all_rows", "append"),
        Cell("sessions", "append"),
    ),
    "PENSTOCK_ROCKSDB_CHAIN": (
        Cell("windows_deduplicated_in_rocksdb", "append"),
        Cell("windows_repartitioned_and_deduplicated_in_rocksdb", "append"),
    ),
    "PENSTOCK_ROWS_BESIDE_GROUPS": (
        Cell("windows_and_events_united", "complete"),
        Cell("windows_and_events_united", "update"),
    ),
    "PENSTOCK_INTERSECT": (Cell("intersected", "append"), Cell("semi_joined_in_a_range", "append")),
    "PENSTOCK_JOIN_MODE": (
        Cell("left_joined_in_a_range", "update"),
        Cell("left_joined_in_a_range", "append"),
    ),
    "PENSTOCK_JOIN_STATE_FOR_EVER": (Cell("joined", "append"), Cell("joined_in_a_range", "append")),
    "PENSTOCK_JOIN_WITH_BATCH": (
        Cell("batch_left_joined", "append"),
        Cell("left_joined_with_a_batch", "append"),
    ),
    "PENSTOCK_LAST_GROUP_STAYS": (
        Cell("windows", "append", "noop", "once"),
        Cell("windows", "append", "noop", "availableNow"),
    ),
    "PENSTOCK_LIMIT_IN_UPDATE": (Cell("limited", "update"), Cell("limited", "append")),
    "PENSTOCK_NOT_CONTINUOUS": (
        Cell("rate_counted", "update", "noop", "continuous"),
        Cell("count_by_key", "update", "noop", "availableNow"),
    ),
    "PENSTOCK_NO_SINK": (Cell("filtered", "append", "jdbc"), Cell("filtered", "append", "foreachBatch")),
    "PENSTOCK_NOT_STREAMING": (Cell("batch", "append"), Cell("filtered", "append")),
    "PENSTOCK_OUTER_JOIN_WITHOUT_TIME": (
        Cell("left_joined", "append"),
        Cell("left_joined_in_a_range", "append"),
    ),
    "PENSTOCK_OUTER_ROWS_NEVER_COME": (
        Cell("left_joined_with_a_watermark_on_the_right", "append"),
        Cell("left_joined_in_a_range", "append"),
    ),
    "PENSTOCK_REAL_TIME_BROADCAST": (
        Cell("live_joined_with_a_batch", "update", "console", "realTime"),
        Cell("live_joined_with_a_batch_that_is_sent_around", "update", "console", "realTime"),
    ),
    "PENSTOCK_ROWS_LOST_CONTINUOUS": (
        Cell("rate", "append", "python_sink", "continuous"),
        Cell("filtered", "append", "python_sink", "availableNow"),
    ),
    "PENSTOCK_PYTHON_AGGREGATE": (
        Cell("aggregated_in_python", "append"),
        Cell("list_reduced_in_python", "append"),
    ),
    "PENSTOCK_SUBTOTALS_OVER_TIME": (
        Cell("windows_rolled_up", "append"),
        Cell("windows_in_grouping_sets", "append"),
    ),
    "PENSTOCK_SAMPLE": (Cell("sampled", "append"), Cell("sampled_by_hash", "append")),
    "PENSTOCK_SESSION_WINDOW_IN_UPDATE": (Cell("sessions", "update"), Cell("sessions", "append")),
    "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS": (
        Cell("two_functions", "append"),
        Cell("transformed_twice", "append"),
    ),
    "PENSTOCK_SEVERAL_EVENT_TIMES": (
        Cell("windows_joined_in_a_range", "append"),
        Cell("joined_in_a_range_with_windows", "append"),
    ),
    "PENSTOCK_SINK_MODE": (
        Cell("count_by_key", "update", "python_sink"),
        Cell("count_by_key", "update", "foreachBatch"),
    ),
    "PENSTOCK_SINK_NOT_CONTINUOUS": (
        Cell("rate", "append", "foreachBatch", "continuous"),
        Cell("filtered", "append", "foreachBatch", "availableNow"),
    ),
    "PENSTOCK_SINK_REPEATS": (
        Cell("filtered", "append", "foreachBatch"),
        Cell("filtered", "append", "penstock table"),
    ),
    "PENSTOCK_SORT": (Cell("sorted_counts", "update"), Cell("sorted_counts", "complete")),
    "PENSTOCK_SOURCE_NOT_CONTINUOUS": (
        Cell("filtered", "append", "noop", "continuous"),
        Cell("filtered", "append", "noop", "availableNow"),
    ),
    "PENSTOCK_STATEFUL_AFTER_STATEFUL": (
        Cell("windows_of_windows", "update"),
        Cell("windows_of_windows", "append"),
    ),
    "PENSTOCK_STATE_FOR_EVER": (
        Cell("deduplicated", "append"),
        Cell("deduplicated_within_watermark", "append"),
    ),
    "PENSTOCK_UNION_WITH_BATCH": (Cell("united_with_a_batch", "append"), Cell("united", "append")),
    "PENSTOCK_WATERMARK_NOT_IN_GROUPING": (
        Cell("count_by_key_with_watermark", "append"),
        Cell("windows", "append"),
    ),
    "PENSTOCK_WATERMARK_POLICY_MAX": (
        Cell("joined_by_the_fastest_watermark", "append"),
        Cell("joined_in_a_range", "append"),
    ),
    "STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE": (
        Cell("count_by_key", "update", "parquet"),
        Cell("count_by_key", "update", "foreachBatch"),
    ),
    "STREAMING_REAL_TIME_MODE.IDENTICAL_SOURCES_IN_UNION_NOT_SUPPORTED": (
        Cell("live_united_with_itself", "update", "console", "realTime"),
        Cell("live_united", "update", "console", "realTime"),
    ),
    "STREAMING_REAL_TIME_MODE.INPUT_STREAM_NOT_SUPPORTED": (
        Cell("filtered", "update", "console", "realTime"),
        Cell("filtered", "update", "console", "availableNow"),
    ),
    "STREAMING_REAL_TIME_MODE.OPERATOR_OR_SINK_NOT_IN_ALLOWLIST": (
        Cell("live_in_python", "update", "console", "realTime"),
        Cell("live_in_python", "update", "console", "availableNow"),
    ),
    "STREAMING_REAL_TIME_MODE.OUTPUT_MODE_NOT_SUPPORTED": (
        Cell("live", "append", "console", "realTime"),
        Cell("live", "update", "console", "realTime"),
    ),
    "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED": (
        Cell("live_counts_united", "update", "console", "realTime"),
        Cell("live_counts_united", "update", "console", "availableNow"),
    ),
}

ELSEWHERE = {
    "PENSTOCK_EXCEPT_BATCH": (
        "checking/test_planner.py::test_one_watermark_and_a_left_anti_join_are_the_fixes"
    ),
    "PENSTOCK_CORRELATED_SUBQUERY": (
        "checking/test_planner.py::test_a_batch_that_is_aggregated_first_is_joined_once"
    ),
    "PENSTOCK_JOIN_WITHOUT_EQUALITY": (
        "checking/test_planner.py::test_a_filter_above_a_join_is_part_of_its_condition"
    ),
    "PENSTOCK_WATERMARK_REDEFINED": (
        "checking/test_planner.py::test_one_watermark_and_a_left_anti_join_are_the_fixes"
    ),
    "PENSTOCK_FUNCTION_NEEDS_PROTOBUF": (
        "test_without_protobuf.py::test_with_protobuf_installed_the_query_runs"
    ),
    "PENSTOCK_MAP_GROUPS_MODE": (
        "checking/test_jvm_plans.py::test_map_groups_with_state_in_update_mode_emits_changed_groups"
    ),
    "PENSTOCK_TABLE_REFUSES": (
        "checking/test_table_sinks.py::test_a_window_is_refused_as_key_but_not_its_start"
    ),
}
"""Problems that no query of this session has, and the tests of their fixes."""

UNTRIED = ("PENSTOCK_SINK_ONLY_ADDS",)
"""A problem of Kafka, whose package is not installed."""
