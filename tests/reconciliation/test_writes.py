"""While writes go on: lag is no difference, and a repair undoes nothing that is newer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from penstock.errors import CommitRefusedError
from penstock.reconciliation import settling
from penstock.reconciliation.sql_copy import SqlCopy
from tests.support.postgres_source import Source
from tests.support.reconciled import CopiedTable, copied_table

ROWS = 2_000
COLUMNS = "id int PRIMARY KEY, v text, n int"


class Lagging:
    """Writes a source, and applies each change to the copy some time later, as a query does."""

    def __init__(self, made: CopiedTable, lag: float) -> None:
        self._made, self._lag = made, lag
        self._stopping = threading.Event()
        self._log: list[tuple[float, str, tuple[Any, ...]]] = []
        self._done = 0
        self.failures: list[BaseException] = []
        self._writing = threading.Thread(target=self._kept, args=[self._write])
        self._applying = threading.Thread(target=self._kept, args=[self._apply])
        self.lost: Callable[[tuple[Any, ...]], bool] = lambda change: False
        self.changes = 0

    def _kept(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failures.append(error)

    def __enter__(self) -> Lagging:
        self._writing.start()
        self._applying.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.quiet()
        self._applying.join(60)
        assert not self.failures, self.failures

    def quiet(self) -> None:
        """End the writes; the copy catches up."""
        self._stopping.set()
        self._writing.join(60)

    def _write(self) -> None:
        chance = random.Random(5)
        table = self._made.table
        with psycopg.connect(self._made.source.url, autocommit=True) as connection:
            while not self._stopping.is_set():
                key, text = chance.randint(1, ROWS + 50), f"text {chance.random()}"
                if chance.random() < 0.2:
                    connection.execute(f"DELETE FROM {table} WHERE id = {key}".encode())
                    change: tuple[Any, ...] = (key, None, None)
                else:
                    upsert = (
                        f"INSERT INTO {table} VALUES ({key}, '{text}', 1) "
                        f"ON CONFLICT (id) DO UPDATE SET v = '{text}', n = 1"
                    )
                    connection.execute(upsert.encode())
                    change = (key, text, 1)
                self._log.append((time.monotonic(), table, change))
                self.changes += 1
                time.sleep(0.003)

    def _apply(self) -> None:
        while self._writing.is_alive() or self._done < len(self._log):
            due = time.monotonic() - self._lag
            batch = []
            while self._done < len(self._log) and (
                self._log[self._done][0] <= due or self._stopping.is_set()
            ):
                batch.append(self._log[self._done][2])
                self._done += 1
            last = {change[0]: change for change in batch if not self.lost(change)}
            if last:
                self._apply_batch(list(last.values()))
            time.sleep(0.05)

    def _apply_batch(self, batch: list[tuple[Any, ...]]) -> None:
        if self._made.kind == "delta":
            while not self._merged(batch):
                pass
            return
        statements = []
        for key, text, number in batch:
            upsert = (
                f"INSERT INTO COPY VALUES ({key}, '{text}', {number}) "
                f"ON CONFLICT (id) DO UPDATE SET v = '{text}', n = {number}"
            )
            statements.append(f"DELETE FROM COPY WHERE id = {key}" if text is None else upsert)
        self._made.run(*statements)

    def _merged(self, batch: list[tuple[Any, ...]]) -> bool:
        rows = pa.table(
            {
                "id": pa.array([key for key, _, _ in batch], pa.int32()),
                "v": pa.array([text for _, text, _ in batch], pa.string()),
                "n": pa.array([number for _, _, number in batch], pa.int32()),
            }
        )
        try:
            merge = self._made.delta.merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
            merge.when_matched_delete("s.v is null").when_matched_update_all().when_not_matched_insert_all(
                "s.v is not null"
            ).execute()
        except CommitFailedError:
            return False
        return True


@pytest.fixture
def busy(source: Source, kind: str, tmp_path: Path) -> Iterator[CopiedTable]:
    table = source.table(COLUMNS, "busy")
    source.run(f"INSERT INTO {table} SELECT n, 'first', 0 FROM generate_series(1, {ROWS}) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        yield made


@pytest.mark.one_kind
def test_a_copy_that_lags_does_not_differ(busy: CopiedTable) -> None:
    with Lagging(busy, 0.8) as writer:
        time.sleep(1)
        for _ in range(2):
            found = busy.compare(range_rows=300, settle=4.0, timeout=60.0)
            assert (found.differences, found.undecided) == (0, 0)
    assert writer.changes > 100
    assert busy.compare().equal


@pytest.mark.few(1)
def test_lost_changes_are_found_under_writes(busy: CopiedTable) -> None:
    with Lagging(busy, 0.3) as writer:
        busy.delete("id IN (11, 12)")
        busy.update("v", "'damaged'", "id = 13")
        # The writer may have set these rows anew.
        found = busy.compare(range_rows=300, settle=3.0, timeout=60.0)
        assert {row.key["id"] for row in found.differing_rows} <= {11, 12, 13}
        assert found.undecided == 0
        writer.quiet()
    assert {row.key["id"] for row in busy.compare().differing_rows} <= {11, 12, 13}


def repair_at_last(busy: CopiedTable) -> None:
    """Repair a copy that others write; again if they were faster each time, as on a slow machine."""
    for attempt in range(5):
        try:
            busy.compare(range_rows=300, settle=2.0, timeout=60.0, repair=True)
            return
        except CommitRefusedError as error:
            if attempt == 4 or error.condition != "COMMIT_REFUSED.REPAIR_CONFLICT":
                raise


@pytest.mark.one_kind
def test_a_repair_under_writes_converges(busy: CopiedTable) -> None:
    chance = random.Random(3)
    with Lagging(busy, 0.3) as writer:
        writer.lost = lambda change: chance.random() < 0.05
        time.sleep(1.5)
        busy.delete("id < 30")
        for _ in range(2):
            repair_at_last(busy)
        writer.lost = lambda change: False
        writer.quiet()
    busy.compare(repair=True)
    assert busy.compare().equal


def test_rows_that_keep_changing_are_undecided(busy: CopiedTable) -> None:
    stopping = threading.Event()

    def change() -> None:
        with psycopg.connect(busy.source.url, autocommit=True) as connection:
            while not stopping.is_set():
                connection.execute(f"UPDATE {busy.table} SET n = n + 1 WHERE id = 7".encode())
                time.sleep(0.02)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        found = busy.compare(settle=1.0, timeout=2.0)
    finally:
        stopping.set()
        thread.join()
    assert not found.equal
    assert (found.differences, found.undecided) == (0, 1)


def test_a_row_that_changes_and_changes_back_is_not_settled(
    busy: CopiedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may be at the value in between."""
    busy.update("v", "'between'", "id = 7")
    looks = 0
    original = settling.Candidates._read

    def read(self: settling.Candidates, keys: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 2:
            busy.source.run(f"UPDATE {busy.table} SET v = 'between' WHERE id = 7")
            busy.source.run(f"UPDATE {busy.table} SET v = 'first' WHERE id = 7")
        if looks == 3:
            busy.update("v", "'first'", "id = 7")
        return original(self, keys)

    monkeypatch.setattr(settling.Candidates, "_read", read)
    found = busy.compare(settle=0.0)
    assert looks >= 3
    assert found.equal


def test_a_repair_writes_the_row_as_it_is_when_the_copy_is_locked(
    busy: CopiedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is not older than what a query has written since it was compared."""
    busy.update("v", "'damaged'", "id = 7")
    steps: list[str] = []

    def change() -> None:
        busy.source.run(f"UPDATE {busy.table} SET v = 'newest' WHERE id = 7")
        busy.update("v", "'newest'", "id = 7")
        steps.append("changed")

    original = settling.Candidates._compare_rows

    def look(self: settling.Candidates, keys: Any) -> None:
        found = self._on_differing

        def late(rows: Any) -> None:
            change()
            found(rows)

        monkeypatch.setattr(self, "_on_differing", late)
        original(self, keys)
        monkeypatch.setattr(self, "_on_differing", found)

    monkeypatch.setattr(settling.Candidates, "_compare_rows", look)
    found = busy.compare(repair=True)
    assert steps
    assert found.different == 1
    assert found.repaired == 0
    assert busy.rows("id, v")[0] is not None
    assert busy.compare().equal


@pytest.mark.parametrize("kind", ["delta"])
def test_a_commit_to_a_delta_table_during_a_repair_makes_it_start_over(
    busy: CopiedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that was read may be older than that of the other commit."""
    from penstock.reconciliation.delta_copy import DeltaCopy

    busy.delete("id = 7")
    original = DeltaCopy._merge
    raced = 0

    def merge(self: DeltaCopy, table: DeltaTable, rows: pa.Table, wrong: Any, token: str) -> None:
        nonlocal raced
        raced += 1
        if raced == 1:
            busy.source.run(f"UPDATE {busy.table} SET v = 'newest' WHERE id = 7")
            busy.insert([{"id": 7, "v": "newest", "n": 0}])
        original(self, table, rows, wrong, token)

    monkeypatch.setattr(DeltaCopy, "_merge", merge)
    found = busy.compare(repair=True)
    assert raced == 1
    assert found.repaired == 0
    assert busy.rows("id, v").count((7, "newest")) == 1
    assert busy.compare().equal


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_other_writers_wait_for_a_repair(busy: CopiedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a query could delete the row before the repair inserts it, which would stay for ever."""
    busy.delete("id = 7")
    order: list[str] = []
    original = SqlCopy._repair_keys

    def delete() -> None:
        busy.source.run(f"DELETE FROM {busy.table} WHERE id = 7")
        busy.run("DELETE FROM COPY WHERE id = 7")
        order.append("deleted")

    thread = threading.Thread(target=delete)

    def part(self: SqlCopy, tx: Any, keys: Any, source_rows: Any) -> int:
        def slow(wanted: Any) -> pa.Table:
            rows = source_rows(wanted)
            thread.start()
            time.sleep(0.7)
            order.append("read")
            return rows

        return original(self, tx, keys, slow)

    monkeypatch.setattr(SqlCopy, "_repair_keys", part)
    assert busy.compare(repair=True).repaired == 1
    thread.join(30)
    assert order == ["read", "deleted"]
    assert busy.compare().equal
