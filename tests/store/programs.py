"""Programs that tests of the store run in separate processes: ``python -m tests.store.programs NAME
ARGUMENT…``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa

import penstock
from penstock.store.database import Transaction

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.002)


def open_at_once(url: str, go: str) -> None:
    """Open the store as soon as a file exists, at the same time as other processes; print the store's
    UUID.
    """
    print("ready", flush=True)
    wait_for(go)
    with penstock.connect(url, timeout=20) as store:
        print("uuid", store.uuid)


def without_psycopg(url: str) -> None:
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # this is how an import is made to fail
    try:
        penstock.connect(url)
    except ImportError as error:
        print(type(error).__name__, error)


def as_nobody(url: str) -> None:
    """Read and append as a user who has only the right to read the file."""
    import pwd

    store = penstock.connect(url, create=False)
    store.queue("q").read(0, 0)
    store.close()
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    store = penstock.connect(url, create=False)
    print("rows", store.queue("q").read(0, 0).num_rows)
    for what, work in (
        ("append", lambda: store.queue("q").append([{"n": 1}])),
        ("create", lambda: store.create_queue("r", SCHEMA)),
    ):
        try:
            work()
        except penstock.PenstockError as error:
            print(what, type(error).__name__, error)


def with_little_room(url: str, limit: str) -> None:
    """Append until the file size limit is reached; print what was appended and the error."""
    import resource

    store = penstock.connect(url)
    queue = store.create_queue("q", SCHEMA)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    table = pa.table({"n": range(2000), "s": [os.urandom(200).hex() for _ in range(2000)]}, schema=SCHEMA)
    done = 0
    try:
        while True:
            queue.append(table)
            done += 1
    except penstock.PenstockError as error:
        print("failed", type(error).__name__, error)
    print("appended", done)
    print("rows", queue.info().rows, queue.read(0, 0).num_rows)


def unrelated(store: penstock.Store, queue: penstock.Queue) -> penstock.Queue:
    """Create another queue. In a SQLite store, it must not share the queue's wakeup file."""
    from penstock.store.sqlite.wakeups import wakeup_file

    own = wakeup_file("", queue.record.queue_id)
    others = (store.create_queue(f"other{n}", SCHEMA) for n in itertools.count())
    return next(each for each in others if wakeup_file("", each.record.queue_id) != own)


def wakeups_of(url: str) -> None:
    """Print which appends wake the listeners of a queue in a SQLite store."""
    from penstock.store.sqlite import wakeups
    from penstock.store.sqlite.files import StoreFiles

    file = url.removeprefix("sqlite:///")
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        other = unrelated(store, queue)
        queue.append([{"n": 0}])
        print("files before anybody listens:", len(list(Path(file).parent.glob("*wakeup*"))))
        events = wakeups.listen(file, queue.record.queue_id, StoreFiles(file))
        assert events is not None

        def show(what: str) -> None:
            print(f"{what}: {'woken' if events.has_events() else 'silent'}")

        show("listening")
        for n in range(3):
            queue.append([{"n": n}])
            show("append")
            other.append([{"n": n}])
            show("append to another queue")
            queue.read(0, 0)
            show("read")
            try:
                store.create_queue("q", SCHEMA)
            except penstock.PenstockError as error:
                show(f"create the queue again: {type(error).__name__}")


def hold_owner(url: str, name: str) -> None:
    """Hold an owner lock until this process is killed."""
    store = penstock.connect(url, create=False)
    lock = store.database.owner_lock(name)
    print("held", lock.acquire(), flush=True)
    time.sleep(600)


def hold_owner_and_fork(url: str, name: str) -> None:
    """Hold an owner lock, and fork a child that keeps running without it."""
    store = penstock.connect(url, create=False)
    lock = store.database.owner_lock(name)
    held = lock.acquire()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print("held", held, child, flush=True)
    time.sleep(600)


def echo(url: str, rows: str) -> None:
    """As soon as one queue has a new row, append a row to the other queue."""
    with penstock.connect(url, create=False) as store:
        back = store.queue("back")
        with store.queue("q").watch() as watch:
            watch.wait({0: 0}, 0)
            print("ready", flush=True)
            for position in range(int(rows)):
                assert watch.wait({0: position}, 60).ends
                back.append([{"n": position}])


def append_many(url: str, writer: str, appends: str) -> None:
    """Append to the partitions of a queue, sometimes to all of them at once, and sometimes staged rows."""
    from penstock.store import staging
    from penstock.store.log.segmenting import to_segments

    with penstock.connect(url, create=False) as store:
        queue = store.queue("q")
        for n in range(int(appends)):
            if n % 3 == 0:
                queue.append([{"n": n}], n % queue.partitions)
            elif n % 3 == 1:
                queue.append([{"n": n}] * 2)
            else:
                attempt = staging.Attempt(writer, n, 0, "a")
                segments = [s for p in range(queue.partitions) for s in to_segments(_one_row(n), p)]
                with store.database.transaction() as tx:
                    staging.stage(tx, queue.record, attempt, segments, 0)
                with store.database.transaction() as tx:
                    staging.promote(tx, queue.record, writer, n, {"a": len(segments)})


def _one_row(n: int) -> pa.Table:
    return pa.table({"n": [n], "s": [None]}, schema=SCHEMA)


def stop_in_append(url: str, moment: str) -> None:
    """Append a row, and suspend this process in the middle of the first attempt."""
    attempts: list[int] = []

    def stop() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            _stop()

    with penstock.connect(url, create=False) as store:
        queue = store.queue("q")
        if moment == "before_commit":
            queue.append_with([{"n": 1}], hook=lambda tx, append: (append(), stop())[0])
        elif moment == "in_a_statement":
            queue.append_with([{"n": 1}], hook=lambda tx, append: (append(), _slow(tx, attempts))[0])
        else:
            queue.append_with([{"n": n} for n in range(12)], hook=lambda tx, append: (append(), stop())[0])
        print("appended after", len(attempts), flush=True)


def stop_in_plan(url: str) -> None:
    """Own the consumer `c`, and suspend this process while a transaction has locked its registration."""
    from penstock.commit.owner import Owner
    from penstock.errors import OwnerFencedError
    from penstock.store.records import consumers

    with penstock.connect(url, create=False) as store:
        owner = Owner(store.database, "c", "q")
        attempts: list[int] = []

        def work(tx: Transaction) -> int:
            registration = consumers.find_registration(tx, "c", "q", lock=True)
            attempts.append(registration.epoch)
            if len(attempts) == 1:
                _stop()
            if registration.epoch != owner.epoch:
                raise OwnerFencedError("another one has the consumer")
            return registration.epoch

        try:
            store.database.run(work, idempotent=True)
        except OwnerFencedError as error:
            print("fenced", attempts, error.condition, flush=True)


def stop_with_turn(url: str) -> None:
    """Suspend this process while a transaction has SQLite's write lock, then commit."""
    with penstock.connect(url, create=False) as store:
        store.queue("q").append_with([{"n": 1}], hook=lambda tx, append: (append(), _stop())[0])
        print("appended", flush=True)


def _slow(tx: Transaction, attempts: list[int]) -> None:
    attempts.append(1)
    if len(attempts) == 1:
        print("running", flush=True)
        tx.query("select pg_sleep(1)")


def _stop() -> None:
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
