"""Report of an output mode check: its problems, by mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import DOCS_URL, InvalidInputError, OutputModeRefusedError
from penstock.modes.checking.emits import Emits
from penstock.spark.internals.plan_text import Node

MODES = ("append", "update", "complete")
REFUSED, UNSAFE, WARNING = "refused", "unsafe", "warning"
DOCS = f"{DOCS_URL}modes/problems"
_CODES: dict[str, dict[str, str | None]] = {
    "aggregations": {
        "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK": "aggregations without watermark",
        "PENSTOCK_WATERMARK_NOT_IN_GROUPING": "aggregations without watermark",
        "PENSTOCK_EVENT_TIME_LOST": "aggregations without watermark",
        "PENSTOCK_SESSION_WINDOW_IN_UPDATE": "session window",
        "PENSTOCK_SESSIONS_OF_ALL_ROWS": None,
        "PENSTOCK_DISTINCT_AGGREGATE": "Distinct aggregations",
        "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION": "no streaming aggregations",
        "PENSTOCK_STATEFUL_AFTER_STATEFUL": "Detected pattern",
        "PENSTOCK_LAST_GROUP_STAYS": None,
        "PENSTOCK_PYTHON_AGGREGATE": None,
        "PENSTOCK_SUBTOTALS_OVER_TIME": None,
        "PENSTOCK_ROCKSDB_CHAIN": None,
        "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING": "NON_TIME_WINDOW",
    },
    "state-and-watermarks": {
        "PENSTOCK_STATE_FOR_EVER": None,
        "PENSTOCK_STATE_FOR_EACH_KEY": None,
        "PENSTOCK_WATERMARK_POLICY_MIN": None,
        "PENSTOCK_WATERMARK_POLICY_MAX": None,
        "PENSTOCK_WATERMARK_REDEFINED": None,
        "PENSTOCK_SEVERAL_EVENT_TIMES": None,
    },
    "deduplication": {
        "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK": "dropDuplicatesWithinWatermark is not",
        "PENSTOCK_DEDUPLICATION_OF_RESULTS": None,
    },
    "joins": {
        "PENSTOCK_JOIN_STATE_FOR_EVER": None,
        "PENSTOCK_OUTER_JOIN_WITHOUT_TIME": "without a watermark in the join keys",
        "PENSTOCK_OUTER_ROWS_NEVER_COME": None,
        "PENSTOCK_JOIN_MODE": "output mode, only in",
        "PENSTOCK_JOIN_WITHOUT_EQUALITY": None,
        "PENSTOCK_CORRELATED_SUBQUERY": None,
        "PENSTOCK_ANTI_JOIN": "LeftAnti join",
        "PENSTOCK_JOIN_WITH_BATCH": "static DataFrame",
    },
    "set-operations": {
        "PENSTOCK_UNION_WITH_BATCH": "Union between",
        "PENSTOCK_EXCEPT_STREAM": "Except on",
        "PENSTOCK_EXCEPT_BATCH": None,
        "PENSTOCK_INTERSECT": "Intersect of",
        "PENSTOCK_ROWS_BESIDE_GROUPS": None,
    },
    "sorting-and-limits": {
        "PENSTOCK_SORT": "Sorting is not",
        "PENSTOCK_LIMIT_IN_UPDATE": "Limits are not",
        "PENSTOCK_OFFSET": "Offset is not",
        "PENSTOCK_TAIL": None,
        "PENSTOCK_SAMPLE": "Sampling is not",
        "PENSTOCK_EXPRESSION": "Expression(s)",
    },
    "stateful-functions": {
        "PENSTOCK_FUNCTION_MODE": "output mode on a streaming",
        "PENSTOCK_FUNCTION_MODE_DIFFERS": None,
        "PENSTOCK_FUNCTION_TIMEOUT_WITHOUT_WATERMARK": "Watermark must be specified",
        "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION": "with aggregation on a streaming",
        "PENSTOCK_FUNCTION_AFTER_AGGREGATION": "aggregation on a streaming",
        "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS": "Multiple ",
        "PENSTOCK_MAP_GROUPS_MODE": "mapGroupsWithState is not",
        "PENSTOCK_FUNCTION_NEEDS_ROCKSDB": None,
        "PENSTOCK_FUNCTION_NEEDS_PROTOBUF": None,
    },
    "sinks": {
        "PENSTOCK_SINK_MODE": None,
        "STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE": None,
        "PENSTOCK_NO_SINK": None,
        "PENSTOCK_SINK_REPEATS": None,
        "PENSTOCK_SINK_HAS_TO_REPLACE": None,
        "PENSTOCK_SINK_ONLY_ADDS": None,
        "PENSTOCK_TABLE_REFUSES": None,
    },
    "continuous-trigger": {
        "PENSTOCK_NOT_CONTINUOUS": "Continuous processing does not support",
        "PENSTOCK_CONTINUOUS_NOW": "current time",
        "PENSTOCK_SOURCE_NOT_CONTINUOUS": None,
        "PENSTOCK_SINK_NOT_CONTINUOUS": None,
        "PENSTOCK_ROWS_LOST_CONTINUOUS": None,
    },
    "real-time-trigger": {
        "STREAMING_REAL_TIME_MODE.OUTPUT_MODE_NOT_SUPPORTED": "The output mode",
        "STREAMING_REAL_TIME_MODE.INPUT_STREAM_NOT_SUPPORTED": None,
        "STREAMING_REAL_TIME_MODE.OPERATOR_OR_SINK_NOT_IN_ALLOWLIST": None,
        "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED": "before a union",
        "STREAMING_REAL_TIME_MODE.IDENTICAL_SOURCES_IN_UNION_NOT_SUPPORTED": None,
        "PENSTOCK_REAL_TIME_BROADCAST": None,
    },
    "unchecked": {
        "PENSTOCK_NOT_STREAMING": "without streaming sources",
        "PENSTOCK_NOT_PLANNED": None,
        "PENSTOCK_REFUSED_BY_SPARK": None,
    },
}
"""The codes by the page of the documentation that describes them.

Each has the text that identifies the problem in a message of Spark's checker (4.2, 4.3), where several
problems share one condition. It is None for a problem that the checker does not report.
"""
_PAGE_OF = {code: page for page, codes in _CODES.items() for code in codes}
_SPARK_TEXT_OF = {code: text for codes in _CODES.values() for code, text in codes.items()}
_INDENT = " " * 6


@dataclass(frozen=True)
class Problem:
    """One problem of a query in an output mode."""

    code: str
    """A stable name: Spark's condition if it is specific, otherwise Penstock's."""
    message: str
    """What is wrong, in one sentence."""
    severity: str = REFUSED
    """``refused`` (Spark does not start the query), ``unsafe`` (rows may be lost or repeated, or state grows
    forever) or ``warning``.
    """
    operator: str | None = None
    """The operator of the plan that has the problem."""
    line: str | None = None
    """The operator's line of the analysed plan."""
    fix: str | None = None
    """What to change, in code."""
    spark: str | None = None
    """Spark's own message, if Spark reports this problem."""
    condition: str | None = None
    """Spark's error condition, or Penstock's if a pipeline would not start; problems may share one."""
    source: str | None = None
    """The source code from which the rule is known, if no test runs it."""

    @classmethod
    def at(
        cls,
        node: Node,
        code: str,
        message: str,
        severity: str = REFUSED,
        *,
        fix: str | None = None,
        condition: str | None = None,
    ) -> Problem:
        """Return a problem of one of the plan's operators."""
        return cls(code, message, severity, node.name, node.line, fix, condition=condition)

    @property
    def page(self) -> str:
        """The problem's section in the documentation."""
        code = self.code if self.code in _PAGE_OF else "PENSTOCK_REFUSED_BY_SPARK"
        return f"{DOCS}/{_PAGE_OF[code]}/#{code.lower().replace('.', '')}"

    def lines(self) -> Iterator[str]:
        """Format the problem."""
        yield f"  {self.severity}: {self.message} [{self.code}]"
        if self.line:
            yield f"{_INDENT}at   {self.line}"
        if self.fix:
            yield f"{_INDENT}fix  {self.fix}"
        if self.source:
            yield f"{_INDENT}from {self.source}"
        yield f"{_INDENT}see  {self.page}"


@dataclass(frozen=True)
class ModeReport:
    """The result of the check for one output mode."""

    mode: str
    problems: tuple[Problem, ...]
    emits: Emits | None
    """The query's output, if Spark starts the query."""

    @property
    def allowed(self) -> bool:
        """Whether Spark would start the query."""
        return not any(problem.severity == REFUSED for problem in self.problems)

    @property
    def safe(self) -> bool:
        """Whether the mode is allowed, and no known problem loses or repeats rows or keeps state forever."""
        return all(problem.severity == WARNING for problem in self.problems)

    def lines(self) -> Iterator[str]:
        """Format the report."""
        verdict = "allowed" if self.safe else "allowed, not safe" if self.allowed else "refused"
        yield f"{self.mode}: {verdict}"
        if self.emits is not None:
            yield f"  {self.emits}"
        for problem in self.problems:
            yield from problem.lines()


@dataclass(frozen=True)
class Report:
    """The result of the check for each output mode, such as ``report["append"]``."""

    modes: tuple[ModeReport, ...]
    not_run: tuple[str, ...] = ()
    """Rules that cannot be checked in this session."""
    sink: str | None = None
    trigger: str = "processing time"
    source: str | None = None
    """The source code from which the sink is known; None for a sink to which the tests write."""

    def __getitem__(self, mode: str) -> ModeReport:
        for report in self.modes:
            if report.mode == str(mode).lower():
                return report
        raise InvalidInputError(
            f"an output mode is one of {', '.join(MODES)}, not "
            f"{in_quotes(mode)}.{did_you_mean(str(mode), MODES)}"
        )

    def __str__(self) -> str:
        lines = [line for mode in self.modes for line in mode.lines()]
        lines += [] if self.source is None else [f"the sink {self.sink} is known from {self.source}"]
        return "\n".join([*lines, *(f"not checked: {rule}" for rule in self.not_run)])

    def require(self, mode: str) -> None:
        """Raise unless a mode is allowed and safe.

        Raises
        ------
        OutputModeRefusedError
            With the mode's report.
        """
        report = self[mode]
        if report.safe:
            return
        safe_modes = [other.mode for other in self.modes if other.safe]
        alternatives = [f"output mode {' or '.join(safe_modes)} has no such problem"] if safe_modes else []
        alternatives += ["check=False starts it anyway"] if report.allowed else []
        verdict = "not safe" if report.allowed else "not allowed"
        message = f"output mode {report.mode} is {verdict} for this query: {first_problem(report).message}"
        raise refusal(report, f"{message} ({'; '.join(alternatives)})" if alternatives else message)


def spark_reports(problem: Problem, message: str) -> bool:
    """Return whether a message of Spark's checker is about a problem."""
    spark_text = _SPARK_TEXT_OF.get(problem.code)
    return spark_text is not None and spark_text.lower() in message.lower()


def first_problem(report: ModeReport) -> Problem:
    """Return the first problem that is not only a warning."""
    return next(problem for problem in report.problems if problem.severity != WARNING)


def refusal(report: ModeReport, message: str) -> OutputModeRefusedError:
    """Return the error for a mode that its report refuses; the report follows the message."""
    return OutputModeRefusedError(
        "\n".join([message, *report.lines()]),
        mode=report.mode,
        problems=[problem.code for problem in report.problems],
        page=first_problem(report).page,
    )
