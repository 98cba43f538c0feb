"""What is remembered of a feed's commits: within a micro-batch, across micro-batches, across runs."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from penstock.changes import commit_tracker as module
from penstock.changes.commit_tracker import COMPACT_EVERY, FeedCommits, Journal, Versions
from penstock.changes.stage import Scope, SeenCommits, commits_in
from penstock.errors import ChangelogContractViolationError, StoreUnavailableError
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.driver_endpoint import Address, DriverEndpoint
from penstock.testing import replay_last_batch
from tests.support.change_frames import Files, Row, Sink, contract

START = 1_700_000_000_000_000


def row(key: int, version: int, time: int | None = None) -> Row:
    return key, "a", version, "insert", version, START + version * 1_000_000 if time is None else time


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(Checkpoint(str(tmp_path)), "feed")


def facts(
    batch: int, commits: dict[object, int], *, run: str = "r", delay_ms: int | None = None
) -> SeenCommits:
    versions = pa.array(
        commits.keys(), pa.string() if any(isinstance(v, str) for v in commits) else pa.int64()
    )
    commit_rows = pa.table({"version": versions, "timestamp": pa.array(commits.values(), pa.int64())})
    return SeenCommits(Scope("feed", "7", "query", run, batch, delay_ms), commit_rows)


def test_facts_are_serialized_as_bytes() -> None:
    commit_rows = facts(3, {"v1": 1, "v2": 2}, delay_ms=5)
    assert SeenCommits.from_bytes(commit_rows.to_bytes()) == commit_rows


def test_facts_of_distinct_commits_are_found() -> None:
    versions = pa.chunked_array([[1, 1, 2], [2, 1]])
    times = pa.chunked_array([[5, 5, 6], [6, 7]]).cast(pa.timestamp("us", tz="UTC"))
    found = commits_in(versions, times).to_pylist()
    assert {(each["version"], each["timestamp"]) for each in found} == {(1, 5), (2, 6), (1, 7)}


@pytest.mark.parametrize("name", ["{}", "v{}"])
def test_a_commit_in_two_micro_batches_is_reported(journal: Journal, name: str) -> None:
    def versions(*numbers: int) -> dict[object, int]:
        return {(n if name == "{}" else name.format(n)): START + n for n in numbers}

    memory = FeedCommits(facts(0, {}).scope, journal)
    memory.add(facts(0, versions(1, 2)))
    memory.add(facts(0, versions(2, 3)))
    memory.add(facts(1, versions(4)))
    with pytest.raises(
        ChangelogContractViolationError, match="is in micro-batch 1 and also in an earlier one"
    ) as caught:
        memory.add(facts(1, versions(2, 5)))
    assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.COMMIT_IN_SEVERAL_MICRO_BATCHES"
    memory.add(facts(0, versions(9)))
    memory.add(facts(2, versions(9)))
    # Another run, whose driver knows what is on disk alone; the last micro-batch comes again.
    again = FeedCommits(facts(2, {}, run="s").scope, journal)
    again.add(facts(2, versions(9)))
    for version in (1, 2, 3, 4):
        with pytest.raises(ChangelogContractViolationError):
            again.add(facts(2, versions(version)))
    # Set back by its user, and told of other commits now.
    back = FeedCommits(facts(1, {}, run="t").scope, journal)
    back.add(facts(1, versions(4, 9)))


def test_a_late_commit_is_reported(journal: Journal) -> None:
    first = FeedCommits(facts(0, {}, delay_ms=2).scope, journal)
    first.add(facts(0, {1: 10_000, 2: 20_000}))
    first.add(facts(0, {3: 1_000}))
    for memory in (first, FeedCommits(facts(1, {}, run="s", delay_ms=2).scope, journal)):
        for late in (18_000, 18_999, 1):
            with pytest.raises(
                ChangelogContractViolationError, match="commit 9 at 1970-01-01T00:00:00"
            ) as caught:
                memory.add(facts(1, {9: late, 8: 30_000}))
            assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.LATE_COMMIT"
        memory.add(facts(1, {4: 19_000, 5: 21_000, 2: 20_000}))
        with pytest.raises(ChangelogContractViolationError, match="two timestamps"):
            memory.add(facts(1, {2: 20_001}))


def test_a_commit_before_1970_is_reported_where_spark_would_drop_it(journal: Journal) -> None:
    for time in (-10_000_000, -1, 0, 999):
        memory = FeedCommits(facts(0, {}, delay_ms=0).scope, journal)
        with pytest.raises(ChangelogContractViolationError) as caught:
            memory.add(facts(0, {1: time}, delay_ms=0))
        assert caught.value.condition == "CHANGELOG_CONTRACT_VIOLATION.COMMIT_BEFORE_1970"


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), max_size=20))
def test_the_set_of_versions_forgets_the_oldest(parts: list[list[int]]) -> None:
    saved = module.GENERATION, module.GENERATIONS
    module.GENERATION, module.GENERATIONS = 10, 100
    try:
        versions, seen = Versions(), set()
        for part in parts:
            assert set(versions.among(part)) == seen & set(part)
            versions.add(part)
            seen |= set(part)
    finally:
        module.GENERATION, module.GENERATIONS = saved


def test_the_number_of_remembered_commits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GENERATION", 10)
    monkeypatch.setattr(module, "GENERATIONS", 3)
    versions = Versions()
    for start in range(0, 100, 10):
        versions.add(range(start, start + 10))
    assert set(versions.among(range(100))) == set(range(70, 100))


def test_many_files_are_merged_into_one(journal: Journal, tmp_path: Path) -> None:
    memory = FeedCommits(facts(0, {}).scope, journal)
    for batch in range(3 * COMPACT_EVERY):
        memory.add(facts(batch, {batch: START + batch}))
    assert len(list((tmp_path / "penstock" / "changes" / "feed").iterdir())) <= COMPACT_EVERY + 1
    again = FeedCommits(facts(3 * COMPACT_EVERY, {}, run="s").scope, journal)
    for version in (0, 1, COMPACT_EVERY, 3 * COMPACT_EVERY - 1):
        with pytest.raises(ChangelogContractViolationError):
            again.add(facts(3 * COMPACT_EVERY, {version: START + version}))


# On streams.


def violation(done: object, sink: Sink) -> str:
    with pytest.raises(Exception, match="CHANGELOG_CONTRACT_VIOLATION") as caught:
        sink.run(done)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_violation_of_whole_commits_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=True))
    files.add([row(1, 1)], [row(2, 2)], [row(3, 1)], [row(4, 4)])
    commit_rows = violation(done, sink)
    assert "commit 1 is in micro-batch 2" in commit_rows
    assert sink.rows() == Counter([row(1, 1), row(2, 2)])


def test_a_violation_after_a_restart_and_a_replay_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=True))
    files.add([row(1, 1)], [row(2, 2)])
    sink.run(done)
    assert replay_last_batch(sink.checkpoint) == 1
    files.add([row(3, 3)])
    again = penstock.changes.post_process(files.read(), contract("CU", whole_commits=True))
    assert sink.run(again) == Counter([row(1, 1), row(2, 2), row(3, 3)])
    files.add([row(4, 2)])
    assert "commit 2 is in micro-batch 3" in violation(again, sink)


def test_a_new_checkpoint_remembers_no_commits(spark: SparkSession, tmp_path: Path) -> None:
    files, sink = Files(spark, tmp_path), Sink(tmp_path)
    done = penstock.changes.post_process(files.read(), contract("CU", whole_commits=True))
    files.add([row(1, 1)])
    sink.run(done)
    shutil.rmtree(sink.checkpoint)
    assert sink.run(done) == Counter([row(1, 1)])


def test_two_feeds_in_one_query_are_tracked_separately(spark: SparkSession, tmp_path: Path) -> None:
    both = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files = Files(spark, tmp_path / name)
        files.add([row(1, 1)], [row(2, 2)])
        both.append(
            penstock.changes.post_process(
                files.read(1 if name == "one" else 2), contract("CU", whole_commits=True)
            )
        )
    assert Sink(tmp_path).run(both[0].union(both[1])) == Counter([row(1, 1), row(2, 2)] * 2)


# The socket.


def test_requests_without_the_secret_are_refused(spark: SparkSession) -> None:
    endpoint = DriverEndpoint(spark, lambda question: question[::-1])
    address = endpoint.address
    assert address.ask(b"abc") == b"cba"
    assert address.host == "127.0.0.1"
    wrong = Address(address.host, address.port, b"guess")
    with pytest.raises(StoreUnavailableError, match="is not the driver"):
        wrong.ask(b"abc")
    assert str(address.secret) not in repr(address)
    assert address.ask(b"") == b""
    endpoint.close()
    with pytest.raises(StoreUnavailableError, match=r"spark\.driver\.host"):
        address.ask(b"abc")
