"""Deterministic scheduler for simulated processes, driven by the random decisions of a seed.

A process consists of tasks, which are greenlets on one thread. A task runs until it reaches a step (a SQL
statement, a file operation, a message) or has to wait. The scheduler may then switch to another task, and
fault injection may pause or kill a process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

START = 1_700_000_000.0
STEP_SECONDS = 0.0005


class Choices:
    """Decisions of a schedule, either drawn from a seed or replayed from a record.

    A decision is a number, and 0 is always the least disruptive one. Only decisions other than 0 are
    recorded, under the name of the place that asked for them, so leaving some out gives a simpler schedule.

    Parameters
    ----------
    seed
        The seed of decisions that are not replayed.
    replayed
        The recorded decisions; None for a new schedule.
    """

    def __init__(self, seed: int, replayed: dict[str, int] | None = None) -> None:
        self._random = random.Random(seed)
        self._replayed = replayed
        self.recorded: dict[str, int] = {}

    def draw(self, where: str, count: int, chance: float = 1.0) -> int:
        """Return a random number below ``count`` with this probability, and 0 otherwise."""
        if self._replayed is not None:
            choice = self._replayed.get(where, 0)
            choice = choice % count if count else 0
        else:
            happens = self._random.random() < chance
            choice = self._random.randrange(count) if happens and count > 1 else 0
        if choice:
            self.recorded[where] = choice
        return choice


class Signal:
    """Wakes every task that waits for it."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Task] = []

    def notify_all(self) -> None:
        for task in list(self.waiting):
            task.wake()


class Task:
    """Thread of a simulated process."""

    __slots__ = ("deadline", "done", "greenlet", "name", "number", "process", "signals", "spark_properties")

    def __init__(self, process: Process, work: Callable[[], Any], name: str, number: int) -> None:
        self.process, self.name, self.number = process, name, number
        self.signals: tuple[Signal, ...] = ()
        """The signals that the task waits for."""
        self.deadline: float | None = None
        """When the task continues even without a signal."""
        self.done = False
        self.spark_properties: dict[str, Any] = {}
        """The partition and the local properties that Spark's TaskContext has for the task."""
        self.greenlet = greenlet(self._run(work), process.world.main)

    def wake(self) -> None:
        """Stop waiting."""
        for signal in self.signals:
            signal.waiting.remove(self)
        self.signals, self.deadline = (), None

    def _run(self, work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except GreenletExit:
                pass
            finally:
                self.done = True

        return run


class Process:
    """Tasks that are paused and killed together."""

    def __init__(self, world: World, name: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.alive = True
        self.paused_until: float | None = None
        self.clock_offset = 0.0
        self.tasks: list[Task] = []
        self.stores: dict[str, Any] = {}
        """The stores that the process has open, by URL."""
        self.on_exit: list[Callable[[], None]] = []
        """What the operating system does when the process ends, such as closing its sockets."""

    @property
    def paused(self) -> bool:
        return self.paused_until is not None and self.paused_until > self.world.now

    def spawn(self, work: Callable[[], Any], name: str) -> Task:
        return self.world.add_task(Task(self, work, name, self.world.next_number()))

    def kill(self) -> None:
        """Kill the process as SIGKILL does: no cleanup code runs."""
        if not self.alive:
            return
        self.alive = False
        self.world.stop_tasks(self.tasks)
        for action in self.on_exit:
            action()

    def __repr__(self) -> str:
        return f"{self.name}#{self.pid}"


@dataclass(frozen=True)
class Breakpoint:
    """Action that runs when a task reaches a matching step, before the step takes effect."""

    matches: Callable[[Task, str], bool]
    action: Callable[[Task], None]


class World:
    """Scheduler of all tasks, with a virtual clock.

    Parameters
    ----------
    choices
        Decides which task runs next.
    switch_probability
        How often the scheduler switches to another task although the current one could continue.
    trace
        Whether to record every step.
    """

    def __init__(self, choices: Choices, *, switch_probability: float = 0.2, trace: bool = False) -> None:
        self.choices, self.switch_probability = choices, switch_probability
        self.now = START
        self.steps = 0
        self.closed = False
        self.processes: list[Process] = []
        self.trace: list[str] | None = [] if trace else None
        self.on_step: Callable[[], None] | None = None
        """Called before every step, outside all tasks."""
        self.breakpoint: Breakpoint | None = None
        self.is_finished: Callable[[], bool] = lambda: False
        self.failure: BaseException | None = None
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._tasks: list[Task] = []
        self._stopped: list[Task] = []
        self._current: Task | None = None
        self._last: Task | None = None
        self._numbers = 0
        self.main = getcurrent()

    # Called by simulated code.

    @property
    def current_task(self) -> Task:
        assert self._current is not None, "no task is running"
        return self._current

    @property
    def current_process(self) -> Process:
        return self.current_task.process

    @property
    def in_task(self) -> bool:
        """Whether the caller runs inside a task."""
        return self._current is not None

    def step(self, label: str) -> None:
        """Let the scheduler switch tasks, or pause or kill the caller's process."""
        if self.closed:
            raise GreenletExit
        task = self._current
        if task is None:
            return
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now - START:9.3f} {task.process!r} {task.name}: {label}")
        stop = self.breakpoint
        if stop is not None and stop.matches(task, label):
            self.breakpoint = None
            self._timers.append((self.now, lambda: stop.action(task)))
        self.main.switch()
        if self.closed or not task.process.alive:
            raise GreenletExit

    def wait(self, *signals: Signal, seconds: float | None = None) -> bool:
        """Wait for one of the signals; return False when the time is up first."""
        task = self.current_task
        if seconds is not None and seconds <= 0:
            self.step("poll")
            return False
        task.signals, task.deadline = signals, None if seconds is None else self.now + seconds
        for signal in signals:
            signal.waiting.append(task)
        self.main.switch()
        if self.closed or not task.process.alive:
            raise GreenletExit
        notified = not task.signals
        task.wake()
        return notified

    def sleep(self, seconds: float) -> None:
        if self._current is not None:
            self.wait(Signal(), seconds=max(seconds, STEP_SECONDS))

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Run code atomically: no other task runs meanwhile."""
        current, self._current = self._current, None
        try:
            yield
        finally:
            self._current = current

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now - START:9.3f} -- {text}")

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call a function outside all tasks after some seconds."""
        self._timers.append((self.now + seconds, action))

    # Processes and tasks.

    def start_process(self, name: str) -> Process:
        process = Process(self, name, 100 + len(self.processes))
        self.processes.append(process)
        return process

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def add_task(self, task: Task) -> Task:
        task.process.tasks.append(task)
        self._tasks.append(task)
        return task

    def stop_tasks(self, tasks: list[Task]) -> None:
        """Never run these tasks again, not even their cleanup code."""
        for task in tasks:
            task.wake()
        stopped = set(map(id, tasks))
        self._tasks = [task for task in self._tasks if id(task) not in stopped]
        # A greenlet that is garbage collected runs its cleanup code, so keep them until the end.
        self._stopped += tasks

    # The loop.

    def run(self, max_steps: int) -> bool:
        """Run until the world is finished; return False when every task is stuck or the steps are used up."""
        while not self.is_finished():
            if self.steps >= max_steps or self.failure is not None:
                return False
            self.steps += 1
            self.now += STEP_SECONDS
            if self.on_step is not None:
                self.on_step()
            if self._timers:
                self._run_timers()
            task = self._choose_task()
            if task is None:
                return False
            self._current = task
            try:
                task.greenlet.switch()
            except Exception as error:
                # Simulated code catches its own errors, so this one is a bug of the simulation.
                self.failure = self.failure or error
                self.note(f"{task.name} failed: {error!r}")
                return False
            finally:
                self._current = None
            if task.done and task in self._tasks:
                self._tasks.remove(task)
        return True

    def _run_timers(self) -> None:
        due = [timer for timer in self._timers if timer[0] <= self.now]
        for timer in due:
            self._timers.remove(timer)
            timer[1]()

    def _choose_task(self) -> Task | None:
        """Choose a task that can run, after advancing the clock if there is none now."""
        while True:
            now = self.now
            ready = [
                task
                for task in self._tasks
                if (not task.signals or (task.deadline is not None and task.deadline <= now))
                and (task.process.paused_until is None or task.process.paused_until <= now)
            ]
            if ready:
                break
            next_event = self._next_event_time()
            if next_event is None:
                return None
            self.now = max(self.now, next_event)
            self._run_timers()
        last = self._last
        if last in ready:
            # Choice 0 continues the task that ran last.
            position = ready.index(last)
            ready = ready[position:] + ready[:position]
        several = len(ready) > 1
        choice = self.choices.draw(f"t{self.steps}", len(ready), self.switch_probability) if several else 0
        self._last = ready[choice]
        return ready[choice]

    def _next_event_time(self) -> float | None:
        times = [
            max(task.deadline or self.now, task.process.paused_until or 0.0)
            for task in self._tasks
            if not task.signals or task.deadline is not None
        ]
        times += [timer[0] for timer in self._timers]
        return min(times, default=None)

    def close(self) -> None:
        """End all greenlets. Simulated operations raise from here on."""
        self.closed = True
        for task in [*self._tasks, *self._stopped]:
            if task.greenlet and not task.greenlet.dead:
                try:
                    task.greenlet.throw(GreenletExit)
                except BaseException:  # cleanup code may fail in any way by now
                    continue
