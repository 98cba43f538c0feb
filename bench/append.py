"""Appends to queues, compared with an Arrow IPC file (SQLite) and a raw binary COPY (PostgreSQL).

The peers write the same compressed batches.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pyarrow as pa

import penstock
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch, speed, timed
from penstock.arrow.segments import encode
from penstock.store.log.segmenting import SEGMENT_ROWS
from penstock.testing.stores import drop_schema, with_schema

# A commit in WAL mode syncs the log once. The checkpoint syncs the log again, and then the database.
FSYNCS = 3


def sqlite() -> Result:
    with scratch() as folder:
        return speed(
            "append 2M rows, SQLite / Arrow IPC file",
            lambda: _append_to_sqlite(folder),
            lambda: _write_ipc_file(folder),
            least=0.5,
        )


def _append_to_sqlite(folder: Path) -> float:
    for file in folder.glob("store.db*"):
        file.unlink() if file.is_file() else None
    store = penstock.connect(f"sqlite:///{folder}/store.db")
    queue = store.create_queue("bench", SCHEMA)
    table = rows()

    def append() -> None:
        queue.append(table)
        store.close()  # closing the last connection checkpoints the log

    return timed(append)


def _write_ipc_file(folder: Path) -> float:
    table = rows()
    path = folder / "peer.arrow"
    path.unlink(missing_ok=True)

    def write() -> None:
        with path.open("wb") as file:
            with pa.ipc.new_file(
                file,
                SCHEMA,
                options=pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1)),
            ) as writer:
                for batch in table.to_batches(max_chunksize=SEGMENT_ROWS):
                    writer.write_batch(batch)
            file.flush()
            for _ in range(FSYNCS):
                os.fsync(file.fileno())

    return timed(write)


def postgres(url: str) -> Result:
    schema = "bench_append"
    store = penstock.connect(with_schema(url, schema))
    connection = psycopg.connect(url, autocommit=True)
    connection.execute(f"create table {schema}.peer (payload_id bigint primary key, runs bytea, data bytea)")
    connection.execute(f"alter table {schema}.peer alter column data set storage external")
    table = rows()
    payloads = [bytes(encode(batch)) for batch in table.to_batches(max_chunksize=SEGMENT_ROWS)]
    try:
        return speed(
            "append 2M rows, PostgreSQL / binary COPY",
            lambda: _append_to_postgres(store, table),
            lambda: _copy_payloads(connection, f"{schema}.peer", payloads),
            least=0.6,
        )
    finally:
        store.close()
        connection.close()
        drop_schema(url, schema)


def _append_to_postgres(store: penstock.Store, table: pa.Table) -> float:
    queue = store.create_queue("bench", SCHEMA)
    seconds = timed(lambda: queue.append(table))
    store.drop_queue("bench")
    return seconds


def _copy_payloads(connection: psycopg.Connection, target: str, payloads: Sequence[bytes]) -> float:
    """Time a raw COPY of payloads that are already compressed, so nothing is encoded meanwhile."""
    connection.execute(f"truncate {target}")

    def copy_all() -> None:
        with connection.cursor() as cursor, cursor.copy(f"copy {target} from stdin (format binary)") as copy:
            copy.write(b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0))
            for number, payload in enumerate(payloads):
                copy.write(struct.pack("!hiqii", 3, 8, number, -1, len(payload)) + payload)
            copy.write(struct.pack("!h", -1))

    return timed(copy_all)
