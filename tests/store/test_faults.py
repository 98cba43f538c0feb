"""A full disk, a statement that fails in the middle of an append, a missing payload: no operation has partial
effects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import StoreError, StoreFullError
from penstock.testing import temporary_store
from tests.store.programs import SCHEMA
from tests.support.processes import ChildProcess
from tests.support.raw_sql import raw_connection, run_sql


def _big(rows: int) -> pa.Table:
    return pa.table({"n": range(rows), "s": [os.urandom(100).hex() for _ in range(rows)]}, schema=SCHEMA)


def test_a_full_disk_is_reported_and_earlier_appends_stay(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        queue = store.create_queue("q", SCHEMA)
        table = _big(500)
        queue.append(table)
        (connection,) = store.database.pool.idle
        pages = connection.execute("pragma page_count").fetchone()[0]
        connection.execute(f"pragma max_page_count = {pages + 10}")
        with pytest.raises(StoreFullError, match="free some disk space; none of this was written"):
            _append_for_ever(queue, table)
        done = queue.info().rows // 500
        assert queue.info().rows == 500 * done
        assert queue.read(0, 0).num_rows == 500 * done
        assert queue.append(table).ranges == {0: (500 * done, 500 * (done + 1))}, "there is room again"


def _append_for_ever(queue: penstock.Queue, table: pa.Table) -> None:
    while True:
        queue.append(table)


def test_a_file_size_limit_is_reported_and_earlier_appends_stay(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    child = run_child("tests.store.programs", "with_little_room", f"sqlite:///{tmp_path}/x.db", 2_000_000)
    assert child.wait() == 0, child.output
    said = dict(line.split(" ", 1) for line in child.output.splitlines() if " " in line)
    assert "none of this was written" in said["failed"]
    appended = int(said["appended"])
    assert said["rows"] == f"{2000 * appended} {2000 * appended}"
    assert "Traceback" not in child.output
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        assert store.queue("q").read(0, 0).num_rows == 2000 * appended


def _failing(store: penstock.Store, table: str, condition: str, code: str) -> None:
    """Make inserts of rows for which a condition holds fail from now on."""
    database = store.database
    if database.dialect == "sqlite":
        run_sql(
            database,
            f"create trigger fail before insert on penstock_{table} when {condition} "
            "begin select raise(abort, 'no luck'); end",
        )
        return
    connection = raw_connection(database)
    schema = database.url.schema
    connection.execute(
        f"create function {schema}.fail() returns trigger language plpgsql as $$ begin raise exception 'no "
        f"luck' using errcode = '{code}'; end $$"
    )
    connection.execute(
        f"create trigger fail before insert on {schema}.{table} for each row when ({condition}) "
        f"execute function {schema}.fail()"
    )
    connection.close()


@pytest.mark.parametrize("table", ["segment", "payload"])
def test_an_append_that_fails_in_its_last_partition_appends_nothing(
    store: penstock.Store, table: str
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=8, key=["n"])
    queue.append(_big(10))
    before, payloads = queue.info(), _payloads(store)
    last = max(n for n, part in enumerate(before.partitions) if part.rows)
    condition = (
        f"new.partition = {last}" if table == "segment" else f"new.payload_id > {_last_payload(store) + 6}"
    )
    _failing(store, table, condition, "53100")
    with pytest.raises(StoreError):
        queue.append(_big(1000))
    assert queue.info() == before
    assert _payloads(store) == payloads


def test_a_full_disk_on_the_server_is_reported(pg_url: str) -> None:
    with temporary_store(pg_url) as store:
        queue = store.create_queue("q", SCHEMA)
        _failing(store, "segment", "true", "53100")
        with pytest.raises(
            StoreFullError, match="free some disk space on the server; none of this was written"
        ):
            queue.append([{"n": 1}])
        assert queue.info().rows == 0


def _payloads(store: penstock.Store) -> int:
    return int(_query(store, "select count(*) from penstock.payload")[0][0])


def _last_payload(store: penstock.Store) -> int:
    return int(_query(store, "select max(payload_id) from penstock.payload")[0][0])


def _query(store: penstock.Store, text: str) -> list[tuple[Any, ...]]:
    return run_sql(store.database, text)


def test_a_missing_payload_is_an_error_and_not_a_gap(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    for n in range(3):
        queue.append([{"n": n}])
    ids = [row[0] for row in _query(store, "select payload_id from penstock.payload order by 1")]
    _query(store, f"delete from penstock.payload where payload_id = {ids[1]}")
    assert queue.read(0, 0, 1).num_rows == 1
    for start, end in ((0, 3), (1, 2)):
        with pytest.raises(
            StoreError, match=r"rows \[1, 2\): these rows are missing: the store is damaged"
        ) as caught:
            queue.read(0, start, end)
        assert caught.value.condition == "SEGMENT_MISSING"


def test_a_damaged_payload_is_an_error(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(_big(5))
    junk = "x'00'" if store.database.dialect == "sqlite" else r"'\x00'"
    _query(store, f"update penstock.payload set data = {junk}")
    with pytest.raises(StoreError) as caught:
        queue.read(0, 0)
    assert caught.value.condition == "SEGMENT_UNREADABLE"


@pytest.mark.parametrize("limit", ["MAX_PAYLOAD_BYTES", "_MAX_ROW_BYTES"])
def test_a_row_too_large_for_the_database_or_for_readers_is_refused(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"penstock.store.log.segmenting.{limit}", 10_000)
    queue = store.create_queue("q", SCHEMA)
    with pytest.raises(
        penstock.errors.InvalidInputError, match=r"ROW_TOO_LARGE\].*keep large objects in files"
    ):
        queue.append([{"n": 1, "s": os.urandom(10_000).hex()}])
    assert queue.info().rows == 0


def test_large_appends_are_split_into_segments_that_fit_into_a_readers_memory(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.log.segmenting.SEGMENT_RAW_BYTES", 100_000)
    queue = store.create_queue("q", SCHEMA)
    table = _big(5_000)
    queue.append(table)
    (partition,) = queue.info().partitions
    assert partition.segments >= table.nbytes // 100_000
    assert queue.read(0, 0).equals(table)


def test_a_corrupt_database_file_is_reported(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        store.create_queue("q", SCHEMA).append(_big(2000))
    data = bytearray((tmp_path / "x.db").read_bytes())
    data[32768 : 32768 * 6] = b"\xff" * (32768 * 5)
    (tmp_path / "x.db").write_bytes(data)
    with pytest.raises(StoreError, match="damaged"), penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        store.queue("q").read(0, 0)


def test_the_write_ahead_log_stays_below_its_limit(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db?synchronous=normal") as store:
        queue = store.create_queue("q", SCHEMA, retention=penstock.Retention(rows=1000))
        table = _big(4000)
        for _ in range(60):
            queue.append(table)
        queue.maintain()
        assert (tmp_path / "x.db-wal").stat().st_size < 80 << 20
