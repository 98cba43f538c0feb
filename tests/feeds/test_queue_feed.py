"""A change feed in a queue: whole commits, in order, whatever its partitions."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.changes import reading
from penstock.changes.options import EVER, ChangeOptions
from penstock.errors import (
    AlreadyExistsError,
    ChangelogContractViolationError,
    CommitOutOfOrderError,
    DataLostError,
    FeedUnavailableError,
    InvalidChangelogSchemaError,
    InvalidInputError,
    QueueNotFoundError,
    SchemaMismatchError,
    StoreError,
)
from penstock.feeds.protocol import Feed
from penstock.store.records import feed_commits
from tests.support.raw_sql import run_sql

DATA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string())])
CONTRACT = penstock.ChangeContract("id", intermediate_changes=True)
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(number: int) -> datetime:
    return START + timedelta(seconds=number)


def inserts(*ids: int) -> list[dict[str, Any]]:
    return [{"id": id, "data": str(id), "_change_type": "insert"} for id in ids]


@pytest.fixture
def feed(store: penstock.Store, store_url: str) -> penstock.QueueFeed:
    return penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url, partitions=3)


def rows(feed: Feed, after: int, upto: int, rows_per_task: int = 1000) -> Counter[tuple[int, int]]:
    """The (version, id) of every row in a range."""
    opened = feed.open()
    schema = opened.describe().schema
    found: Counter[tuple[int, int]] = Counter()
    for task in opened.tasks(after, upto, rows_per_task):
        for batch in opened.read(task, schema):
            assert batch.schema == schema
            found.update(zip(batch["_commit_version"].to_pylist(), batch["id"].to_pylist(), strict=True))
    return found


def test_writers_and_readers_continue_when_a_feed_gets_columns(
    feed: penstock.QueueFeed, store: penstock.Store, store_url: str
) -> None:
    old, known = penstock.QueueFeed("feed", store_url), feed.open().describe().schema
    feed.append_commit(0, at(0), inserts(0))
    old.append_commit(1, at(1), inserts(1))
    wide = store.queue("feed").add_columns([("note", pa.string())])
    with pytest.raises(SchemaMismatchError, match=r"DUPLICATE_COLUMN\].*_commit_version"):
        store.queue("feed").add_columns([("_Commit_Version", pa.int64())])
    old.append_commit(2, at(2), inserts(2))
    feed.append_commit(3, at(3), [inserts(3)[0] | {"note": "new"}])
    old.append_commit(4, at(4), [inserts(4)[0] | {"note": "newer"}])
    assert feed.open().describe().schema.equals(wide)
    notes = [(n, row["note"]) for n, row in _read(feed, wide)]
    assert sorted(notes, key=str) == [(0, None), (1, None), (2, None), (3, "new"), (4, "newer")]
    assert sorted(n for n, _ in _read(feed, known)) == [0, 1, 2, 3, 4]
    (net,) = reading.local_changes(feed.open(), -1, 4, ChangeOptions("netChanges", False, EVER))
    assert net.select(["id", "note"]).to_pylist()[3:] == [
        {"id": 3, "note": "new"},
        {"id": 4, "note": "newer"},
    ]


def _read(feed: penstock.QueueFeed, schema: pa.Schema) -> list[tuple[int, dict[str, Any]]]:
    found: list[tuple[int, dict[str, Any]]] = []
    for task in feed.open().tasks(-1, feed.newest(-1), 1000):
        for batch in feed.open().read(task, schema):
            assert batch.schema.equals(schema)
            found += [(row["id"], row) for row in batch.to_pylist()]
    return found


def test_a_range_contains_the_rows_of_its_commits(feed: penstock.QueueFeed) -> None:
    feed.append_commit(1, at(1), inserts(1, 2, 3))
    feed.append_commit(5, at(2), inserts(4))
    feed.append_commit(6, at(2), [])
    feed.append_commit(9, at(3), inserts(5, 6))
    assert [(c.version, c.rows) for c in feed.open().commits(-1, 9)] == [(1, 3), (5, 1), (6, 0), (9, 2)]
    assert feed.open().oldest() == -1
    assert (feed.newest(-1), feed.newest(9)) == (9, 9)
    assert rows(feed, -1, 9).keys() == {(1, 1), (1, 2), (1, 3), (5, 4), (9, 5), (9, 6)}
    assert rows(feed, 1, 8).keys() == {(5, 4)}
    assert rows(feed, 5, 6) == Counter()
    assert rows(feed, -1, 9, rows_per_task=1) == rows(feed, -1, 9)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_adjacent_ranges_contain_every_row_once(
    store: penstock.Store, store_url: str, data: st.DataObject
) -> None:
    name = f"feed-{uuid.uuid4()}"
    feed = penstock.QueueFeed.create(
        name, DATA, CONTRACT, store=store_url, partitions=data.draw(st.integers(1, 3))
    )
    expected: Counter[tuple[int, int]] = Counter()
    version = -1
    for number in range(data.draw(st.integers(1, 6))):
        version += data.draw(st.integers(1, 5))
        ids = data.draw(st.lists(st.integers(0, 20), unique=True, max_size=6))
        feed.append_commit(version, at(number), inserts(*ids))
        expected.update((version, id) for id in ids)
        if data.draw(st.booleans()):
            store.queue(name).compact()
        if data.draw(st.integers(0, 4)) == 0:
            store.queue(name).add_partitions(1)
    bounds = sorted(data.draw(st.lists(st.integers(0, version), max_size=4)))
    found: Counter[tuple[int, int]] = Counter()
    for after, upto in zip([-1, *bounds], [*bounds, version], strict=True):
        found += rows(feed, after, upto, data.draw(st.integers(1, 5)))
    assert found == expected


def test_a_commit_with_an_older_version_is_refused_and_writes_nothing(feed: penstock.QueueFeed) -> None:
    feed.append_commit(3, at(3), inserts(1))
    with pytest.raises(CommitOutOfOrderError, match="the newest commit, 3"):
        feed.append_commit(3, at(4), inserts(2))
    with pytest.raises(CommitOutOfOrderError, match="timestamp"):
        feed.append_commit(4, at(2), inserts(2))
    assert rows(feed, -1, 10).keys() == {(3, 1)}
    feed.append_commit(4, at(3), inserts(2))
    assert rows(feed, 3, 10).keys() == {(4, 2)}


def test_an_invalid_row_causes_the_whole_commit_to_be_refused(feed: penstock.QueueFeed) -> None:
    with pytest.raises(SchemaMismatchError, match="NULL_VALUE"):
        feed.append_commit(1, at(1), [*inserts(1), {"id": None, "_change_type": "insert"}])
    with pytest.raises(SchemaMismatchError, match="_commit_version"):
        feed.append_commit(1, at(1), [{**inserts(1)[0], "_commit_version": 7}])
    with pytest.raises(InvalidInputError, match="time zone"):
        feed.append_commit(1, datetime(2026, 1, 1), inserts(1))  # noqa: DTZ001 - the point
    assert feed.newest(-1) == -1


def test_a_change_that_would_block_every_reader_is_refused(store: penstock.Store, store_url: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("data", pa.string())])
    feed = penstock.QueueFeed.create("open", schema, CONTRACT, store=store_url)
    for row, condition in (
        ({"id": 1, "_change_type": "upsert"}, "UNEXPECTED_CHANGE_TYPE"),
        ({"id": None, "_change_type": "insert"}, "NULL_ROW_ID"),
    ):
        with pytest.raises(ChangelogContractViolationError) as caught:
            feed.append_commit(1, at(1), [{"id": 5, "_change_type": "insert"}, row])
        assert caught.value.condition == f"CHANGELOG_CONTRACT_VIOLATION.{condition}"
    assert feed.newest(-1) == -1


def test_a_feed_refuses_rows_without_a_commit(store: penstock.Store, feed: penstock.QueueFeed) -> None:
    row = {**inserts(1)[0], "_commit_version": 1, "_commit_timestamp": at(1)}
    with pytest.raises(InvalidInputError, match=r"CHANGE_FEED_QUEUE\].*append_commit"):
        store.queue("feed").append([row])
    with pytest.raises(InvalidInputError, match=r"CHANGE_FEED_QUEUE\].*append_commit"):
        store.producer("feed", "p").append([row])


def test_concurrent_writers_repeat_and_lose_no_commit(
    feed: penstock.QueueFeed, store: penstock.Store
) -> None:
    done: list[tuple[int, int]] = []

    def write(writer: int) -> None:
        for number in range(10):
            for version in range(feed.newest(-1) + 1, 10_000):
                try:
                    feed.append_commit(version, START, inserts(writer * 100 + number))
                except CommitOutOfOrderError:
                    continue
                done.append((version, writer * 100 + number))
                break

    threads = [threading.Thread(target=write, args=[writer]) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({version for version, _ in done}) == 30
    assert rows(feed, -1, 10_000) == Counter(done)


def test_trimmed_commits_are_named_as_lost_and_the_rest_is_read(
    store: penstock.Store, feed: penstock.QueueFeed
) -> None:
    for version in range(10):
        feed.append_commit(version, at(version), inserts(*range(30)))
    queue = store.queue("feed")
    for partition in range(3):
        # In the middle of a commit: the rest of it is of no use.
        info = queue.info().partitions[partition]
        queue.trim(partition, before=info.next_index // 2 + 1)
    oldest = feed.open().oldest()
    assert oldest == 5
    with pytest.raises(DataLostError, match="start from version 6"):
        feed.open().tasks(oldest - 1, 9, 1000)
    with pytest.raises(DataLostError):
        list(feed.open().commits(-1, 9))
    expected = Counter((version, id) for version in range(6, 10) for id in range(30))
    assert rows(feed, oldest, 9) == expected
    feed.append_commit(10, at(10), [])
    assert feed.open().oldest() == 5
    assert rows(feed, 5, 10) == expected
    assert [commit.version for commit in feed.open().commits(5, 10)] == [6, 7, 8, 9, 10]


def test_the_oldest_commit_is_whole_in_every_partition(
    store: penstock.Store, feed: penstock.QueueFeed
) -> None:
    for version in range(10):
        feed.append_commit(version, at(version), inserts(*range(30)))
    queue = store.queue("feed")
    queue.trim(2, before=queue.info().partitions[2].next_index // 2)
    assert feed.open().oldest() == 4
    assert rows(feed, 4, 9) == Counter((version, id) for version in range(5, 10) for id in range(30))


def test_changes_read_in_pieces_in_one_process_are_the_same(
    feed: penstock.QueueFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(6):
        feed.append_commit(version, at(version), inserts(version, version + 10))

    def found(mode: str) -> list[list[int]]:
        tables = reading.local_changes(feed.open(), -1, 5, ChangeOptions(mode, False, EVER))
        return [sorted(table["id"].to_pylist()) for table in tables]

    whole = sorted([*range(6), *range(10, 16)])
    assert found("dropCarryovers") == found("netChanges") == [whole]
    monkeypatch.setattr(reading, "_ROWS_PER_TABLE", 5)
    assert found("dropCarryovers") == [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15]]
    assert found("netChanges") == [whole]


def test_commits_whose_rows_were_trimmed_are_forgotten(
    store: penstock.Store, feed: penstock.QueueFeed
) -> None:
    for version in range(20):
        feed.append_commit(version, at(version), inserts(*range(6)))
    queue = store.queue("feed")
    for partition in range(3):
        queue.trim(partition, before=queue.info().partitions[partition].next_index)
    feed.append_commit(20, at(20), inserts(1))
    kept = store.database.run(lambda tx: feed_commits.list_page(tx, queue.record, -1), write=False)
    assert [commit.version for commit in kept] == [19, 20]
    assert feed.open().oldest() == 19
    assert rows(feed, 19, 20).keys() == {(20, 1)}


def test_a_recreated_feed_is_another_one(
    store: penstock.Store, store_url: str, feed: penstock.QueueFeed
) -> None:
    before = feed.open().describe()
    store.drop_queue("feed")
    with pytest.raises(QueueNotFoundError):
        feed.open().describe()
    penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url)
    assert feed.open().describe().identity != before.identity
    assert feed.open().describe().contract == before.contract == replace(CONTRACT, whole_commits=True)


def test_an_ordinary_queue_is_not_a_feed(store: penstock.Store, store_url: str) -> None:
    store.create_queue("rows", DATA)
    with pytest.raises(FeedUnavailableError, match=r"QueueFeed\.create") as caught:
        penstock.QueueFeed("rows", store_url).open().describe()
    assert caught.value.condition == "FEED_UNAVAILABLE.NOT_A_FEED"


def test_a_url_without_a_store_is_refused() -> None:
    with pytest.raises(FeedUnavailableError, match=r"queue:orders\?store=") as caught:
        penstock.changes.parse("queue:orders")
    assert caught.value.condition == "FEED_UNAVAILABLE.STORE_MISSING"


def test_a_contract_that_does_not_fit_the_schema_is_refused(store_url: str, feed: penstock.QueueFeed) -> None:
    with pytest.raises(InvalidChangelogSchemaError, match="'id'"):
        penstock.QueueFeed.create("other", DATA, penstock.ChangeContract("idd"), store=store_url)
    with pytest.raises(InvalidChangelogSchemaError, match="leave it out"):
        penstock.QueueFeed.create(
            "other", pa.schema([*DATA, ("_Change_Type", pa.string())]), CONTRACT, store=store_url
        )
    with pytest.raises(AlreadyExistsError):
        penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url)


@pytest.mark.parametrize(
    "contract",
    [
        '{"a": NaN}',
        '{"a": 1}',
        '{"self": 1}',
        "{}",
        '{"row_id": NaN}',
        '{"row_id": [["id"]]}',
        '{"row_id": []}',
        '{"row_id": "id", "carryover_rows": 1}',
        '{"row_id": ["gone"]}',
        '{"row_id": "id", "sequence": "gone"}',
        f'{{"row_id": "id", "{"x" * 5000}": 1}}',
    ],
)
def test_a_damaged_contract_is_refused_by_name(
    feed: penstock.QueueFeed, store: penstock.Store, contract: str
) -> None:
    run_sql(store.database, f"update penstock.queue set contract = '{contract}' where name = 'feed'")
    for work in (
        lambda: feed.open().describe(),
        lambda: penstock.QueueFeed("feed", feed.store).append_commit(1, at(1), inserts(1)),
    ):
        with pytest.raises(StoreError, match="the contract of queue 'feed' is not what Penstock") as caught:
            work()
        assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"
        assert len(caught.value.message) < 500


def test_a_contract_of_a_queue_without_metadata_columns_is_refused_by_name(
    store: penstock.Store, store_url: str
) -> None:
    store.create_queue("rows", DATA)
    run_sql(store.database, """update penstock.queue set contract = '{"row_id": "id"}'""")
    with pytest.raises(StoreError, match="its queue has no column _change_type of type string") as caught:
        penstock.QueueFeed("rows", store_url).open().describe()
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", ["[1, 1, 1, 1]", "[-1, 0, 0]", "[true, 0, 0]", "[1000000000000, 0, 0]"])
def test_a_commit_with_rows_that_no_partition_has_is_refused_by_name(
    feed: penstock.QueueFeed, store: penstock.Store, ends: str
) -> None:
    """They would become tasks without end."""
    for version in range(3):
        feed.append_commit(version, at(version), inserts(version))
    run_sql(store.database, f"update penstock.feed_commit set ends = '{ends}' where version = 1")
    with pytest.raises(StoreError, match="commit 1 of a feed is not what Penstock writes") as caught:
        rows(feed, 0, 1)
    assert caught.value.condition == "STORE_ERROR.UNREADABLE_RECORD"


def test_the_url_gives_the_same_feed(feed: penstock.QueueFeed) -> None:
    odd = penstock.QueueFeed("a ?&%/é#", feed.store)
    assert penstock.changes.parse(odd.url) == odd
    assert feed.store not in repr(feed)


def test_a_restored_queue_has_other_names_for_commits_that_were_read(
    store: penstock.Store, feed: penstock.QueueFeed
) -> None:
    """A stream compares the name of its last commit with the one in its checkpoint."""
    for version in (1, 2, 4):
        feed.append_commit(version, at(version), inserts(version))
    opened = feed.open()
    names = {version: opened.commit_name(version) for version in (1, 2, 4)}
    assert len(set(names.values())) == 3
    assert None not in names.values()
    restored = penstock.QueueFeed.create("restored", DATA, CONTRACT, store=feed.store)
    restored.append_commit(1, at(1), inserts(1))
    behind = restored.open()
    assert behind.commit_name(1) == names[1]
    assert behind.commit_name(2) != names[2]
    restored.append_commit(2, at(9), inserts(9))
    assert behind.commit_name(2) != names[2]


def test_a_trimmed_commit_has_no_name(store: penstock.Store, feed: penstock.QueueFeed) -> None:
    opened = feed.open()
    assert opened.commit_name(7) is None
