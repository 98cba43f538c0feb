"""How many rows a micro-batch takes, compared with a model that knows every row's append."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock import Queue, Store
from penstock.spark.options import SourceOptions
from penstock.spark.ranges import next_end, split_into_tasks
from penstock.spark.stream_reader import LARGE_BYTES, SMALL_BATCHES, BatchSizeWarnings
from penstock.store.database import Transaction
from penstock.store.log import compact
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord
from tests.support.spark_queues import fill, make_queue, table

PARTITIONS = 3
names = itertools.count()


@dataclass
class Model:
    """Which append each row of each partition belongs to."""

    owners: list[list[int]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])

    def append(self, counts: list[int], number: int) -> None:
        for partition, count in enumerate(counts):
            self.owners[partition] += [number] * count

    def taken(self, number: int, start: Any, end: Any) -> int:
        return sum(self.owners[p][start[p] : end[p]].count(number) for p in range(PARTITIONS))

    def left(self, number: int, start: Any) -> int:
        return sum(self.owners[p][start[p] :].count(number) for p in range(PARTITIONS))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("admission") / "penstock.db"
    with penstock.connect(f"sqlite:///{path}?synchronous=normal") as store:
        yield store


@pytest.fixture(scope="module")
def keys(shared: Store) -> list[int]:
    """A key for each partition, so that one append may touch several of them."""
    queue = make_queue(shared, "keys", partitions=PARTITIONS, key=["id"])
    homes = {next(iter(queue.append(table([key])).ranges)): key for key in range(32)}
    return [homes[partition] for partition in range(PARTITIONS)]


def end_of(
    store: Store, queue: Queue, start: Any, options: SourceOptions, cap: Any = None
) -> tuple[int, ...]:
    def work(tx: Transaction) -> tuple[int, ...]:
        return next_end(tx, queue.record, catalog.partitions(tx, queue.record), start, options, cap)

    return store.database.run(work, write=False)


def options_of(**given: object) -> SourceOptions:
    return SourceOptions(url="", queue="orders", **given)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[tuple[list[int], bool]], SourceOptions]:
    """Appends (the rows of each partition), each followed by a merge or not, and limits."""
    appends = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 4), min_size=PARTITIONS, max_size=PARTITIONS).filter(any),
                st.booleans(),
            ),
            min_size=1,
            max_size=8,
        )
    )
    limit = st.none() | st.integers(1, 7)
    options = options_of(
        max_rows_per_partition=draw(limit),
        max_rows_per_trigger=draw(limit),
        max_bytes_per_trigger=draw(st.none() | st.integers(1, 3000)),
        align_to_appends=draw(st.booleans()),
    )
    return appends, options


@given(scene=scenes())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_micro_batches_agree_with_a_model(
    shared: Store, keys: list[int], scene: tuple[list[tuple[list[int], bool]], SourceOptions]
) -> None:
    appends, options = scene
    queue = make_queue(shared, f"q{next(names)}", partitions=PARTITIONS, key=["id"])
    model = Model()
    for number, (counts, merged) in enumerate(appends):
        queue.append(table(key for p, count in enumerate(counts) for key in [keys[p]] * count))
        model.append(counts, number)
        if merged:
            compact.compact_all(shared.database, queue.record, range(PARTITIONS))
    start: tuple[int, ...] = (0,) * PARTITIONS
    total = tuple(len(owners) for owners in model.owners)
    for _ in range(sum(total) + 1):
        if start == total:
            break
        end = end_of(shared, queue, start, options)
        _check(model, options, start, end, total, len(appends))
        start = end
    assert start == total, "all of it comes, sooner or later"
    assert end_of(shared, queue, start, options) == start


def _check(model: Model, options: SourceOptions, start: Any, end: Any, total: Any, appends: int) -> None:
    assert all(s <= e <= t for s, e, t in zip(start, end, total, strict=True))
    assert start != end, "progress"
    touched = [number for number in range(appends) if model.taken(number, start, end)]
    if options.align_to_appends:
        assert all(model.taken(n, start, end) == model.left(n, start) for n in touched), "no append is cut"
        if len(touched) == 1:
            return  # one append goes as a whole, however large
    rows = [e - s for s, e in zip(start, end, strict=True)]
    assert max(rows) <= (options.max_rows_per_partition or 10**9)
    assert sum(rows) <= (options.max_rows_per_trigger or 10**9)


def test_the_byte_limit_is_exceeded_only_by_a_single_row(shared: Store) -> None:
    queue = make_queue(shared, f"q{next(names)}", partitions=2)
    for partition in (0, 1):
        fill(queue, range(100), partition=partition, each=10)
    sizes = [part.bytes for part in queue.info().partitions]
    assert end_of(shared, queue, (0, 0), options_of(max_bytes_per_trigger=sum(sizes))) == (100, 100)
    assert end_of(shared, queue, (0, 0), options_of(max_bytes_per_trigger=sum(sizes) // 2)) == pytest.approx(
        (50, 50), abs=1
    )
    assert sum(end_of(shared, queue, (0, 0), options_of(max_bytes_per_trigger=1))) == 1
    assert sum(end_of(shared, queue, (99, 100), options_of(max_bytes_per_trigger=1))) == 200


def test_partitions_get_shares_in_proportion_to_their_backlogs(shared: Store) -> None:
    queue = make_queue(shared, f"q{next(names)}", partitions=3)
    fill(queue, range(80), partition=0)
    fill(queue, range(20), partition=1)
    limit = options_of(max_rows_per_trigger=10)
    assert end_of(shared, queue, (0, 0, 0), limit) == (8, 2, 0)
    assert end_of(shared, queue, (79, 0, 0), limit) == (79, 10, 0)
    assert end_of(shared, queue, (79, 10, 0), limit) == (80, 19, 0)


def test_a_cap_is_not_exceeded_and_new_partitions_wait(shared: Store) -> None:
    queue = make_queue(shared, f"q{next(names)}")
    fill(queue, range(10))
    queue.add_partitions(1)
    fill(queue, range(5), partition=1)
    assert end_of(shared, queue, (3,), options_of(), cap=(7,)) == (7, 0)
    assert end_of(shared, queue, (8,), options_of(), cap=(7,)) == (8, 0), "never backwards"
    assert end_of(shared, queue, (3,), options_of()) == (10, 5)


@pytest.mark.parametrize("align", [False, True])
def test_trimmed_rows_do_not_count_towards_limits(shared: Store, align: bool) -> None:
    queue = make_queue(shared, f"q{next(names)}", partitions=2)
    fill(queue, range(20), each=2)
    queue.compact()
    fill(queue, range(20, 30), each=2)
    queue.trim(0, before=8)
    limit = options_of(max_rows_per_trigger=4, align_to_appends=align)
    assert end_of(shared, queue, (0, 0), limit) == (12, 0)
    queue.trim(0, before=30)
    assert end_of(shared, queue, (0, 0), limit) == (30, 0), "what is lost is passed over"


def test_rows_trimmed_during_the_lookup_are_handled(shared: Store) -> None:
    """The state of the partitions was read a moment ago: its rows may have been trimmed since."""
    queue = make_queue(shared, f"q{next(names)}", partitions=2, key=["id"])
    for _ in range(6):
        queue.append(table(range(8)))
    before = store_view(shared, queue)
    for partition in (0, 1):
        queue.trim(partition, before=queue.info().partitions[partition].next_index)

    def work(tx: Transaction) -> tuple[int, ...]:
        limit = options_of(max_rows_per_trigger=5, max_bytes_per_trigger=500, align_to_appends=True)
        return next_end(tx, queue.record, before, (0, 0), limit)

    end = shared.database.run(work, write=False)
    assert all(0 <= e <= part.next_index for e, part in zip(end, before, strict=True))


def store_view(store: Store, queue: Queue) -> list[PartitionRecord]:
    return store.database.run(lambda tx: catalog.partitions(tx, queue.record), write=False)


def test_micro_batches_align_to_appends_on_both_databases(store: Store) -> None:
    queue = make_queue(store, partitions=2, key=["id"])
    for start in range(0, 60, 10):
        queue.append(table(range(start, start + 10)))
        if start == 30:
            queue.compact()
    owners = _appends_of(queue)
    start: tuple[int, ...] = (0, 0)
    seen = []
    while start != (
        end := end_of(store, queue, start, options_of(max_rows_per_trigger=25, align_to_appends=True))
    ):
        rows = [owners[p][start[p] : end[p]] for p in (0, 1)]
        seen.append({number for part in rows for number in part})
        assert sum(len(part) for part in rows) == 10 * len(seen[-1]) <= 25
        start = end
    assert [number for numbers in seen for number in sorted(numbers)] == [0, 1, 2, 3, 4, 5]


def _appends_of(queue: Queue) -> list[list[int]]:
    return [[value // 10 for value in queue.read(p, 0)["id"].to_pylist()] for p in (0, 1)]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=4),
    rows=st.integers(1, 20),
)
def test_tasks_cover_the_range_evenly(ranges: list[tuple[int, int]], rows: int) -> None:
    start = [first for first, _ in ranges]
    end = [first + count for first, count in ranges]
    tasks = [task for (task,) in split_into_tasks(start, end, rows, None)]
    for partition in range(len(ranges)):
        mine = [task[1:] for task in tasks if task[0] == partition]
        sizes = [high - low for low, high in mine]
        assert [low for low, _ in mine] == ([start[partition], *[high for _, high in mine]][: len(mine)])
        assert sum(sizes) == end[partition] - start[partition]
        assert all(1 <= size <= rows for size in sizes)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    rows=st.integers(1, 20),
    most=st.integers(1, 12),
)
def test_partitions_with_few_rows_share_tasks(sizes: list[int], rows: int, most: int) -> None:
    start = [10 * place for place in range(len(sizes))]
    end = [first + count for first, count in zip(start, sizes, strict=True)]
    alone = [piece for (piece,) in split_into_tasks(start, end, rows, None)]
    tasks = split_into_tasks(start, end, rows, most)
    assert [piece for task in tasks for piece in task] == alone
    counts = [sum(piece.end - piece.start for piece in task) for task in tasks]
    assert all(1 <= count <= rows for count in counts)
    if len(alone) <= most:
        assert all(len(task) == 1 for task in tasks)
    # More than that only because the tasks would have too many rows.
    assert len(tasks) <= most + 2 * sum(sizes) // rows


def test_ten_thousand_partitions_are_a_few_hundred_tasks_of_equal_size() -> None:
    tasks = split_into_tasks([0] * 10_000, [7] * 10_000, 2_000_000, 256)
    assert len(tasks) == 256
    assert {sum(piece.end - piece.start for piece in task) for task in tasks} == {7 * 39, 7 * 40}


# Words of warning.


def _part(rows: int, size: int) -> PartitionRecord:
    return PartitionRecord(0, 0, rows, 0, 0, size, 1)


def test_large_micro_batches_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = BatchSizeWarnings(options_of())
    for _ in range(3):
        watch.observe([0], [1000], [_part(1000, 2 * LARGE_BYTES)])
    assert len(caplog.records) == 1
    assert "maxRowsPerTrigger or maxBytesPerTrigger" in caplog.text
    assert "'orders'" in caplog.text


def test_many_small_micro_batches_with_a_large_backlog_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = BatchSizeWarnings(options_of(max_rows_per_trigger=10))
    for start in range(0, 10 * 3 * SMALL_BATCHES, 10):
        watch.observe([start], [start + 10], [_part(100_000, 1000)])
    assert len(caplog.records) == 1
    assert "raise maxRowsPerTrigger" in caplog.text


def test_small_micro_batches_without_a_backlog_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = BatchSizeWarnings(options_of())
    for start in range(0, 10 * 3 * SMALL_BATCHES, 10):
        watch.observe([start], [start + 10], [_part(start + 10, 1000)])
        watch.observe([start + 10], [start + 10], [_part(start + 10, 1000)])
    assert caplog.records == []
