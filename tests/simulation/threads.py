"""Replacements for the parts of ``threading`` and ``time`` that the code uses, on tasks and virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.scheduler import Signal, Task, World


class Clock:
    """Replacement for the module ``time``."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world().now

    def perf_counter(self) -> float:
        return self._world().now

    def time(self) -> float:
        world = self._world()
        return world.now + (world.current_process.clock_offset if world.in_task else 0.0)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        self._world().sleep(seconds)


class Threads:
    """Replacement for the module ``threading``."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world

    def Condition(self, lock: Any = None) -> Condition:  # as in threading
        return Condition(self._world())

    def Event(self) -> Event:
        return Event(self._world())

    def Lock(self) -> Lock:
        return Lock(self._world())

    def Thread(
        self,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> Thread:
        return Thread(self._world(), target, tuple(args), name)

    def current_thread(self) -> Any:
        return self._world().current_task


class Lock:
    """Reentrant lock between the tasks of a process."""

    def __init__(self, world: World) -> None:
        self._world, self._released = world, Signal()
        self._holder: Task | None = None
        self._depth = 0

    def acquire(self) -> bool:
        if not self._world.in_task:
            return True
        task = self._world.current_task
        while self._holder not in (None, task):
            self._world.wait(self._released)
        self._holder, self._depth = task, self._depth + 1
        return True

    def release(self) -> None:
        if self._holder is not None:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._released.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """Condition variable that always wakes every waiting task."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._notified = Signal()

    def notify_all(self) -> None:
        self._notified.notify_all()

    notify = notify_all

    def wait(self, timeout: float | None = None) -> bool:
        holder, depth = self._holder, self._depth
        self._holder, self._depth = None, 0
        self._released.notify_all()
        try:
            return self._world.wait(self._notified, seconds=timeout)
        finally:
            if not self._world.closed and holder is not None:
                while self._holder is not None:
                    self._world.wait(self._released)
                self._holder, self._depth = holder, depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            remaining = None if deadline is None else deadline - self._world.now
            if remaining is not None and remaining <= 0:
                return result
            self.wait(remaining)
        return result


class Event:
    def __init__(self, world: World) -> None:
        self._condition, self._set = Condition(world), False

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._set, timeout))


class Thread:
    def __init__(self, world: World, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self._world, self._work, self.name = world, lambda: target(*args), name
        self._ended = Event(world)
        self._task: Task | None = None

    def start(self) -> None:
        def run() -> None:
            try:
                self._work()
            finally:
                if not self._world.closed:
                    self._ended.set()

        self._task = self._world.current_process.spawn(run, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._ended.wait(timeout)
