"""Adding partitions: rows with equal keys share a partition, even while other processes append."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInputError
from penstock.queue.placement import DistinctHashes, known_keys_of
from penstock.store.records.catalog import QueueChanged
from tests.support.processes import ChildProcess
from tests.support.queues import SCHEMA, everything, numbers, rows, without_disk_sync


def homes(queue: penstock.Queue) -> dict[Any, set[int]]:
    """Return the partitions that contain each number."""
    queue.refresh()
    found: dict[Any, set[int]] = {}
    for partition, values in everything(queue).items():
        for value in values:
            found.setdefault(value, set()).add(partition)
    return found


def test_new_partitions_are_empty_and_accept_rows(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1))
    assert queue.add_partitions(2) == 3
    assert (queue.partitions, store.queue("q").partitions) == (3, 3)
    assert queue.append(rows(2), 2).ranges == {2: (0, 1)}
    assert everything(queue) == {0: [1], 1: [], 2: [2]}


@pytest.mark.parametrize("count", [0, -1, 1.5, "1", True])
def test_an_invalid_number_of_partitions_is_refused(store: penstock.Store, count: Any) -> None:
    queue = store.create_queue("q", SCHEMA)
    with pytest.raises(InvalidInputError):
        queue.add_partitions(count)
    assert queue.partitions == 1


def test_a_queue_cannot_exceed_the_maximum_number_of_partitions(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=9_900)
    with pytest.raises(
        InvalidInputError, match="has at most 10000 partitions: 'q' has 9900, so 101 more cannot be added"
    ):
        queue.add_partitions(101)
    assert store.queue("q").partitions == 9_900
    assert queue.add_partitions(100) == 10_000


def test_consumers_start_at_the_beginning_of_new_partitions(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2))
    for name in ("a", "b"):
        store.create_consumer(name)
        queue.register(name, start="latest", vital=name == "a")
    queue.add_partitions(1)
    for name in ("a", "b"):
        assert store.consumer(name).offsets("q") == {0: 2, 1: 0}
    queue.append(rows(3), 1)
    assert numbers(store.consumer("a").pull("q", 1).table) == [3]
    assert queue.trim(1, 1) == 0, "the vital one has not read it"
    assert store.consumer("b").lag("q").rows == 1


@pytest.mark.parametrize("steps", [[2], [1, 1, 1], [3, 5]])
def test_existing_keys_keep_their_partition_and_new_ones_spread(
    store: penstock.Store, steps: list[int]
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    known = 0
    for step in [0, *steps]:
        if step:
            queue.add_partitions(step)
        before = homes(queue)
        queue.append(rows(*range(known + 300)))
        after = homes(queue)
        assert all(len(parts) == 1 for parts in after.values())
        assert all(after[key] == parts for key, parts in before.items())
        new = [next(iter(after[key])) for key in range(known, known + 300)]
        assert set(new) == set(range(queue.partitions))
        known += 300


def test_trimmed_keys_may_move_to_another_partition(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=1, key=["n"])
    queue.append(rows(*range(200)))
    queue.trim(0, 200)
    queue.add_partitions(3)
    queue.append(rows(*range(200)))
    assert {part for parts in homes(queue).values() for part in parts} == {0, 1, 2, 3}


def test_null_keys_keep_their_partition(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    queue.append([{"n": None}])
    before = homes(queue)[None]
    queue.add_partitions(5)
    queue.append([{"n": None}] * 3)
    assert homes(queue)[None] == before


def test_rows_placed_for_fewer_partitions_are_never_appended(store: penstock.Store) -> None:
    """The store itself refuses such rows, however they are written."""
    from penstock.store import staging
    from penstock.store.log import partition_log, segmenting
    from penstock.store.staging import Attempt

    queue = store.create_queue("q", SCHEMA, partitions=2, key=["n"])
    old = queue.record
    segments = segmenting.to_segments(pa.table({"n": [1], "s": ["x"]}, schema=SCHEMA), 0)
    many = segments + segmenting.to_segments(pa.table({"n": [2], "s": ["x"]}, schema=SCHEMA), 1)
    attempt = Attempt("app", 0, 0, "try")
    store.database.run(lambda tx: staging.stage(tx, old, attempt, segments, 0))
    queue.add_partitions(1)
    for work in (
        lambda tx: partition_log.append(tx, old, segments),
        lambda tx: partition_log.append(tx, old, many),
        lambda tx: staging.promote(tx, old, "app", 0, {"try": 1}),
    ):
        with pytest.raises(QueueChanged, match="repeat the append, or restart the query"):
            store.database.run(work)
    assert queue.info().rows == 0
    unkeyed = store.create_queue("r", SCHEMA, partitions=2)
    store.queue("r").add_partitions(1)
    assert unkeyed.append(rows(1)).rows == 1


def test_concurrent_growths_of_a_queue_all_succeed(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=1, key=["n"])
    queue.append(rows(*range(50)))
    before = homes(queue)
    threads = [threading.Thread(target=store.queue("q").add_partitions, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.queue("q").partitions == 7
    queue.append(rows(*range(100)))
    after = homes(queue)
    assert all(after[key] == parts for key, parts in before.items())
    assert all(len(parts) == 1 for parts in after.values())


def test_a_queue_can_grow_while_consumers_are_created_and_dropped(store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    failures: list[BaseException] = []
    stop = threading.Event()

    def consumers() -> None:
        try:
            n = 0
            while not stop.is_set():
                store.create_consumer(f"c{n}")
                store.queue("q").register(f"c{n}").lag("q")
                if n % 2:
                    store.drop_consumer(f"c{n}")
                n += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=consumers)
    thread.start()
    for _ in range(15):
        queue.add_partitions(1)
    stop.set()
    thread.join()
    assert failures == []
    for name in store.consumers():
        if store.consumer(name).queues():
            assert list(store.consumer(name).offsets("q")) == list(range(16)), name


@pytest.mark.one_kind
def test_equal_keys_stay_together_while_other_processes_append(
    store: penstock.Store, store_url: str, run_child: Any
) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=1, key=["n"])
    children: list[ChildProcess] = [
        run_child("tests.queue.programs", "append_keys", without_disk_sync(store_url), "q", seed, 60)
        for seed in range(3)
    ]
    for child in children:
        child.wait_for_line("appended")
    for _ in range(5):
        queue.add_partitions(1)
    for child in children:
        assert child.wait() == 0, child.output
    # Whenever the queue grew: existing keys stay in their partitions, and new keys are spread.
    queue.refresh()
    queue.append(rows(*range(3_000)))
    found = homes(queue)
    assert queue.partitions == 6
    assert queue.info().rows == 3 * 60 * 20 + 3_000
    assert {key: parts for key, parts in found.items() if len(parts) > 1} == {}
    assert len({part for parts in found.values() for part in parts}) == 6


def test_a_bitmap_of_keys_contains_its_hashes_and_few_others() -> None:
    hashes = pa.array([(n * 2654435761) % 2**32 for n in range(50_000)], pa.uint32())
    home = known_keys_of(4, [hashes.slice(0, 10_000), hashes])
    assert home.contains(hashes).true_count == 50_000
    strangers = pa.array([(n * 2654435761 + 12345) % 2**32 for n in range(50_000, 100_000)], pa.uint32())
    assert home.contains(strangers).true_count < 50_000 * 0.12
    assert len(home.bits) <= 2 * 50_000 * 16 // 8 + 8
    none = known_keys_of(4, [])
    assert none.contains(hashes).true_count == 0


def test_a_large_bitmap_of_keys_is_the_same_as_one_built_hash_by_hash() -> None:
    """It is built block by block, and each block must be at the right position."""
    hashes = pa.array(range(0, 2**32, 2**32 // 200_000), pa.uint32())
    home = known_keys_of(2, [hashes])
    size = len(home.bits) * 8
    assert size > 1 << 20
    expected = bytearray(size // 8)
    for value in hashes.to_pylist():
        expected[value % size // 8] |= 1 << (value % 8)
    assert home.bits == bytes(expected)


def test_collected_hashes_are_distinct() -> None:
    gathered = DistinctHashes()
    for start in range(0, 1000, 10):
        gathered.add(pa.array([n % 100 for n in range(start, start + 20)], pa.uint32()))
    copy = gathered.copy()
    copy.add(pa.array([5000], pa.uint32()))
    assert sorted(gathered.distinct().to_pylist()) == list(range(100))
    assert len(copy.distinct()) == 101
