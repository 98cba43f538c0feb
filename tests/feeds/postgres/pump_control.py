"""Control over the pumps of a history: chunks held up, deaths, lost replies and suspended processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import penstock
from penstock.feeds.postgres import following
from penstock.feeds.postgres.following import SlotFollower
from penstock.feeds.postgres.table_chunks import Chunk
from penstock.pump import appender, backfills, planning, pump, run
from penstock.pump.backfills import Backfills, BackfillStep, ChunkReader
from penstock.pump.run import PumpRun
from penstock.store.records import pumps
from tests.support.waiting import wait_until

DEATHS = ("append", "append", "appended", "appended", "chunk", "confirm", "state", "queues", "planned")
"""Where a pump may die: before or after an append, in a chunk, before a confirmation, before its state is
written, and after its queues are created or its plan is stored."""
_HELD_LOG_SECONDS = 0.005
_SELDOM_SECONDS = 0.5
_LONG_SECONDS = 1.0
"""Longer than a pump that runs takes for the next thing that it does."""
_QUICKLY = {
    (following, "_CHECK_SECONDS"): 0.02,
    (following, "_PART_BYTES"): 1 << 12,
    (following, "_PIECE_ROWS"): 11,
    (appender, "_CONFIRM_INTERVAL_SECONDS"): 0.0,
    (backfills, "_CHUNK_ROWS"): 5,
    (backfills, "_POLL_SECONDS"): 0.01,
    (backfills, "_SCHEMA_CHANGE_SECONDS"): 1.0,
    (backfills, "_CANCEL_SECONDS"): 0.02,
    (pump, "_STANDBY_SECONDS"): 0.02,
    (run, "_READ_TIMEOUT"): 0.02,
    (run, "_BACKFILL_READ_TIMEOUT"): 0.005,
    (run, "_REQUEST_CHECK_SECONDS"): 0.02,
    (run, "_HEARTBEAT_SECONDS"): 0.05,
    (run, "_MAX_PAUSE"): 0.02,
    (pumps, "ALIVE_SECONDS"): 0.3,
}
"""Small parts, small chunks and short waits."""


class Dies(Exception):
    """Stands for the death of a process."""


class RunningPump:
    """A pump in a thread."""

    def __init__(self, made: penstock.Pump) -> None:
        self.pump = made
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.pump.run()
        except BaseException as error:
            self.failure = error

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()

    def stop(self) -> None:
        self.pump.stop()
        self.thread.join(60)
        assert self.has_ended, "the pump does not stop"


class PumpControl:
    """What happens to the pumps of one history."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holds, self._permits, self._waiting, self._closing = False, 0, 0, 0
        self.holds_log = False
        """Whether the pumps receive nothing from the log."""
        self.death: tuple[str, int] | None = None
        """Where the pump dies next, and after how many times."""
        self.lost_replies = 0
        """How many appends from now on are done again, since their replies were lost."""
        self.chunk: Chunk | None = None
        """The chunk that is held up between its snapshot and its append."""
        self.meets_parts = False
        """Whether that chunk continues once the next transaction has come in part."""
        self.reached = 0
        """The position up to which the log was read."""
        self.reads = 0
        """How often the log was read, or would have been while it was held."""
        self.looks = 0
        """How often a backfill has looked which transactions are open."""
        self.completed: dict[tuple[str, str], int] = {}
        """The commits with which the first backfills of pumps and tables have ended."""
        self.comparisons = 0
        """How often a pump has compared the state of the publication, and read all of its tables."""
        self.suspended: RunningPump | None = None
        self._resumed = threading.Event()

    # Chunks.

    def hold(self) -> None:
        """Hold up chunks, before and after they are read."""
        with self._changed:
            self._holds, self._permits = True, 0

    def release(self, count: int | None = None) -> None:
        """Let chunks continue, that many times; for good, and also the log, with None."""
        with self._changed:
            self.holds_log &= count is not None
            self._permits += count or 0
            self._holds &= count is not None
            self._changed.notify_all()
            if count is not None:
                self._changed.wait_for(lambda: not self._permits or not self._holds, 0.1)

    def _pass(self, chunk: Chunk | None = None) -> None:
        with self._changed:
            self._waiting, self.chunk = self._waiting + 1, chunk
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits or self._closing or not self._holds, 60)
            self._waiting, self.chunk = self._waiting - 1, None
            self._permits = max(self._permits - 1, 0)
            self._changed.notify_all()

    def _read_chunk(self, read: Callable[..., Any], *given: Any) -> Any:
        self._pass()
        self._dies("chunk")
        chunk = read(*given)
        self._pass(chunk)
        return chunk

    def _close(self, close: Callable[..., None], reader: ChunkReader) -> None:
        with self._changed:
            self._closing += 1
            self._changed.notify_all()
        try:
            close(reader)
        finally:
            with self._changed:
                self._closing -= 1

    def await_snapshot(self, is_over: Callable[[], bool]) -> Chunk | None:
        """Have the next chunk read, and return it while it is held up; None if none comes."""
        self._await(lambda: bool(self._waiting), is_over)
        if self._waiting and self.chunk is None:
            with self._changed:
                self._permits += 1
                self._changed.notify_all()
            self._await(lambda: self.chunk is not None, is_over)
        return self.chunk

    def let_append(self) -> None:
        """Let the chunk continue that is held up before its append, if it still is."""
        with self._changed:
            if self.chunk is not None:
                self._permits += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.chunk is None, _LONG_SECONDS)

    def await_log(self, position: int, is_over: Callable[[], bool]) -> None:
        """Wait until the log is read up to a position."""
        self._await(lambda: self.reached >= position, is_over)

    def await_reads(self, is_over: Callable[[], bool]) -> None:
        """Let the pump do what it does while nothing comes."""
        before = self.reads
        self._await(lambda: self.reads >= before + 4, is_over)

    def await_looks(self, is_over: Callable[[], bool]) -> None:
        """Wait until a backfill has looked several times which transactions are open."""
        before = self.looks
        self._await(lambda: self.looks >= before + 4, is_over)

    def _await(self, condition: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        with suppress(AssertionError):
            wait_until(lambda: condition() or is_over(), _LONG_SECONDS, interval=0.003)

    def _read(self, read: Callable[..., Any], follower: SlotFollower, wait: float) -> Any:
        self.reads += 1
        if self.holds_log:
            self._resumed.wait(_HELD_LOG_SECONDS)
            return None
        step = read(follower, wait)
        self.reached = follower.reached
        if step is not None and step.place.part_version and self._waiting:
            # Chunks arrive between the parts of a transaction.
            if self.meets_parts:
                self.meets_parts = False
                self.let_append()
            elif self.chunk is None:
                self.release(2)
        return step

    def _look(self, look: Callable[..., Any], *given: Any) -> Any:
        self.looks += 1
        return look(*given)

    def _note(self, note: Callable[..., BackfillStep], backfills: Backfills, *given: Any) -> BackfillStep:
        step = note(backfills, *given)
        table = step.table
        if step.progress is None and not backfills.table_backfills[table].reread:
            # One whose append fails is read once more.
            self.completed[backfills._name, table] = step.step.place.version
        return step

    # Deaths, and replies that are lost.

    def _dies(self, place: str) -> None:
        is_pump = threading.current_thread() is not threading.main_thread()
        if is_pump and self.death is not None and self.death[0] == place:
            count = self.death[1]
            self.death = (place, count - 1) if count else None
            if not count:
                raise Dies(place)

    def _append(self, append: Callable[..., Any], *given: Any) -> Any:
        self._await_resumption()
        self._dies("append")
        appended = append(*given)
        if self.lost_replies:
            self.lost_replies -= 1
            appended = append(*given)
        self._dies("appended")
        return appended

    def _confirm(self, confirm: Callable[..., None], *given: Any) -> None:
        self._await_resumption()
        self._dies("confirm")
        confirm(*given)

    def _set_state(self, set_state: Callable[..., None], *given: Any) -> None:
        self._dies("state")
        set_state(*given)

    def _create_queues(self, create: Callable[..., None], *given: Any) -> None:
        create(*given)
        self._dies("queues")

    def _plan(self, plan: Callable[..., Any], planner: Any) -> Any:
        planned = plan(planner)
        self._dies("planned")
        return planned

    def _end(self, end: Callable[..., None], ended: PumpRun, tx: Any, failure: BaseException | None) -> None:
        if not isinstance(failure, Dies):
            end(ended, tx, failure)

    def _compare(self, compare: Callable[..., None], follower: SlotFollower) -> None:
        compare(follower)
        # One that has found new tables is the last of its session: the next one reads them.
        self.comparisons += not follower.has_new_tables

    # Suspended processes.

    def suspend(self, running: RunningPump) -> None:
        """Suspend a pump before its next append or confirmation, and its signs of life at once."""
        self._resumed.clear()
        self.suspended = running

    def _await_resumption(self) -> None:
        suspended = self.suspended
        if suspended is not None and threading.current_thread() is suspended.thread:
            assert self._resumed.wait(60)

    def resume(self) -> None:
        self.suspended = None
        self._resumed.set()

    def _sign(self, sign: Callable[..., bool], signing: PumpRun, tx: Any, unreported: Any) -> bool:
        suspended = self.suspended
        if suspended is not None and suspended.pump._stopping is signing.stopping:
            return True
        return sign(signing, tx, unreported=unreported)

    @contextmanager
    def applied(self, *, confirms_seldom: bool = False) -> Iterator[None]:
        """Control the pumps of this process; a position without rows may be stored seldom."""
        quickly = _QUICKLY | (
            {(appender, "_CONFIRM_INTERVAL_SECONDS"): _SELDOM_SECONDS} if confirms_seldom else {}
        )
        wrapped = (
            (backfills, "read_chunk", self._read_chunk),
            (backfills, "visible_now", self._look),
            (Backfills, "_record_progress", self._note),
            (ChunkReader, "close", self._close),
            (appender, "append_commits", self._append),
            (SlotFollower, "read", self._read),
            (SlotFollower, "confirm", self._confirm),
            (SlotFollower, "_compare", self._compare),
            (pumps, "set_pump_state", self._set_state),
            (planning, "create_queues", self._create_queues),
            (planning.Planner, "plan", self._plan),
            (PumpRun, "_record_end", self._end),
            (PumpRun, "_record_heartbeat", self._sign),
        )
        with ExitStack() as stack:
            for (owner, name), value in quickly.items():
                stack.enter_context(patch.object(owner, name, value))
            for owner, name, wrapper in wrapped:
                stack.enter_context(patch.object(owner, name, _wrapping(getattr(owner, name), wrapper)))
            yield


def _wrapping(wrapped: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        return wrapper(wrapped, *given, **named)

    return call
