"""One schedule from a seed, the shortest one that fails the same way, and a report of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import condition_of
from tests.simulation.clients import Reader
from tests.simulation.moves import KINDS, MOVES
from tests.simulation.operator import Operator
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import START, Choices, World
from tests.simulation.virtual import Machine, use
from tests.support import auditor
from tests.support.auditor import History, Violation

MOST_STEPS = 60_000
MOST_MOVES = 6
SWARM = 5
"""Kinds of moves, besides ``aim``, where a schedule has only a few."""
AIMS = 2
"""How many times as often as each of them ``aim`` comes then."""
SPREAD = 500
"""Steps over which what disturbs is spread."""
QUIET_SECONDS = 240.0
"""After so long without a disturbance everything has to be where it belongs."""
REST_SECONDS = 20.0
"""For how long a query that says that it has nothing to do may be behind."""
AUDIT_STEPS, SOON_STEPS = 100, 20
"""Between two audits: as a rule, and when only the end is waited for."""
IDLE_STEPS = 50
"""After so many steps without a commit what disturbs next comes at once."""


@dataclass
class Failure:
    """What a schedule has broken."""

    kind: str
    text: str


@dataclass
class Outcome:
    """How a schedule has ended."""

    seed: int
    choices: dict[str, int]
    failure: Failure | None
    steps: int
    scenario: Scenario
    refused: str | None = None
    trace: list[str] = field(default_factory=list)


def run(seed: int, choices: dict[str, int] | None = None, *, trace: bool = False) -> Outcome:
    """Run one schedule.

    Parameters
    ----------
    seed
        Decides what ``choices`` does not.
    choices
        The decisions to replay; None for new ones.
    trace
        Whether every step is written down.
    """
    made = Choices(seed, choices)
    scenario = Scenario.drawn(made)
    switching = (0.02, 0.1, 0.3)[made.draw("switching", 3)]
    world = World(made, switching=switching, trace=trace)
    machine = Machine(world, seed)
    with use(machine):
        schedule = _Schedule(machine, scenario, made)
        failure = schedule.failure()
    refused = schedule.operator.refused
    return Outcome(
        seed,
        made.made,
        failure,
        world.steps,
        scenario,
        None if refused is None else f"{type(refused).__name__}: {refused}",
        world.trace or [],
    )


class _Schedule:
    """A scenario on a machine, with what disturbs it."""

    def __init__(self, machine: Machine, scenario: Scenario, choices: Choices) -> None:
        self._machine, self._world, self._scenario = machine, machine.world, scenario
        source = machine.server("one", rows=scenario.rows)
        sink = machine.server("two", rows=scenario.rows) if scenario.two_stores else source
        exactly = scenario.guarantee == "exactly_once"
        self.history = History(
            scenario.guarantee,
            ordered=exactly and scenario.sink != "table",
            keyed=scenario.sink == "keyed",
            one_store=source is sink,
        )
        self.operator = Operator(machine, scenario, self.history, source, sink)
        self._reader = Reader(machine, scenario, source, sink)
        self.operator.reader = self._reader.snapshot
        self.operator.kinds = MOVES.keys()
        self._servers = [source, sink]
        self._moves = sorted(self._drawn(choices))
        self._quiet_since: float | None = None
        self._unsafe_since: float | None = None
        self._audited = self._commits = -1
        self._changed_at = 0
        self._caught_up = False

    def _drawn(self, choices: Choices) -> Iterator[tuple[int, str, int]]:
        """Draw the moves; in half of the schedules from a few kinds, each as often as the others, which
        brings up rare combinations more often (swarm testing: Groce et al., ISSTA 2012).
        """
        swarm, kinds = choices.draw("swarm", 1 << 16, 0.5), KINDS
        if swarm:
            few = random.Random(swarm).sample(sorted(MOVES), SWARM)
            self.operator.kinds = set(few)
            kinds = (*(kind for kind in few if kind in KINDS), *["aim"] * AIMS)
        for number in range(choices.draw("moves", 1 + MOST_MOVES)):
            kind = choices.draw(f"m{number}", 1 + len(KINDS))
            if kind:
                step = choices.draw(f"m{number}.step", SPREAD)
                yield step, kinds[(kind - 1) % len(kinds)], choices.draw(f"m{number}.seed", 1 << 16)

    def failure(self) -> Failure | None:
        self.operator.prepare()
        self._world.disturb = self._disturb
        self._world.finished = lambda: self._caught_up or self.operator.refused is not None
        try:
            done = self._world.run(MOST_STEPS)
            if self._world.failure is not None:
                raise self._world.failure
            self._judge(done)
        except Violation as violation:
            return Failure(violation.kind, str(violation))
        except Exception as error:
            return Failure(type(error).__name__, f"{type(error).__name__}: {error}")
        return None

    def _disturb(self) -> None:
        steps, operator = self._world.steps, self.operator
        if not operator.prepared:
            return
        commits = self._servers[0].commits + self._servers[1].commits
        if commits != self._commits:
            self._commits, self._changed_at = commits, steps
        idle = steps - self._changed_at >= IDLE_STEPS
        # Nobody has to wait for what comes next, where nothing goes on.
        while self._moves and (self._moves[0][0] <= steps or idle):
            _, kind, seed = self._moves.pop(0)
            operator.disturb(MOVES[kind], seed)
            self._changed_at, idle = steps, False
        if self._quiet_since is None and not self._moves and not operator.producing:
            self._quiet_since, operator.quiet = self._world.now, True
            self._world.aim = None
        if steps % AUDIT_STEPS == 0 or (operator.quiet and steps % SOON_STEPS == 0):
            self._audit(commits)

    def _audit(self, commits: int) -> None:
        operator, world = self.operator, self._world
        if commits != self._audited:
            self._audited = commits
            self._seen = self._reader.snapshot()
            self.history.reruns = self._machine.repeats
            auditor.check(self.history, self._seen)
        if self._quiet_since is None:
            return
        open_ = self._open(operator.at_rest(self._seen.ends))
        if not open_:
            self._caught_up = True
        # Safe offsets follow an epoch after a while.
        self._unsafe_since = (self._unsafe_since or world.now) if "unsafe" in open_ else None
        for kind, (text, timeout) in open_.items():
            since = (
                max(self._quiet_since, self._unsafe_since or 0.0) if kind == "unsafe" else self._quiet_since
            )
            if world.now > since + timeout:
                raise Violation(kind, f"{timeout:.0f} s after the last disturbance {text}")

    def _open(self, rests: bool) -> dict[str, tuple[str, float]]:
        """What has to be different in the end: by what is wrong with it, and after how many seconds it is."""
        found, now, operator = {}, self._seen, self.operator
        missing = auditor.missing(self.history, now)
        if not rests:
            found["stuck"] = (
                f"rows {missing} are not in the sink, or the query does not know it",
                QUIET_SECONDS,
            )
        elif missing:
            found["lost"] = f"the query rests, and rows {missing} are not in the sink", REST_SECONDS
        elif operator.committed:
            if kept := auditor.unsafe(now):
                found["unsafe"] = (
                    f"rows of partitions {kept} are processed, and may not be trimmed",
                    REST_SECONDS,
                )
            if behind := auditor.behind(now):
                found["behind"] = (
                    f"the consumer is not at the end of partitions {behind}, and the query is",
                    REST_SECONDS,
                )
        # What a program had pulled when a backup came may have the numbers of other rows by now.
        if (
            operator.programs
            and not self.history.restored
            and (left := auditor.unprocessed(self.history, now))
        ):
            found["unprocessed"] = f"programs have not processed rows {left}", QUIET_SECONDS
        return found

    def _judge(self, done: bool) -> None:
        now = self._reader.snapshot(anew=True)
        self.history.reruns = self._machine.repeats
        auditor.check(self.history, now)
        if miscounted := self._reader.miscounted():
            raise Violation("accounts", f"other segments than they say: {', '.join(miscounted)}")
        refused = self.operator.refused
        if refused is not None:
            if not self.operator.allows(condition_of(refused)):
                raise Violation("refused", f"{type(refused).__name__}: {refused}")
            return
        if not done:
            late = self._world.now - START
            raise Violation(
                "stuck", f"after {self._world.steps} steps and {late:.0f} s nothing comes to its end"
            )
        if unknown := auditor.unknown(self.history, now):
            raise Violation("unknown", f"rows {unknown} are in the sink and were never appended")


def shortest(outcome: Outcome, tries: int = 600) -> Outcome:
    """The simplest schedule that fails in the same way, as far as so many tries find it."""
    assert outcome.failure is not None
    best = outcome
    size = max(1, len(best.choices) // 2)
    while tries > 0 and size >= 1:
        keys = sorted(best.choices)
        smaller = False
        for start in range(0, len(keys), size):
            left_out = set(keys[start : start + size])
            kept = {key: value for key, value in best.choices.items() if key not in left_out}
            tries -= 1
            found = run(outcome.seed, kept)
            if found.failure is not None and found.failure.kind == outcome.failure.kind:
                best, smaller = found, True
                break
            if tries <= 0:
                break
        if not smaller:
            size //= 2
    return best


def report_of(outcome: Outcome) -> str:
    """What a failure prints: the seed, the schedule to replay, and its steps."""
    assert outcome.failure is not None
    again = run(outcome.seed, outcome.choices, trace=True)
    lines = list(again.trace)
    return "\n".join(
        [
            f"seed {outcome.seed}: {outcome.failure.text}",
            f"{outcome.scenario}",
            f"replay: {json.dumps(outcome.choices, sort_keys=True)}",
            *lines,
        ]
    )


PART = 50
"""Schedules that a process of several runs at a time."""


@dataclass
class Part:
    """What some schedules have come to."""

    schedules: int
    steps: int
    failed: str | None
    """What the first failure prints."""


def run_part(first: int) -> Part:
    """Run schedules of consecutive seeds, up to the first that fails."""
    steps = 0
    for seed in range(first, first + PART):
        outcome = run(seed)
        steps += outcome.steps
        if outcome.failure is not None:
            return Part(seed - first + 1, steps, report_of(shortest(outcome)))
    return Part(PART, steps, None)
