"""A queue to which columns are added and whose columns are widened, compared with a plain list of rows.

The test runs random histories of old and new readers and writers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock
from penstock.errors import SchemaMismatchError
from penstock.store import staging
from penstock.store.log.segmenting import to_segments
from penstock.store.staging import Attempt
from tests.support.queues import without_disk_sync

FIRST = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string()), ("w", pa.int16())])
WIDTHS = {pa.int16(): 0, pa.int32(): 100_000, pa.int64(): 1 << 40}
"""The types of the column w, each with values that the one before it does not hold."""
KINDS = [
    pa.int64(),
    pa.string(),
    pa.bool_(),
    pa.list_(pa.field("element", pa.string())),
    pa.struct([pa.field("x", pa.int32(), nullable=False)]),
]
MOST = 8
HERE = st.floats(0, 1)
COUNTS = st.integers(0, 5)

# Fewer examples for PostgreSQL: each statement waits for the server, and the code under test is the same.
EXAMPLES = {"sqlite": 25, "postgresql": 10}
PROFILE = settings(
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def value(kind: pa.DataType, n: int) -> Any:
    """Return a value that depends on the number; some values are null."""
    if n % 5 == 0:
        return None
    if kind in (pa.int16(), pa.int32()):
        return WIDTHS[kind] + n
    if kind == KINDS[0]:
        return n
    if kind == KINDS[1]:
        return "v" * (n % 40)
    if kind == KINDS[2]:
        return n % 2 == 0
    return [str(n)] * (n % 3) if kind == KINDS[3] else {"x": n}


def fits(found: int | None, kind: pa.DataType) -> bool:
    return found is None or found < 1 << kind.bit_width - 1


@dataclass
class Handle:
    """A queue object that was opened when the queue had a certain number of columns."""

    queue: penstock.Queue
    width: int


def known_kind(handle: Handle) -> pa.DataType:
    return handle.queue.schema.field("w").type


class ColumnsMachine(RuleBasedStateMachine):
    """Model of a queue with one partition. Another model tests partitions."""

    created = 0

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.store = penstock.connect(url)
        self.count = 0
        self.rows: list[dict[str, Any]] = []
        self.first = 0
        self.fields = list(FIRST)
        self.batch = 0
        self.staged: list[tuple[int, list[dict[str, Any]]]] = []
        ColumnsMachine.created += 1
        self.name = f"c{os.getpid()}-{ColumnsMachine.created}"

    @initialize()
    def create(self) -> None:
        self.handles = [Handle(self.store.create_queue(self.name, FIRST), len(FIRST))]

    def teardown(self) -> None:
        if hasattr(self, "handles"):
            self.store.drop_queue(self.name)
        self.store.close()

    def handle(self, where: float) -> Handle:
        return self.handles[int(where * (len(self.handles) - 1))]

    def made(self, width: int, count: int, kind: pa.DataType) -> list[dict[str, Any]]:
        """Return rows of the first columns, with w of the given type."""
        self.count += count
        numbers = range(self.count - count, self.count)
        return [
            {"n": n}
            | {field.name: value(field.type, n) for field in self.fields[1:width]}
            | {"w": None if n % 5 == 0 else WIDTHS[kind] + n}
            for n in numbers
        ]

    @property
    def kind(self) -> pa.DataType:
        """Return the type of the column w."""
        return self.fields[2].type

    def whole(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{field.name: row.get(field.name) for field in self.fields} for row in rows]

    @rule()
    def open(self) -> None:
        self.handles.append(Handle(self.store.queue(self.name), len(self.fields)))

    @precondition(lambda self: len(self.fields) < MOST)
    @rule(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2), where=HERE)
    def add(self, kinds: list[pa.DataType], where: float) -> None:
        handle = self.handle(where)
        new = [pa.field(f"c{len(self.fields) + place}", kind) for place, kind in enumerate(kinds)]
        self.fields += new
        found = handle.queue.add_columns(new)
        handle.width = len(self.fields)
        assert found.names == [field.name for field in self.fields]
        assert handle.queue.add_columns(self.fields[2:] or new) == found

    @precondition(lambda self: self.kind != pa.int64())
    @rule(where=HERE, far=st.booleans())
    def widen(self, where: float, far: bool) -> None:
        handle, kinds = self.handle(where), list(WIDTHS)
        kind = kinds[-1 if far else kinds.index(self.kind) + 1]
        self.fields[2] = pa.field("w", kind)
        found = handle.queue.widen_columns([self.fields[2]])
        handle.width = len(self.fields)
        assert found.equals(pa.schema(self.fields))
        assert handle.queue.widen_columns([pa.field("w", pa.int32())]) == found

    @rule(count=COUNTS, where=HERE, as_table=st.booleans())
    def append(self, count: int, where: float, as_table: bool) -> None:
        """Append with the columns that the handle knows."""
        handle = self.handle(where)
        rows = self.made(handle.width, count, known_kind(handle))
        given: Any = pa.Table.from_pylist(rows, schema=handle.queue.schema) if as_table else rows
        handle.queue.append(given)
        self.rows += rows

    @rule(count=st.integers(20, 70), where=HERE, other=HERE)
    def append_by_turns(self, count: int, where: float, other: float) -> None:
        """Append single rows by an older and a newer writer in turn, so that some are compacted in the
        background.
        """
        for n in range(count):
            self.append(1, (where, other)[n % 2], False)

    @rule(count=st.integers(1, 3), where=HERE)
    def append_what_is_new(self, count: int, where: float) -> None:
        """Append rows with new columns by a writer that opened the queue before they were added."""
        handle = self.handle(where)
        rows = self.made(len(self.fields), count, self.kind)
        handle.queue.append(rows)
        handle.width = len(self.fields)
        self.rows += rows

    @rule(count=st.integers(1, 4), where=HERE)
    def stage(self, count: int, where: float) -> None:
        handle = self.handle(where)
        rows = self.made(handle.width, count, known_kind(handle))
        table = pa.Table.from_pylist(rows, schema=handle.queue.schema)
        attempt, record = Attempt(self.name, self.batch, 0, "only"), handle.queue.record
        number, segments = len(self.staged), to_segments(table, 0, columns_id=record.columns.id)
        self.store.database.run(lambda tx: staging.stage(tx, record, attempt, segments, number))
        self.staged.append((1, rows))

    @precondition(lambda self: self.staged)
    @rule(where=HERE)
    def promote(self, where: float) -> None:
        record, count = self.handle(where).queue.record, len(self.staged)
        self.store.database.run(
            lambda tx: staging.promote(tx, record, self.name, self.batch, {"only": count})
        )
        self.rows += [row for _, rows in self.staged for row in rows]
        self.staged, self.batch = [], self.batch + 1

    @rule(where=HERE)
    def merge(self, where: float) -> None:
        handle = self.handle(where)
        handle.queue.compact()
        handle.width = len(self.fields)

    @rule(where=HERE, before=HERE)
    def trim(self, where: float, before: float) -> None:
        handle = self.handle(where)
        bound = self.first + int(before * (len(self.rows) - self.first))
        handle.queue.trim(0, bound)
        handle.width = len(self.fields)
        self.first = max(self.first, bound)

    @rule(where=HERE, start=HERE, columns=st.lists(st.integers(0, MOST), min_size=1, max_size=4, unique=True))
    def read_some(self, where: float, start: float, columns: list[int]) -> None:
        handle = self.handle(where)
        names = [self.fields[place].name for place in columns if place < len(self.fields)]
        if not names:
            return
        at = self.first + int(start * (len(self.rows) - self.first))
        new = any(self.fields.index(field) >= handle.width for field in self.fields if field.name in names)
        known = self.kind if new else known_kind(handle)
        if "w" in names and any(not fits(row["w"], known) for row in self.rows[at:]):
            with pytest.raises(SchemaMismatchError, match="open the queue again") as caught:
                handle.queue.read(0, at, columns=names)
            assert caught.value.condition == "SCHEMA_MISMATCH.COLUMN_WIDENED"
            handle.queue.refresh()
            new = True
        found = handle.queue.read(0, at, columns=names)
        if new:
            handle.width = len(self.fields)
        assert found.to_pylist() == [{name: row.get(name) for name in names} for row in self.rows[at:]]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = penstock.connect(self.url, create=False)
        self.handles = [Handle(self.store.queue(self.name), len(self.fields))]

    @invariant()
    def everybody_sees_the_rows_with_the_columns_that_they_know(self) -> None:
        for handle in getattr(self, "handles", []):
            assert len(handle.queue.schema) == handle.width
            if not all(fits(row["w"], known_kind(handle)) for row in self.rows[self.first :]):
                with pytest.raises(SchemaMismatchError, match="open the queue again"):
                    handle.queue.read(0, self.first)
                continue
            found = handle.queue.read(0, self.first)
            assert found.schema.equals(handle.queue.schema)
            names = found.schema.names
            expected = [{name: row[name] for name in names} for row in self.whole(self.rows[self.first :])]
            assert found.to_pylist() == expected


def test_a_queue_whose_columns_change_agrees_with_its_model(store_url: str) -> None:
    examples = EXAMPLES[store_url.partition(":")[0]]
    run_state_machine_as_test(
        lambda: ColumnsMachine(without_disk_sync(store_url)),
        settings=settings(PROFILE, max_examples=examples),
    )
