"""What disturbs a query: its processes, servers and runs here, its data in ``data_moves``.

Each is called between two tasks, with random numbers of its own.
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
    advance,
    foreign,
    grow_sink,
    grow_source,
    lose_checkpoint,
    maintain,
    recreate_sink,
    recreate_source,
    restore,
    restore_checkpoint,
    seek,
    take_backup,
    trim,
    widen_columns,
)
from tests.simulation.objects import ORPHAN_SECONDS
from tests.simulation.operator import Operator
from tests.simulation.scenario import DIVISIONS, Division
from tests.simulation.scheduler import Aim, Process, Task

Move = Callable[[Operator, random.Random], None]


# Processes.


def pause(op: Operator, rng: random.Random) -> None:
    found = op.some_driver(rng)
    if found is not None:
        op.stand_still(found[0], rng.choice([0.3, 4.0, 6.0, 9.0, 25.0]))


def pause_executors(op: Operator, rng: random.Random) -> None:
    found = op.some_driver(rng)
    if found is not None:
        op.stand_still(found[1].executors, rng.choice([0.3, 4.0, 9.0, 25.0]))


def crash(op: Operator, rng: random.Random) -> None:
    found = op.some_driver(rng)
    if found is not None:
        found[0].kill()


def cut_power(op: Operator, rng: random.Random) -> None:
    """The machine with the driver, the executors and the checkpoint goes off.

    What Spark wrote last may be gone.
    """
    op.kill_all()
    for server in {op.source, op.sink}:
        if not server.rows:
            # Its file is on that machine.
            op.lose_locks(server)
            server.crash()
    files = rng.randrange(4)
    if not (op.history.restored and op.scenario.two_stores):
        # Else only the checkpoint remembers what the restored store had.
        # Each micro-batch whose commit is gone runs again.
        op.machine.repeats += op.machine.disk.cut_power(files, f"{op.checkpoint}/commits/")
    op.may_begin_late()
    # The sink knows the offset of the last micro-batch only, and only a pipeline asks it; rows may be trimmed
    # that Spark plans anew.
    op.may_refuse |= {REWOUND, LOST}
    if op.scenario.guarantee == "idempotent" or not op.scenario.pipeline:
        op.may_refuse.add(OTHER_INPUT)
    if op.history.recreated:
        # The queue that was dropped had what the checkpoint has lost.
        op.may_refuse.add(CONFLICT)


def pause_producer(op: Operator, rng: random.Random) -> None:
    if op.producers:
        op.stand_still(rng.choice(op.producers).process, rng.choice([0.3, 4.0, 25.0]))


def restart_producer(op: Operator, rng: random.Random) -> None:
    """A producer has died, or only seems so; somebody else takes its session over."""
    if op.producers:
        producer = rng.choice(op.producers)
        _end(op, rng, producer.process)
        op.later(rng.choice([0.0, 1.0]), producer.restart)


def restart_program(op: Operator, rng: random.Random) -> None:
    if op.programs:
        _end(op, rng, rng.choice(op.programs).process)
        op.run_program()


def _end(op: Operator, rng: random.Random, process: Process) -> None:
    if rng.random() < 0.5:
        process.kill()
    else:
        op.stand_still(process, rng.choice([0.3, 4.0, 9.0]))


# A process at one step.

DRIVER, EXECUTORS, PRODUCER = "driver", "executors", "producer"

PLACES = (
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
_PUTS = ((EXECUTORS, "put"), (EXECUTORS, "put is done"), (PRODUCER, "put"))
FOLLOWING = {
    "": 1,
    "trim": 3,
    "seek": 3,
    "maintain": 2,
    "other_engine": 2,
    "lose_checkpoint": 2,
    "restore": 2,
    "recreate_source": 1,
    "grow_source": 1,
    "grow_sink": 2,
    "advance": 1,
    "change_options": 1,
    "foreign": 1,
    "add_columns": 1,
    "widen_columns": 1,
    "disconnect": 1,
    "lose_reply": 1,
    "stop": 1,
    "take_over": 1,
}
"""What may happen then, and how often of all times."""


def aim(op: Operator, rng: random.Random) -> None:
    """A process is killed, or stands still, just where it comes to a step.

    Something else happens then, before the query goes on.
    """
    who, what = rng.choice(PLACES + _PUTS * 2 if op.scenario.objects else PLACES)
    chances = {kind: chance for kind, chance in FOLLOWING.items() if kind in op.kinds or not kind}
    left, following = rng.randrange(4), rng.choices(*zip(*chances.items(), strict=True))[0]

    def at(task: Task, step: str) -> bool:
        nonlocal left
        if not (task.process.name.startswith(who) and step.startswith(what)):
            return False
        left -= 1
        return left < 0

    op.world.aim = Aim(at, lambda task: _hit(op, rng, who, task.process, following))


def _hit(op: Operator, rng: random.Random, who: str, process: Process, following: str) -> None:
    op.world.note(f"*** {process!r} is hit, and then: {following or 'nothing'}")
    if who == PRODUCER:
        _end(op, rng, process)
        for each in op.producers:
            if each.process is process:
                op.later(rng.choice([0.0, 1.0]), each.restart)
    elif rng.random() < 0.6:
        process.kill()
        op.halt(rng.choice([0.0, 2.0]))
    elif who == DRIVER and rng.random() < 0.3:
        cut_power(op, rng)
        op.halt(2.0)
    else:
        op.stand_still(process, rng.choice([4.0, 15.0, 40.0]))
    if op.scenario.objects and rng.random() < 0.5:
        # What stands still has written what is an orphan by then.
        op.later(ORPHAN_SECONDS + 1, lambda: maintain(op, rng))
    if following:
        MOVES[following](op, rng)


# Servers.


def disconnect(op: Operator, rng: random.Random) -> None:
    """A process loses its connections to a server, with the locks that they hold."""
    server = rng.choice([op.source, op.sink])
    found = op.some_driver(rng)
    if found is not None and server.rows:
        process = rng.choice([found[0], found[1].executors])
        server.break_all(lambda tx: tx.process is process)
        op.lose_locks(server, process)


def lose_reply(op: Operator, rng: random.Random) -> None:
    """Transactions in flight commit, and nobody gets the answer."""
    server = rng.choice([op.source, op.sink])
    if server.rows:
        for tx in server.open:
            tx.lose_reply = tx.write
            # Who may write rows twice tries again.
            op.machine.repeats += tx.write


def restart_server(op: Operator, rng: random.Random) -> None:
    """In good order, or by a failure of its machine."""
    server = rng.choice([op.source, op.sink])
    if server.rows:
        op.lose_locks(server)
        if rng.random() < 0.5:
            server.break_all(lambda tx: True)
        else:
            server.crash()


def clock(op: Operator, rng: random.Random) -> None:
    jump = rng.choice([-3600.0, -1.0, 60.0, 86400.0 * 400])
    op.clocks_jumped = True
    found = op.some_driver(rng)
    if rng.random() < 0.5 and found is not None:
        found[0].clock_offset += jump
    else:
        rng.choice([op.source, op.sink]).clock_offset += jump


# The query.


def take_over(op: Operator, rng: random.Random) -> None:
    """A rolling restart: the new query starts, and the old one is stopped once the new one runs.

    The old one may stand still until then, and the new one may be of the other engine.
    """
    old = op.current
    if old is None or not old[0].alive:
        return
    if rng.random() < 0.3:
        op.stand_still(old[0], rng.choice([2.0, 6.0]))
    if rng.random() < 0.3:
        other_engine(op, rng)
    op.start()
    op.later(rng.choice([0.0, 0.4, 2.0, 6.0]), lambda: old[1].stop())


def stop(op: Operator, rng: random.Random) -> None:
    """A stop that waits for the end of the micro-batch, mostly, and a start a while later.

    It may start on the other engine, or with a new checkpoint.
    """
    old = op.current
    if old is None or not old[0].alive or op.halted:
        return
    op.halted = True
    timeout, start_over = rng.choice([30.0, 30.0, 0.0]), rng.random() < 0.2

    def work() -> None:
        try:
            old[1].stop(timeout)
        finally:
            op.halted = False
        if start_over:
            lose_checkpoint(op, rng)

    if rng.random() < 0.5:
        other_engine(op, rng)
    op.later(0.0, work)


def other_engine(op: Operator, rng: random.Random) -> None:
    """For the next run."""
    op.switch_engine()


def change_options(op: Operator, rng: random.Random) -> None:
    """For the next run."""
    op.division = rng.choice([*DIVISIONS, Division(1, 100)])
    crash(op, rng)


def storage(op: Operator, rng: random.Random) -> None:
    """Object storage is away, or does what it is asked and answers that it has failed."""
    bucket = op.machine.bucket
    if rng.random() < 0.5:
        bucket.failing = rng.choice([1, 3, 40])
    else:
        bucket.lying = rng.choice([1, 1, 3])


MOVES: dict[str, Move] = {
    move.__name__: move
    for move in (
        pause,
        crash,
        pause_executors,
        cut_power,
        pause_producer,
        restart_producer,
        restart_program,
        aim,
        disconnect,
        lose_reply,
        restart_server,
        clock,
        take_over,
        stop,
        other_engine,
        change_options,
        grow_source,
        grow_sink,
        foreign,
        add_columns,
        widen_columns,
        recreate_sink,
        recreate_source,
        maintain,
        trim,
        advance,
        seek,
        lose_checkpoint,
        restore_checkpoint,
        take_backup,
        restore,
        storage,
    )
}
_OFTEN = {
    "aim": 12,
    "restart_server": 3,
    "restore": 3,
    "seek": 3,
    "take_backup": 2,
    "restore_checkpoint": 2,
    "lose_checkpoint": 2,
    "grow_source": 2,
    "grow_sink": 3,
    "foreign": 2,
}
_NEVER_ALONE = {"other_engine"}

KINDS = tuple(name for name in MOVES if name not in _NEVER_ALONE for _ in range(_OFTEN.get(name, 1)))
"""What is drawn from."""
