"""Moves, which are the faults and operations that a schedule injects.

This module has the moves that affect processes, servers and runs; ``data_moves`` has those that change data.
The scheduler calls a move outside all tasks, with a random generator of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.data_moves import (
    CONFLICT,
    LOST,
    OTHER_INPUT,
    REWOUND,
    add_columns,
    advance_consumer,
    feed_sink,
    grow_sink,
    grow_source,
    lose_checkpoint,
    maintain_store,
    recreate_sink,
    recreate_source,
    restore_backup,
    restore_checkpoint,
    seek_consumer,
    take_backup,
    trim_source,
    widen_columns,
)
from tests.simulation.objects import ORPHAN_SECONDS
from tests.simulation.operator import Operator
from tests.simulation.scenario import TASK_LIMITS, TaskLimits
from tests.simulation.scheduler import Breakpoint, Process, Task

Move = Callable[[Operator, random.Random], None]


# Processes.


def pause_driver(op: Operator, rng: random.Random) -> None:
    driver = op.choose_driver(rng)
    if driver is not None:
        op.pause(driver.process, rng.choice([0.3, 4.0, 6.0, 9.0, 25.0]))


def pause_executors(op: Operator, rng: random.Random) -> None:
    driver = op.choose_driver(rng)
    if driver is not None:
        op.pause(driver.run.executors, rng.choice([0.3, 4.0, 9.0, 25.0]))


def crash_driver(op: Operator, rng: random.Random) -> None:
    driver = op.choose_driver(rng)
    if driver is not None:
        driver.process.kill()


def cut_power(op: Operator, rng: random.Random) -> None:
    """Cut the power of the machine that has the driver, the executors and the checkpoint."""
    op.kill_query()
    for server in {op.source, op.sink}:
        if not server.row_locks:
            # The SQLite file is on the same machine.
            op.release_owner_locks(server)
            server.crash()
    max_files = rng.randrange(4)
    if not (op.history.restored and op.scenario.two_stores):
        # After a restore with two stores, only the checkpoint knows what the restored store had, so keep it.
        # Each micro-batch whose commit is lost runs again.
        op.machine.reruns += op.machine.disk.lose_unsynced(max_files, f"{op.checkpoint}/commits/")
    op.allow_late_start()
    # The sink knows the offset of its last micro-batch only, and only a pipeline asks for it. Rows of
    # micro-batches that Spark plans again may have been trimmed.
    op.expected_conditions |= {REWOUND, LOST}
    if op.scenario.guarantee == "idempotent" or not op.scenario.pipeline:
        op.expected_conditions.add(OTHER_INPUT)
    if op.history.recreated:
        # The ledger of the dropped queue had the offsets that the checkpoint has lost.
        op.expected_conditions.add(CONFLICT)


def pause_producer(op: Operator, rng: random.Random) -> None:
    if op.producers:
        op.pause(rng.choice(op.producers).process, rng.choice([0.3, 4.0, 25.0]))


def restart_producer(op: Operator, rng: random.Random) -> None:
    """Kill or pause a producer and start another process that takes its session over."""
    if op.producers:
        producer = rng.choice(op.producers)
        _kill_or_pause(op, rng, producer.process)
        op.run_later(rng.choice([0.0, 1.0]), producer.restart)


def restart_program(op: Operator, rng: random.Random) -> None:
    """Kill or pause a program and start another one."""
    if op.programs:
        _kill_or_pause(op, rng, rng.choice(op.programs).process)
        op.start_program()


def _kill_or_pause(op: Operator, rng: random.Random, process: Process) -> None:
    if rng.random() < 0.5:
        process.kill()
    else:
        op.pause(process, rng.choice([0.3, 4.0, 9.0]))


# Faults at a chosen step.

DRIVER, EXECUTORS, PRODUCER = "driver", "executors", "producer"

BREAKPOINTS = (
    (DRIVER, "commit"),
    (DRIVER, "committed on"),
    (DRIVER, "committed on"),
    (DRIVER, "create"),
    (DRIVER, "create"),
    (DRIVER, "delete"),
    (DRIVER, "begin on"),
    (EXECUTORS, "commit"),
    (EXECUTORS, "committed on"),
    (EXECUTORS, "send"),
    (PRODUCER, "committed on"),
    (PRODUCER, "begin on"),
)
"""Where a breakpoint may stop: how the names of the process and of the step start.

A place that is listed twice is chosen twice as often.
"""
_STORAGE_BREAKPOINTS = ((EXECUTORS, "put"), (EXECUTORS, "put is done"), (PRODUCER, "put"))
FOLLOW_UP_WEIGHTS = {
    "": 1,
    "trim_source": 3,
    "seek_consumer": 3,
    "maintain_store": 2,
    "move_to_other_engine": 2,
    "lose_checkpoint": 2,
    "restore_backup": 2,
    "recreate_source": 1,
    "grow_source": 1,
    "grow_sink": 2,
    "advance_consumer": 1,
    "change_options": 1,
    "feed_sink": 1,
    "add_columns": 1,
    "widen_columns": 1,
    "disconnect": 1,
    "lose_replies": 1,
    "stop_query": 1,
    "take_over": 1,
}
"""The moves that may follow a fault at a breakpoint, with their relative frequencies. "" is no move."""


def arm_breakpoint(op: Operator, rng: random.Random) -> None:
    """Kill or pause a process when it reaches a chosen step, and then make another move.

    The breakpoint may skip up to three matching steps first.
    """
    process_name, label = rng.choice(
        BREAKPOINTS + _STORAGE_BREAKPOINTS * 2 if op.scenario.object_storage else BREAKPOINTS
    )
    weights = {
        name: weight for name, weight in FOLLOW_UP_WEIGHTS.items() if name in op.enabled_moves or not name
    }
    remaining, follow_up = rng.randrange(4), rng.choices(*zip(*weights.items(), strict=True))[0]

    def matches(task: Task, step: str) -> bool:
        nonlocal remaining
        if not (task.process.name.startswith(process_name) and step.startswith(label)):
            return False
        remaining -= 1
        return remaining < 0

    op.world.breakpoint = Breakpoint(
        matches, lambda task: _hit_breakpoint(op, rng, process_name, task.process, follow_up)
    )


def _hit_breakpoint(
    op: Operator, rng: random.Random, process_name: str, process: Process, follow_up: str
) -> None:
    op.world.note(f"*** {process!r} is at the breakpoint; next move: {follow_up or 'none'}")
    if process_name == PRODUCER:
        _kill_or_pause(op, rng, process)
        for producer in op.producers:
            if producer.process is process:
                op.run_later(rng.choice([0.0, 1.0]), producer.restart)
    elif rng.random() < 0.6:
        process.kill()
        op.suspend_starts(rng.choice([0.0, 2.0]))
    elif process_name == DRIVER and rng.random() < 0.3:
        cut_power(op, rng)
        op.suspend_starts(2.0)
    else:
        op.pause(process, rng.choice([4.0, 15.0, 40.0]))
    if op.scenario.object_storage and rng.random() < 0.5:
        # By then, the objects that a paused process has written count as orphans.
        op.run_later(ORPHAN_SECONDS + 1, lambda: maintain_store(op, rng))
    if follow_up:
        MOVES[follow_up](op, rng)


# Servers.


def disconnect(op: Operator, rng: random.Random) -> None:
    """Break the connections between a driver or its executors and a server, and release their owner locks."""
    server = rng.choice([op.source, op.sink])
    driver = op.choose_driver(rng)
    if driver is not None and server.row_locks:
        process = rng.choice([driver.process, driver.run.executors])
        server.break_connections(lambda tx: tx.process is process)
        op.release_owner_locks(server, process)


def lose_replies(op: Operator, rng: random.Random) -> None:
    """Let open transactions commit without a reply to their clients."""
    server = rng.choice([op.source, op.sink])
    if server.row_locks:
        for tx in server.transactions:
            tx.lose_reply = tx.write
            # With at-least-once, the client may write its rows again.
            op.machine.reruns += tx.write


def restart_server(op: Operator, rng: random.Random) -> None:
    """Restart a server, either cleanly or after a crash."""
    server = rng.choice([op.source, op.sink])
    if server.row_locks:
        op.release_owner_locks(server)
        if rng.random() < 0.5:
            server.break_connections(lambda tx: True)
        else:
            server.crash()


def change_system_clock(op: Operator, rng: random.Random) -> None:
    """Change the clock of a driver or of a server."""
    seconds = rng.choice([-3600.0, -1.0, 60.0, 86400.0 * 400])
    op.clocks_changed = True
    driver = op.choose_driver(rng)
    if rng.random() < 0.5 and driver is not None:
        driver.process.clock_offset += seconds
    else:
        rng.choice([op.source, op.sink]).clock_offset += seconds


# The query.


def take_over(op: Operator, rng: random.Random) -> None:
    """Start a second driver, possibly with the other engine, and stop the first one a little later.

    The first driver may be paused meanwhile.
    """
    old = op.current_driver
    if old is None or not old.process.alive:
        return
    if rng.random() < 0.3:
        op.pause(old.process, rng.choice([2.0, 6.0]))
    if rng.random() < 0.3:
        move_to_other_engine(op, rng)
    op.start_driver()
    op.run_later(rng.choice([0.0, 0.4, 2.0, 6.0]), lambda: old.run.stop())


def stop_query(op: Operator, rng: random.Random) -> None:
    """Stop the query, usually after its current micro-batch, and let it restart.

    It may restart with the other engine or with a new checkpoint.
    """
    old = op.current_driver
    if old is None or not old.process.alive or op.starts_suspended:
        return
    op.starts_suspended = True
    timeout, uses_new_checkpoint = rng.choice([30.0, 30.0, 0.0]), rng.random() < 0.2

    def work() -> None:
        try:
            old.run.stop(timeout)
        finally:
            op.starts_suspended = False
        if uses_new_checkpoint:
            lose_checkpoint(op, rng)

    if rng.random() < 0.5:
        move_to_other_engine(op, rng)
    op.run_later(0.0, work)


def move_to_other_engine(op: Operator, rng: random.Random) -> None:
    """Use the other engine for the next run."""
    op.switch_engine()


def change_options(op: Operator, rng: random.Random) -> None:
    """Change the options that split micro-batches into tasks, and crash a driver."""
    op.task_limits = rng.choice([*TASK_LIMITS, TaskLimits(1, 100)])
    crash_driver(op, rng)


def suffer_storage_errors(op: Operator, rng: random.Random) -> None:
    """Let the next requests to object storage fail, or take effect without a reply."""
    bucket = op.machine.bucket
    if rng.random() < 0.5:
        bucket.failing_requests = rng.choice([1, 3, 40])
    else:
        bucket.lost_replies = rng.choice([1, 1, 3])


MOVES: dict[str, Move] = {
    move.__name__: move
    for move in (
        pause_driver,
        crash_driver,
        pause_executors,
        cut_power,
        pause_producer,
        restart_producer,
        restart_program,
        arm_breakpoint,
        disconnect,
        lose_replies,
        restart_server,
        change_system_clock,
        take_over,
        stop_query,
        move_to_other_engine,
        change_options,
        grow_source,
        grow_sink,
        feed_sink,
        add_columns,
        widen_columns,
        recreate_sink,
        recreate_source,
        maintain_store,
        trim_source,
        advance_consumer,
        seek_consumer,
        lose_checkpoint,
        restore_checkpoint,
        take_backup,
        restore_backup,
        suffer_storage_errors,
    )
}
"""All moves by name. What a seed does depends on their order here and on the sorted order of the names."""

_WEIGHTS = {
    "arm_breakpoint": 12,
    "restart_server": 3,
    "restore_backup": 3,
    "seek_consumer": 3,
    "take_backup": 2,
    "restore_checkpoint": 2,
    "lose_checkpoint": 2,
    "grow_source": 2,
    "grow_sink": 3,
    "feed_sink": 2,
}
_ONLY_WITH_OTHERS = {"move_to_other_engine"}

WEIGHTED_MOVES = tuple(
    name for name in MOVES if name not in _ONLY_WITH_OTHERS for _ in range(_WEIGHTS.get(name, 1))
)
"""The names of the moves that a schedule draws from, each as often as its weight."""
