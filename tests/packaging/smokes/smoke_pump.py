"""A pump of a publication, by the command line and by Python; the URL of the server is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psycopg
from asking import command, needs

import penstock
from penstock.errors import QueueNotFoundError, StoreNotFoundError

(server,) = sys.argv[1:]
NAME, STORE = f"smoke_{os.getpid()}", "sqlite:///pump.db"
FEED = f"{server}?publication={NAME}&slot={NAME}"


def wait(until: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not until():
        assert time.monotonic() < ends_at, "the pump has not appended everything in 60 s"
        time.sleep(0.05)


def changes(table: str) -> list[tuple[int, str]]:
    """The changes of a table that are in its queue, by commits; none while there is no queue."""
    try:
        with penstock.connect(STORE, create=False) as store:
            queue = store.queue(f"{NAME}.{table}")
            rows = [row for part in range(2) for row in queue.read(part, 0).to_pylist()]
    except (QueueNotFoundError, StoreNotFoundError):
        return []
    rows.sort(key=lambda row: (row["_commit_version"], row["_commit_sequence"]))
    return [(row["id"], row["_change_type"]) for row in rows]


source = psycopg.connect(server, autocommit=True)
source.execute(f"create schema {NAME}")
for table in ("orders", "items"):
    source.execute(f"create table {NAME}.{table} (id int primary key, price numeric(9, 2))")
    source.execute(f"insert into {NAME}.{table} select n, n / 4.0 from generate_series(1, 100) as n")
source.execute(f"create publication {NAME} for tables in schema {NAME}")

words = ["penstock", "--url", STORE, "pump", "run", FEED, "--partitions", "2"]
copied = [(number, "insert") for number in range(1, 101)]
with subprocess.Popen(words) as process:
    try:
        wait(lambda: sorted(changes("orders")) == sorted(changes("items")) == copied)
    finally:
        process.send_signal(signal.SIGTERM)
assert process.returncode == 0, process.returncode
(listed,) = json.loads(command("--url", STORE, "pump", "list", "--json"))["pumps"]
assert (listed["pump"], listed["state"]) == (NAME, "stopped"), listed

with source.transaction():
    source.execute(f"update {NAME}.orders set price = 0 where id = 7")
    source.execute(f"delete from {NAME}.items where id = 8")
pump = penstock.Pump(FEED, STORE)
thread = threading.Thread(target=pump.run)
thread.start()
try:
    wait(lambda: len(changes("orders")) == len(changes("items")) == 101)
finally:
    pump.stop()
    thread.join(60)
assert changes("orders")[100:] == [(7, "update_postimage")]
assert changes("items")[100:] == [(8, "delete")]
commits = [
    list(penstock.QueueFeed(f"{NAME}.{table}", STORE).open().commits(-1, 2**62))
    for table in ("orders", "items")
]
assert [[commit.rows for commit in of_table] for of_table in commits] == [[100, 1], [100, 1]]
assert commits[0][1].version == commits[1][1].version
needs("spark", lambda: penstock.changes.read)

source.execute(f"select pg_drop_replication_slot('{NAME}')")
source.execute(f"drop publication {NAME}")
source.execute(f"drop schema {NAME} cascade")
source.close()
