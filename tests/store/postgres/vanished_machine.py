"""A program in its own network (``unshare --net``), which goes down while a session holds a lock.

It prints how many seconds later another session got the lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg

import penstock
from penstock.store.database import Transaction
from penstock.store.records.consumers import find_registration
from tests.store.programs import SCHEMA
from tests.support.postgres import PostgresServer, start_postgres

HELD = threading.Event()


def hold(store: penstock.Store, moment: str) -> None:
    """Lock a registration, and then stay in the middle of a statement, or of sending rows for one."""

    def work(tx: Transaction) -> None:
        find_registration(tx, "c", "q", lock=True)
        if moment == "statement":
            HELD.set()
            tx.query("select pg_sleep(300)")
        else:
            tx.execute("create temporary table numbers (n integer)")
            tx.load("copy numbers from stdin (format csv)", endless())

    store.database.run(work)


def endless() -> Iterator[bytes]:
    yield b"1\n"
    HELD.set()
    time.sleep(300)


def seconds_without_network(server: PostgresServer, folder: str, moment: str) -> float:
    address = urlsplit(server.url)
    local = f"host={folder} port={address.port} user=penstock password={address.password} dbname=postgres"
    with penstock.connect(f"{server.url}?schema=penstock", create=True) as store:
        store.create_queue("q", SCHEMA)
        store.create_consumer("c").register("q")
        # Unix sockets still work when the network is gone.
        with psycopg.connect(local) as other:
            threading.Thread(target=hold, args=(store, moment), daemon=True).start()
            assert HELD.wait(30)
            time.sleep(0.5)
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            began = time.monotonic()
            other.execute("select 1 from penstock.registration for update")
            return time.monotonic() - began


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    folder = tempfile.mkdtemp(prefix="penstock-socket-")
    os.chmod(folder, 0o777)
    server = start_postgres(unix_socket_directories=folder)
    try:
        print("SECONDS", seconds_without_network(server, folder, sys.argv[1]), flush=True)
    finally:
        server.stop()
        os._exit(0)


if __name__ == "__main__":
    main()
