"""Delta tables as change feeds: whatever happens to a table, replaying its changes gives the table at
every version.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.changes.options import ChangeOptions, ChangeRange
from penstock.changes.reading import local_changes
from penstock.errors import (
    ChangelogContractViolationError,
    DataLostError,
    InvalidChangelogSchemaError,
    InvalidInputError,
    InvalidUrlError,
)
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.delta import DeltaFeed
from tests.feeds.delta.tables import (
    ODD,
    PLAIN,
    SCHEMA,
    History,
    check_replay,
    edit,
    log_file,
    refused,
    rows,
    switch,
)
from tests.support.feed_reading import changes, passed

OPERATIONS = ["append", "append", "merge", "merge", "update", "delete", "delete_all", "overwrite", "optimize"]


@st.composite
def steps(draw: st.DrawFn, values: Sequence[str | None]) -> tuple[str, pa.Table]:
    ids = draw(st.lists(st.integers(0, 8), unique=True, min_size=1, max_size=6))
    some = [
        (each, draw(st.sampled_from(values)), draw(st.sampled_from([0.0, 1.5, 3.0, None]))) for each in ids
    ]
    return draw(st.sampled_from(OPERATIONS)), rows(*some)


@pytest.mark.few(2)
@pytest.mark.parametrize("partitioned", [True, False], ids=["partitioned", "flat"])
@pytest.mark.parametrize("feed", [True, False], ids=["feed", "files"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_replaying_the_changes_of_any_history_gives_the_table_at_every_version(
    tmp_path_factory: pytest.TempPathFactory, feed: bool, partitioned: bool, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("history") / "table"
    history = History(path, feed=feed, partitioned=partitioned)
    values = data.draw(st.sampled_from([ODD, PLAIN]))
    for operation, new in data.draw(st.lists(steps(values), min_size=2, max_size=8)):
        getattr(history, operation)(new)
    newest = history.table.version()
    delta = DeltaFeed(path, "id").open()
    contract = delta.describe().contract
    rewritten = not feed or any(overwrites(path, version) for version in range(newest + 1))
    assert (contract.carryover_rows, contract.updates_as_delete_and_insert) == (rewritten, rewritten)
    cuts = sorted({-1, newest, *data.draw(st.lists(st.integers(-1, newest), max_size=3))})
    per_task = data.draw(st.integers(1, 12))
    found = pa.concat_tables(
        [changes(delta, after, upto, per_task=per_task) for after, upto in pairwise(cuts)]
    )
    check_replay(path, passed(delta, found))
    check_replay(path, passed(delta, found, updates=True))
    overwritten = DeltaFeed(path, "id", overwrites=True).open()
    check_replay(path, passed(overwritten, changes(overwritten), updates=True))
    # deltalake's own reader does not find the files of odd partitions.
    if feed and (values is PLAIN or not partitioned):
        assert counted(found) == counted(load_cdf(path))
    for commit in delta.commits(-1, newest, 10**9):
        assert commit.rows == found.filter(pc.equal(found[COMMIT_VERSION], commit.version)).num_rows


def overwrites(path: Path, version: int) -> bool:
    """Whether a version replaces files and has no change data files."""
    actions = [json.loads(line) for line in log_file(path, version).read_text().splitlines()]
    kinds = {
        kind
        for action in actions
        for kind, value in action.items()
        if value.get("dataChange") or kind == "cdc"
    }
    return {"add", "remove"} <= kinds and "cdc" not in kinds


def load_cdf(path: Path | str) -> pa.Table:
    return pa.table(DeltaTable(str(path)).load_cdf(starting_version=0).read_all())


def counted(found: pa.Table) -> Counter[tuple[object, ...]]:
    names = [*SCHEMA.names, CHANGE_TYPE, COMMIT_VERSION]
    times = found[COMMIT_TIMESTAMP].cast(pa.timestamp("us")).cast(pa.int64())
    return Counter(
        (*row.values(), time)
        for row, time in zip(found.select(names).to_pylist(), times.to_pylist(), strict=True)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def test_a_feed_that_was_turned_off_temporarily_is_read_from_the_start(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    switch(path, False)
    history.update(rows((1, "a", 5.0)))
    switch(path, True)
    history.update(rows((2, "b", 6.0)))
    feed = DeltaFeed(path, "id").open()
    check_replay(path, passed(feed, changes(feed), updates=True))


def test_a_removed_file_of_an_unknown_partition_is_refused(path: Path) -> None:
    history = History(path, feed=False, partitioned=True)
    history.append(rows((1, "a", 1.0), (2, "a", 2.0)))
    history.update(rows((1, "a", 5.0)))
    last = log_file(path, history.table.version())
    actions = [json.loads(line) for line in last.read_text().splitlines()]
    for action in actions:
        action.get("remove", {}).pop("partitionValues", None)
    last.write_text("\n".join(map(json.dumps, actions)))
    with refused("PARTITION_UNKNOWN", "begin after that version"):
        DeltaFeed(path, "id").open().tasks(-1, history.table.version(), 10)


def test_an_overwrite_that_is_not_in_the_change_data_feed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0), (3, "c", 3.0)))
    running, expecting = DeltaFeed(path, "id").open(), DeltaFeed(path, "id", overwrites=True).open()
    planned, expected = running.describe(), expecting.describe()
    assert (planned.contract.carryover_rows, expected.contract.carryover_rows) == (False, True)
    history.overwrite(rows((1, "a", 1.0), (2, "b", 5.0), (4, "d", 4.0)))
    newest = history.table.version()

    (task,) = running.tasks(newest - 1, newest, 100)
    with refused("ROWS_OVERWRITTEN", f"version {newest} .*Start the query again with the same checkpoint"):
        list(running.read(task, planned.planned_schema))
    (task,) = expecting.tasks(newest - 1, newest, 100)
    assert sum(batch.num_rows for batch in expecting.read(task, expected.planned_schema)) == 6
    for feed in (DeltaFeed(path, "id"), DeltaFeed(path, "id", overwrites=True)):
        opened = feed.open()
        last = passed(opened, changes(opened, newest - 1), updates=True).to_pylist()
        assert {(row["id"], row[CHANGE_TYPE]) for row in last} == {
            (2, "update_preimage"),
            (2, "update_postimage"),
            (3, "delete"),
            (4, "insert"),
        }

    as_delta_has_it = DeltaFeed(path).open()
    assert as_delta_has_it.describe().contract is None
    with caplog.at_level("WARNING", "penstock.feeds"):
        as_delta_has_it.tasks(-1, newest, 100)
    (record,) = caplog.records
    assert (record.action, record.versions) == ("rows_overwritten", [newest])
    assert changes(as_delta_has_it).num_rows == 3 + 6


@pytest.mark.parametrize("feed_on", [True, False])
def test_a_table_without_a_key_may_hold_nulls_and_equal_rows(path: Path, feed_on: bool) -> None:
    history = History(path, feed=feed_on, partitioned=False)
    same, unknown = (1, "a", 1.0), (2, None, None)
    history.append(rows(same, same, same, unknown))
    history.overwrite(rows(same, same, unknown, (3, None, 3.0)))
    opened = DeltaFeed(path, ["id", "p", "v"], overwrites=True).open()
    newest = history.table.version()
    last = passed(opened, changes(opened, newest - 1), updates=True).to_pylist()
    assert sorted((row["id"], row[CHANGE_TYPE]) for row in last) == [(1, "delete"), (3, "insert")]
    (net,) = local_changes(opened, -1, newest, ChangeOptions.of("netChanges", True, None))
    assert sorted(net["id"].to_pylist()) == [1, 1, 2, 3]
    assert set(net[CHANGE_TYPE].to_pylist()) == {"insert"}
    with pytest.raises(ChangelogContractViolationError, match="NULL_ROW_ID"):
        passed(DeltaFeed(path, ["id", "p"], overwrites=True).open(), changes(opened))


def test_the_option_for_overwrites_is_part_of_the_url(path: Path) -> None:
    feed = DeltaFeed(path, "id", overwrites=True)
    assert DeltaFeed.from_url(feed.url) == feed
    with pytest.raises(InvalidUrlError, match=r"URL.VALUE\].*give true or false"):
        DeltaFeed.from_url("delta:/t?row_id=id&overwrites=treu")
    with pytest.raises(InvalidInputError, match="overwrites is True or False"):
        DeltaFeed(path, "id", overwrites="false")  # type: ignore[arg-type]  # on purpose
    History(path, feed=True, partitioned=False)
    with pytest.raises(InvalidChangelogSchemaError, match=r"has overwrites.*row_id"):
        DeltaFeed(path, overwrites=True).open().describe()


def test_a_feed_turned_on_later_is_read_from_the_start_only_with_a_row_id(
    path: Path,
) -> None:
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0), (3, "c", 3.0)))
    history.update(rows((1, "a", 1.0)))
    history.update(rows((1, "a", 1.0)))
    switch(path, True)
    history.update(rows((1, "a", 1.0), (2, "a", 1.0)))
    history.append(rows((9, "z", 0.0)))
    bare = DeltaFeed(path).open()
    assert bare.describe().contract is None
    assert bare.oldest() == 3
    with refused("BEGINS_LATE", "starting_version=4"):
        bare.prepare()
    with refused("FEED_NOT_ENABLED", r"versions 2 to 3.*delta:PATH\?row_id=COLUMN") as raised:
        bare.tasks(-1, 6, 10)
    assert raised.value.parameters["versions"] == [2, 3]
    # Files that are only added, or only removed, tell their rows without a feed.
    assert changes(bare, -1, 1).num_rows == 3
    check_replay(path, changes(bare, 3), first=4)
    named = DeltaFeed(path, "id").open()
    assert named.describe().contract.carryover_rows
    assert named.prepare() == named.oldest() == -1
    found = changes(named)
    assert {"update_preimage", "delete"} <= set(found[CHANGE_TYPE].to_pylist())
    for updates in (False, True):
        check_replay(path, passed(named, found, updates=updates))


def test_a_feed_turned_on_before_any_row_was_rewritten_needs_no_passes(path: Path) -> None:
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    switch(path, True)
    history.update(rows((1, "a", 1.0)))
    feed = DeltaFeed(path, "id").open()
    assert not feed.describe().contract.carryover_rows
    check_replay(path, changes(feed))


def test_a_feed_turned_off_during_a_query_is_refused_and_resumes_with_a_new_query(
    path: Path,
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0), (3, "c", 3.0)))
    feed = DeltaFeed(path, "id").open()
    planned = feed.describe().planned_schema
    switch(path, False)
    history.update(rows((1, "a", 1.0)))
    (task,) = feed.tasks(1, 3, 100)
    with refused("ROWS_OVERWRITTEN", "version 3"):
        list(feed.read(task, planned))
    assert feed.describe().contract.carryover_rows
    check_replay(path, passed(feed, changes(feed)))


def test_optimizing_a_table_gives_no_changes(path: Path) -> None:
    history = History(path, feed=False, partitioned=False)
    for number in range(4):
        history.append(rows((number, "a", 1.0)))
    before = history.table.version()
    history.optimize(rows())
    feed = DeltaFeed(path, "id").open()
    assert history.table.version() == before + 1 == feed.newest(before)
    assert changes(feed, before).num_rows == 0
    assert [commit.rows for commit in feed.commits(before, before + 1)] == [0]
    check_replay(path, passed(feed, changes(feed)))


@pytest.mark.parametrize("feed_on", [True, False])
def test_vacuumed_versions_are_named_as_lost_and_the_others_are_read(path: Path, feed_on: bool) -> None:
    history = History(path, feed=feed_on, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    history.update(rows((1, "a", 1.0)))
    feed = DeltaFeed(path, "id").open()
    assert feed.oldest() == -1
    (task, *_) = feed.tasks(1, 2, 10)
    history.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    last = history.table.version()
    history.update(rows((1, "a", 1.0), (1, "a", 1.0)))
    assert feed.oldest() == 2
    with refused("BEGINS_LATE", "starting_version=3"):
        feed.prepare()
    with pytest.raises(DataLostError, match=f"versions 3 to {last + 1} can be read") as raised:
        feed.tasks(-1, 10, 10)
    assert raised.value.parameters["first"] == 3
    with pytest.raises(DataLostError, match="version 2 "):
        list(feed.read(task, feed.describe().schema))
    if not feed_on:
        with pytest.raises(DataLostError, match="version 2 "):
            list(feed.commits(1, 2, 10))
    found = changes(feed, 2)
    check_replay(path, passed(feed, found), first=3)
    assert DeltaFeed(path, "id").open().oldest() == 2


def test_a_cleaned_up_log_is_read_from_its_checkpoint(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    for number in range(3):
        history.append(rows((number, "a", 1.0)))
    history.table.create_checkpoint()
    history.append(rows((9, "a", 1.0)))
    for version in range(3):
        log_file(path, version).unlink()
    feed = DeltaFeed(path)
    opened = feed.open()
    assert opened.describe().identity == f"delta:{history.table.metadata().id}"
    assert opened.oldest() == 2
    with refused("BEGINS_LATE", "starting_version=3"):
        opened.prepare()
    with refused("BEGINS_LATE", "starting_version=3"):
        ChangeRange.of({"startingTimestamp": "2020-01-01T00:00:00Z"}).start(opened)
    times = [datetime.fromtimestamp(commit.timestamp / 1e6, UTC) for commit in opened.commits(2, 4)]
    assert times[0] < times[1]
    assert ChangeRange.of({"startingTimestamp": times[1]}).start(opened) == 3
    with pytest.raises(DataLostError, match="versions 3 to 4 can be read"):
        opened.tasks(0, 4, 10)
    with pytest.raises(DataLostError, match="versions 3 to 4 can be read"):
        list(opened.commits(0, 4))
    assert changes(opened, 2)["id"].to_pylist() == [2, 9]
    # A feed that knew the log before sees it too.
    log_file(path, 3).unlink()
    assert DeltaFeed(path, "id").open().describe().contract.carryover_rows is False
    assert opened.describe().contract is None
    assert opened.oldest() == 3


def test_new_commits_are_seen_and_versions_do_not_change(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    feed = DeltaFeed(path).open()
    for number in range(45):
        history.append(rows((number, "a", 1.0)))
        if number % 15 == 0:
            assert feed.newest(3) == max(history.table.version(), 3)
    assert feed.newest(-1) == history.table.version()
    assert feed.newest(1000) == 1000
    before = changes(feed, 3, 9)
    history.delete_all(rows())
    assert changes(feed, 3, 9).equals(before)
    assert len(feed.tasks(-1, 100, 10**6)) == 1


def test_a_table_recreated_during_a_read_is_detected(path: Path, tmp_path: Path) -> None:
    History(path, feed=True, partitioned=False)
    feed = DeltaFeed(path).open()
    before = feed.describe().identity
    path.rename(tmp_path / "old")
    with refused("TABLE_REPLACED"):
        feed.newest(-1)
    History(path, feed=True, partitioned=False).append(rows((1, "a", 1.0)))
    with refused("TABLE_REPLACED"):
        feed.newest(-1)
    assert feed.describe().identity != before
    assert feed.newest(-1) == 1


def test_the_time_of_a_commit_is_the_most_precise_one_in_the_log(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    history.append(rows((2, "a", 1.0)))
    edit(path, 0, commitInfo=lambda info: info.update(inCommitTimestamp=1_700_000_000_001, timestamp=5))
    edit(path, 1, commitInfo=lambda info: info.update(timestamp=1_700_000_000_002))
    edit(path, 2, commitInfo=lambda info: info.pop("timestamp"))
    written = log_file(path, 2).stat().st_mtime_ns // 1000
    times = [commit.timestamp for commit in DeltaFeed(path).open().commits(-1, 2)]
    assert times == [1_700_000_000_001_000, 1_700_000_000_002_000, written]
