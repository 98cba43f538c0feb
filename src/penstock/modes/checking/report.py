"""What a check of output modes says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInput, OutputModeRefused
from penstock.modes.checking.emits import Emits
from penstock.spark.internals.plan_text import Node

MODES = ("append", "update", "complete")
REFUSED, UNSAFE, WARNING = "refused", "unsafe", "warning"
DOCS = "docs/modes/problems"
_UNDER = " " * 6


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a query in an output mode."""

    code: str
    """A stable name: Spark's condition where that says what it is, else Penstock's."""
    message: str
    """What is wrong, in one sentence."""
    severity: str = REFUSED
    """``refused`` (Spark does not start the query), ``unsafe`` (rows may be lost or repeated, or state grows for ever) or
    ``warning``."""
    operator: str | None = None
    """The plan's operator that it is about."""
    line: str | None = None
    """The operator's line of the analysed plan."""
    fix: str | None = None
    """What to change, in code."""
    spark: str | None = None
    """Spark's own message, where this is the problem that Spark tells."""
    condition: str | None = None
    """The name of Spark's error condition, or of Penstock's for what a pipeline's start refuses; several problems may share one."""
    source: str | None = None
    """What the rule was read from, where it could not be tried."""

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
        """A problem of one of the plan's operators."""
        return cls(code, message, severity, node.name, node.line, fix, condition=condition)

    @property
    def page(self) -> str:
        """Where the docs tell more."""
        return f"{DOCS}/{self.code.lower().replace('.', '-')}.md"

    def lines(self) -> Iterator[str]:
        """The problem as text."""
        yield f"  {self.severity}: {self.message} [{self.code}]"
        if self.line:
            yield f"{_UNDER}at   {self.line}"
        if self.fix:
            yield f"{_UNDER}fix  {self.fix}"
        if self.source:
            yield f"{_UNDER}from {self.source}"


@dataclass(frozen=True)
class ModeReport:
    """What a query does in one output mode."""

    mode: str
    problems: tuple[Problem, ...]
    emits: Emits | None
    """What comes out, where Spark starts the query."""

    @property
    def allowed(self) -> bool:
        """Whether Spark would start the query."""
        return not any(problem.severity == REFUSED for problem in self.problems)

    @property
    def safe(self) -> bool:
        """Whether it is allowed, and nothing is known that loses or repeats rows or keeps state for ever."""
        return all(problem.severity == WARNING for problem in self.problems)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        verdict = "allowed" if self.safe else "allowed, not safe" if self.allowed else "refused"
        yield f"{self.mode}: {verdict}"
        if self.emits is not None:
            yield f"  {self.emits}"
        for problem in self.problems:
            yield from problem.lines()


@dataclass(frozen=True)
class Report:
    """What a query does in each output mode; ``report["append"]`` is that of one."""

    modes: tuple[ModeReport, ...]
    not_run: tuple[str, ...] = ()
    """Rules that this session gives no means for."""
    sink: str | None = None
    trigger: str = "processing time"
    source: str | None = None
    """What was read to know the sink, where it could not be tried; None of a sink that the tests write to."""

    def __getitem__(self, mode: str) -> ModeReport:
        for found in self.modes:
            if found.mode == str(mode).lower():
                return found
        raise InvalidInput(
            f"an output mode is one of {', '.join(MODES)}, not {in_quotes(mode)}.{did_you_mean(str(mode), MODES)}"
        )

    def __str__(self) -> str:
        lines = [line for mode in self.modes for line in mode.lines()]
        lines += [] if self.source is None else [f"the sink {self.sink} is known from {self.source}"]
        return "\n".join([*lines, *(f"not looked at: {rule}" for rule in self.not_run)])

    def require(self, mode: str) -> None:
        """Raise unless a mode is allowed and safe.

        Raises
        ------
        OutputModeRefused
            With the mode's report.
        """
        found = self[mode]
        if found.safe:
            return
        first = next(problem for problem in found.problems if problem.severity != WARNING)
        usable = [each.mode for each in self.modes if each.safe]
        ways = f"output mode {' or '.join(usable)} has no such problem; " if usable else ""
        raise OutputModeRefused(
            f"output mode {found.mode} is {'not safe' if found.allowed else 'not allowed'} for this query: {first.message} "
            f"({ways}check=False starts it all the same)\n" + "\n".join(found.lines()),
            mode=found.mode,
            problems=[problem.code for problem in found.problems],
        )
