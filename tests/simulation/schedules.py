"""Running a schedule from a seed, shrinking a failed one, and reporting its failure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import condition_of
from tests.simulation.machine import Machine
from tests.simulation.moves import MOVES, WEIGHTED_MOVES
from tests.simulation.operator import Operator
from tests.simulation.patches import use
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import START, Choices, World
from tests.simulation.snapshots import SnapshotReader
from tests.support import auditor
from tests.support.auditor import History, Violation

MAX_STEPS = 60_000
MAX_MOVES = 6
SWARM_SIZE = 5
"""How many kinds of moves a schedule draws from with swarm testing, in addition to breakpoints."""
SWARM_BREAKPOINTS = 2
"""How often ``arm_breakpoint`` is drawn with swarm testing, relative to each of the other kinds."""
MOVE_STEPS = 500
"""The number of steps over which the moves are spread."""
CATCH_UP_SECONDS = 240.0
"""How soon after the last disturbance the query must have caught up."""
IDLE_SECONDS = 20.0
"""How long rows may be missing, or a consumer may lag, while the query reports that it is idle."""
AUDIT_STEPS, QUIET_AUDIT_STEPS = 100, 20
"""The number of steps between two audits, before and after the last disturbance."""
MAX_IDLE_STEPS = 50
"""The number of steps without a commit after which the next move is made early."""


@dataclass
class Failure:
    """Violation, or error of the simulation, that ended a schedule."""

    kind: str
    text: str


@dataclass
class Outcome:
    """Result of a schedule."""

    seed: int
    choices: dict[str, int]
    failure: Failure | None
    steps: int
    scenario: Scenario
    refusal: str | None = None
    """The error with which the query kept failing, as some moves allow."""
    trace: list[str] = field(default_factory=list)


def run(seed: int, choices: dict[str, int] | None = None, *, trace: bool = False) -> Outcome:
    """Run a schedule.

    Parameters
    ----------
    seed
        The seed of the decisions that are not replayed, and of everything else that is random, such as ids.
    choices
        The decisions to replay; None to draw new ones from the seed.
    trace
        Whether to record every step.
    """
    drawn = Choices(seed, choices)
    scenario = Scenario.draw(drawn)
    switch_probability = (0.02, 0.1, 0.3)[drawn.draw("switching", 3)]
    world = World(drawn, switch_probability=switch_probability, trace=trace)
    machine = Machine(world, seed)
    with use(machine):
        schedule = _Schedule(machine, scenario, drawn)
        failure = schedule.run()
    refusal = schedule.operator.refusal
    return Outcome(
        seed,
        drawn.recorded,
        failure,
        world.steps,
        scenario,
        None if refusal is None else f"{type(refusal).__name__}: {refusal}",
        world.trace or [],
    )


class _Schedule:
    """Scenario that runs on a machine, with its moves and audits."""

    def __init__(self, machine: Machine, scenario: Scenario, choices: Choices) -> None:
        self._machine, self._world, self._scenario = machine, machine.world, scenario
        source = machine.add_server("one", row_locks=scenario.row_locks)
        sink = machine.add_server("two", row_locks=scenario.row_locks) if scenario.two_stores else source
        self.history = History(
            scenario.guarantee,
            ordered=scenario.guarantee == "exactly_once" and scenario.sink != "table",
            keyed=scenario.sink == "keyed",
            one_store=source is sink,
        )
        self.operator = Operator(machine, scenario, self.history, source, sink)
        self._reader = SnapshotReader(machine, scenario, source, sink)
        self.operator.read_snapshot = self._reader.snapshot
        self.operator.enabled_moves = MOVES.keys()
        self._servers = [source, sink]
        self._moves = sorted(self._draw_moves(choices))
        """The step, name and seed of each remaining move."""
        self._quiet_since: float | None = None
        self._unsafe_since: float | None = None
        self._audited_commits = self._commits = -1
        self._last_change = 0
        self._caught_up = False

    def _draw_moves(self, choices: Choices) -> Iterator[tuple[int, str, int]]:
        """Draw the step, name and seed of each move.

        Half of the schedules use only a few kinds of moves, which makes rare combinations more frequent
        (swarm testing: Groce et al., ISSTA 2012).
        """
        swarm, names = choices.draw("swarm", 1 << 16, 0.5), WEIGHTED_MOVES
        if swarm:
            enabled = random.Random(swarm).sample(sorted(MOVES), SWARM_SIZE)
            self.operator.enabled_moves = set(enabled)
            names = (
                *(name for name in enabled if name in WEIGHTED_MOVES),
                *["arm_breakpoint"] * SWARM_BREAKPOINTS,
            )
        for number in range(choices.draw("moves", 1 + MAX_MOVES)):
            choice = choices.draw(f"m{number}", 1 + len(WEIGHTED_MOVES))
            if choice:
                step = choices.draw(f"m{number}.step", MOVE_STEPS)
                yield step, names[(choice - 1) % len(names)], choices.draw(f"m{number}.seed", 1 << 16)

    def run(self) -> Failure | None:
        """Run the schedule to its end."""
        self.operator.set_up()
        self._world.on_step = self._on_step
        self._world.is_finished = lambda: self._caught_up or self.operator.refusal is not None
        try:
            finished = self._world.run(MAX_STEPS)
            if self._world.failure is not None:
                raise self._world.failure
            self._check_end(finished)
        except Violation as violation:
            return Failure(violation.kind, str(violation))
        except Exception as error:
            return Failure(type(error).__name__, f"{type(error).__name__}: {error}")
        return None

    def _on_step(self) -> None:
        """Make the moves that are due, and audit now and then."""
        steps, operator = self._world.steps, self.operator
        if not operator.is_set_up:
            return
        commits = self._servers[0].commits + self._servers[1].commits
        if commits != self._commits:
            self._commits, self._last_change = commits, steps
        is_idle = steps - self._last_change >= MAX_IDLE_STEPS
        while self._moves and (self._moves[0][0] <= steps or is_idle):
            _, name, seed = self._moves.pop(0)
            operator.apply_move(MOVES[name], seed)
            self._last_change, is_idle = steps, False
        if self._quiet_since is None and not self._moves and not operator.is_producing:
            self._quiet_since, operator.quiet = self._world.now, True
            self._world.breakpoint = None
        if steps % AUDIT_STEPS == 0 or (operator.quiet and steps % QUIET_AUDIT_STEPS == 0):
            self._audit(commits)

    def _audit(self, commits: int) -> None:
        """Check the invariants after a commit, and the progress of the query after the last disturbance."""
        operator, world = self.operator, self._world
        if commits != self._audited_commits:
            self._audited_commits = commits
            self._snapshot = self._reader.snapshot()
            self.history.reruns = self._machine.reruns
            auditor.check_invariants(self.history, self._snapshot)
        if self._quiet_since is None:
            return
        unfinished = self._find_unfinished(operator.is_caught_up(self._snapshot.ends))
        if not unfinished:
            self._caught_up = True
        # Safe offsets follow an epoch after a while.
        self._unsafe_since = (self._unsafe_since or world.now) if "unsafe" in unfinished else None
        for kind, (text, timeout) in unfinished.items():
            since = (
                max(self._quiet_since, self._unsafe_since or 0.0) if kind == "unsafe" else self._quiet_since
            )
            if world.now > since + timeout:
                raise Violation(kind, f"{timeout:.0f} s after the last disturbance, {text}")

    def _find_unfinished(self, caught_up: bool) -> dict[str, tuple[str, float]]:
        """Return what the schedule still waits for by kind, and after how many seconds it is a violation."""
        unfinished, snapshot, operator = {}, self._snapshot, self.operator
        missing = auditor.missing_rows(self.history, snapshot)
        if not caught_up:
            unfinished["stuck"] = (
                f"the query has not caught up; rows {missing} are not in the sink",
                CATCH_UP_SECONDS,
            )
        elif missing:
            unfinished["lost"] = f"the query is idle, but rows {missing} are not in the sink", IDLE_SECONDS
        elif operator.has_committed:
            if unsafe := auditor.unsafe_partitions(snapshot):
                unfinished["unsafe"] = (
                    f"rows of partitions {unsafe} are processed but may not be trimmed",
                    IDLE_SECONDS,
                )
            if lagging := auditor.lagging_partitions(snapshot):
                unfinished["behind"] = (
                    f"the query is at the end of partitions {lagging}, but the consumer is not",
                    IDLE_SECONDS,
                )
        # After a restore, rows that a program had pulled may have the indexes of other rows.
        if (
            operator.programs
            and not self.history.restored
            and (unprocessed := auditor.unprocessed_rows(self.history, snapshot))
        ):
            unfinished["unprocessed"] = (
                f"programs have not processed rows {unprocessed}",
                CATCH_UP_SECONDS,
            )
        return unfinished

    def _check_end(self, finished: bool) -> None:
        """Check the final state, read without the cache."""
        snapshot = self._reader.snapshot(use_cache=False)
        self.history.reruns = self._machine.reruns
        auditor.check_invariants(self.history, snapshot)
        if miscounted := self._reader.miscounted_partitions():
            raise Violation("accounts", f"wrong counts of segments or bytes in {', '.join(miscounted)}")
        refusal = self.operator.refusal
        if refusal is not None:
            if not self.operator.is_expected(condition_of(refusal)):
                raise Violation("refused", f"{type(refusal).__name__}: {refusal}")
            return
        if not finished:
            seconds = self._world.now - START
            raise Violation(
                "stuck", f"the schedule has not ended after {self._world.steps} steps and {seconds:.0f} s"
            )
        if unknown := auditor.unknown_rows(self.history, snapshot):
            raise Violation("unknown", f"rows {unknown} are in the sink and were never appended")


def shrink(outcome: Outcome, max_runs: int = 600) -> Outcome:
    """Return the simplest schedule found in so many runs that fails with the same kind of failure."""
    assert outcome.failure is not None
    best = outcome
    size = max(1, len(best.choices) // 2)
    while max_runs > 0 and size >= 1:
        keys = sorted(best.choices)
        is_smaller = False
        for start in range(0, len(keys), size):
            removed = set(keys[start : start + size])
            remaining = {key: value for key, value in best.choices.items() if key not in removed}
            max_runs -= 1
            candidate = run(outcome.seed, remaining)
            if candidate.failure is not None and candidate.failure.kind == outcome.failure.kind:
                best, is_smaller = candidate, True
                break
            if max_runs <= 0:
                break
        if not is_smaller:
            size //= 2
    return best


def format_failure(outcome: Outcome) -> str:
    """Return a report of a failure: the seed, the scenario, the choices to replay, and the trace."""
    assert outcome.failure is not None
    replayed = run(outcome.seed, outcome.choices, trace=True)
    return "\n".join(
        [
            f"seed {outcome.seed}: {outcome.failure.text}",
            f"{outcome.scenario}",
            f"replay: {json.dumps(outcome.choices, sort_keys=True)}",
            *replayed.trace,
        ]
    )


PART_SIZE = 50
"""The number of schedules that a worker process runs at a time."""


@dataclass
class Part:
    """Result of some schedules with consecutive seeds."""

    schedules: int
    steps: int
    failure: str | None
    """The report of the first failure."""


def run_part(first_seed: int) -> Part:
    """Run schedules with consecutive seeds until one fails."""
    steps = 0
    for seed in range(first_seed, first_seed + PART_SIZE):
        outcome = run(seed)
        steps += outcome.steps
        if outcome.failure is not None:
            return Part(seed - first_seed + 1, steps, format_failure(shrink(outcome)))
    return Part(PART_SIZE, steps, None)
