"""Simulated processes that take turns on one thread, in an order that a seed decides.

Every process is made of tasks, which are greenlets. A task runs until it reaches a step (a statement, an
operation on a file, a message) or has to wait; there the scheduler may choose another task, and may be asked
to do something to a process: pause, kill.
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
    """The decisions of a schedule: drawn from a seed, or replayed from those that were recorded.

    A decision is a number, and 0 is always the one that disturbs least. Only the others are recorded, by
    where they were made, so that a schedule is made simpler by leaving some of them out.

    Parameters
    ----------
    seed
        Where decisions that are not replayed come from.
    replayed
        What was recorded; None for a new schedule.
    """

    def __init__(self, seed: int, replayed: dict[str, int] | None = None) -> None:
        self._random = random.Random(seed)
        self._replayed = replayed
        self.made: dict[str, int] = {}

    def draw(self, where: str, count: int, chance: float = 1.0) -> int:
        """A number below ``count``; 0 unless something of this chance happens."""
        if self._replayed is not None:
            found = self._replayed.get(where, 0)
            found = found % count if count else 0
        else:
            drawn = self._random.random() < chance
            found = self._random.randrange(count) if drawn and count > 1 else 0
        if found:
            self.made[where] = found
        return found


class Gate:
    """What tasks wait at until somebody opens it for all of them."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Task] = []

    def open(self) -> None:
        for task in list(self.waiting):
            task.leave()


class Task:
    """One thread of a simulated process."""

    __slots__ = ("deadline", "done", "gates", "greenlet", "local", "name", "number", "process")

    def __init__(self, process: Process, work: Callable[[], Any], name: str, number: int) -> None:
        self.process, self.name, self.number = process, name, number
        self.gates: tuple[Gate, ...] = ()
        """Where it waits."""
        self.deadline: float | None = None
        """When it goes on although nobody has opened a gate."""
        self.done = False
        self.local: dict[str, Any] = {}
        """What Spark would tell the task of itself."""
        self.greenlet = greenlet(self._run(work), process.world.main)

    def leave(self) -> None:
        """Wait no more."""
        for gate in self.gates:
            gate.waiting.remove(self)
        self.gates, self.deadline = (), None

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
    """Tasks that live, stand still and die together."""

    def __init__(self, world: World, name: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.alive = True
        self.paused_until: float | None = None
        self.clock_offset = 0.0
        self.tasks: list[Task] = []
        self.held: dict[Any, Any] = {}
        """What the code keeps for a whole process, such as its open stores."""
        self.at_death: list[Callable[[], None]] = []
        """What the kernel does when the process ends: closes sockets, gives locks back."""

    @property
    def paused(self) -> bool:
        return self.paused_until is not None and self.paused_until > self.world.now

    def spawn(self, work: Callable[[], Any], name: str) -> Task:
        return self.world.add(Task(self, work, name, self.world.next_number()))

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more, not even what would clean up."""
        if not self.alive:
            return
        self.alive = False
        self.world.bury(self.tasks)
        for action in self.at_death:
            action()

    def __repr__(self) -> str:
        return f"{self.name}#{self.pid}"


@dataclass(frozen=True)
class Aim:
    """What happens to a task just when it comes to a step, before that step is done."""

    at: Callable[[Task, str], bool]
    action: Callable[[Task], None]


class World:
    """The scheduler."""

    def __init__(self, choices: Choices, *, switching: float = 0.2, trace: bool = False) -> None:
        self.choices, self.switching = choices, switching
        self.now = START
        self.steps = 0
        self.over = False
        self.processes: list[Process] = []
        self.trace: list[str] | None = [] if trace else None
        self.disturb: Callable[[], None] | None = None
        """Asked at every step, between two tasks."""
        self.aim: Aim | None = None
        """A step at which something is to happen."""
        self.finished: Callable[[], bool] = lambda: False
        self.failure: BaseException | None = None
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._tasks: list[Task] = []
        self._buried: list[Task] = []
        self._current: Task | None = None
        self._numbers = 0
        self.main = getcurrent()

    # What simulated code asks for.

    @property
    def task(self) -> Task:
        assert self._current is not None, "only tasks ask"
        return self._current

    @property
    def process(self) -> Process:
        return self.task.process

    @property
    def running(self) -> bool:
        """Whether the caller is a task of this world."""
        return self._current is not None

    def step(self, what: str) -> None:
        """A place where others may take their turn, and where the caller may be paused or killed."""
        if self.over:
            raise GreenletExit
        task = self._current
        if task is None:
            return
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now - START:9.3f} {task.process!r} {task.name}: {what}")
        aim = self.aim
        if aim is not None and aim.at(task, what):
            self.aim = None
            self._timers.append((self.now, lambda: aim.action(task)))
        self.main.switch()
        if self.over or not task.process.alive:
            raise GreenletExit

    def wait(self, *gates: Gate, seconds: float | None = None) -> bool:
        """Wait until one of the gates is opened; False when so many seconds have passed first."""
        task = self.task
        if seconds is not None and seconds <= 0:
            self.step("look")
            return False
        task.gates, task.deadline = gates, None if seconds is None else self.now + seconds
        for gate in gates:
            gate.waiting.append(task)
        self.main.switch()
        if self.over or not task.process.alive:
            raise GreenletExit
        opened = not task.gates
        task.leave()
        return opened

    def sleep(self, seconds: float) -> None:
        if self._current is not None:
            self.wait(Gate(), seconds=max(seconds, STEP_SECONDS))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """For what is done at one moment, in which nobody takes a turn, whoever asks for it."""
        current, self._current = self._current, None
        try:
            yield
        finally:
            self._current = current

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.steps:5} {self.now - START:9.3f} -- {what}")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something, between two tasks, when so many seconds have passed."""
        self._timers.append((self.now + seconds, action))

    # Processes and tasks.

    def start(self, name: str) -> Process:
        process = Process(self, name, 100 + len(self.processes))
        self.processes.append(process)
        return process

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def add(self, task: Task) -> Task:
        task.process.tasks.append(task)
        self._tasks.append(task)
        return task

    def bury(self, tasks: list[Task]) -> None:
        for task in tasks:
            task.leave()
        gone = set(map(id, tasks))
        self._tasks = [task for task in self._tasks if id(task) not in gone]
        # Collected now, their greenlets would run what they would have done at their end.
        self._buried += tasks

    # The loop.

    def run(self, most_steps: int) -> bool:
        """Run until it is finished; False when nothing goes on any more, or after so many steps."""
        while not self.finished():
            if self.steps >= most_steps or self.failure is not None:
                return False
            self.steps += 1
            self.now += STEP_SECONDS
            if self.disturb is not None:
                self.disturb()
            if self._timers:
                self._act()
            task = self._chosen()
            if task is None:
                return False
            self._current = task
            try:
                task.greenlet.switch()
            except Exception as error:
                # A task of ours that fails is an error of the simulation; what is simulated catches its own.
                self.failure = self.failure or error
                self.note(f"{task.name} failed: {error!r}")
                return False
            finally:
                self._current = None
            if task.done and task in self._tasks:
                self._tasks.remove(task)
        return True

    def _act(self) -> None:
        due = [timer for timer in self._timers if timer[0] <= self.now]
        for timer in due:
            self._timers.remove(timer)
            timer[1]()

    def _chosen(self) -> Task | None:
        while True:
            now = self.now
            ready = [
                task
                for task in self._tasks
                if (not task.gates or (task.deadline is not None and task.deadline <= now))
                and (task.process.paused_until is None or task.process.paused_until <= now)
            ]
            if ready:
                break
            later = self._next_moment()
            if later is None:
                return None
            self.now = max(self.now, later)
            self._act()
        last = self._last
        if last in ready:
            place = ready.index(last)
            ready = ready[place:] + ready[:place]
        choice = self.choices.draw(f"t{self.steps}", len(ready), self.switching) if len(ready) > 1 else 0
        self._last = ready[choice]
        return ready[choice]

    _last: Task | None = None

    def _next_moment(self) -> float | None:
        moments = [
            max(task.deadline or self.now, task.process.paused_until or 0.0)
            for task in self._tasks
            if not task.gates or task.deadline is not None
        ]
        moments += [timer[0] for timer in self._timers]
        return min(moments, default=None)

    def close(self) -> None:
        """End all greenlets: from here on everything simulated raises."""
        self.over = True
        for task in [*self._tasks, *self._buried]:
            if task.greenlet and not task.greenlet.dead:
                try:
                    task.greenlet.throw(GreenletExit)
                except BaseException:  # what cleans up may meet anything by now
                    continue
