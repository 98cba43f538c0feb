"""One record that somebody has written into the store by hand blinds nobody: the page and the metrics show
all others, and name it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest

import penstock
from penstock.arrow.segments import encode
from penstock.feeds.contract import DEAD_LETTERS
from penstock.store.records import queries
from penstock.store.records.queries import QueryProgress, QueryRun
from penstock.ui import queues
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, EncodedSnapshot
from tests.support.commands import run_penstock
from tests.support.raw_sql import run_sql, write_unchecked

HUGE = 2**63 - 1
DEEP = "[" * 100_000
MOST_BYTES = 100_000
LATENCY = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
PROGRESS_MADE = QueryProgress(3, 10, 9, LATENCY, 20.0, {"a": 20.0}, 7, 8, 9, ("slow",))


@pytest.fixture
def filled(store: penstock.Store) -> penstock.Store:
    """A store with two queues, two consumers and two queries."""
    for name in ("bad", "good"):
        store.create_queue(name, pa.schema([("id", pa.int64())])).append([{"id": 1}])
        store.create_consumer(name).register(name)
        run = QueryRun(name, "run", name, "continuous", 5)
        store.database.run(lambda tx, run=run: queries.begin(tx, run))
        store.database.run(lambda tx, run=run: queries.report(tx, run, PROGRESS_MADE))
    return store


def shown(url: str) -> dict[str, Any]:
    """The newest of three snapshots, after its JSON and its metrics have been made."""
    collector = Collector(url)
    try:
        for _ in range(3):
            snapshot = collector.collect()
            text = EncodedSnapshot.of(snapshot).text
            metrics = exposition(snapshot)
            assert len(text) < MOST_BYTES
            assert len(metrics) < MOST_BYTES
        assert json.loads(text, parse_constant=_refuse)["store"]["error"] is None
        assert f"penstock_unreadable_records {float(snapshot['unreadable'])}" in metrics.decode()
        return snapshot
    finally:
        collector.close()


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(constant)


PROGRESS = "query_progress set {} = ? where query_id = 'bad'"
QUERY = "query set {} = ? where query_id = 'bad'"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        *(
            (PROGRESS.format("durations"), value)
            for value in ("x", DEEP, "5", '{"a": "b"}', '{"a": [1]}', '{"a": Infinity}', '{"a": 1e999}')
        ),
        (PROGRESS.format("durations"), '{"a": 1%s}' % ("0" * 400)),
        (PROGRESS.format("durations"), json.dumps(dict.fromkeys(map(str, range(1000)), 1))),
        (PROGRESS.format("durations"), '{"a": 1e308, "b": 1e308}'),
        (PROGRESS.format("durations"), '{"a": 1%s}' % ("0" * 308)),
        (PROGRESS.format("durations"), '{"a": -1}'),
        ("position set next_index = ?", HUGE),
        ("position set next_index = ?", 2),
        ("partition set partition = ?", 7),
        ("queue set retention_rows = ? where name = 'bad'", -1),
        *((PROGRESS.format("warnings"), value) for value in ("x", DEEP, "5")),
        (PROGRESS.format("watermark"), HUGE),
        (PROGRESS.format("watermark"), -HUGE),
        (PROGRESS.format("finalized_until"), HUGE),
        (QUERY.format("state"), "odd"),
        *((QUERY.format(column), HUGE) for column in ("started_at", "reported_at")),
        ("queue set key_columns = ? where name = 'bad'", "5"),
        ("queue set key_columns = ? where name = 'bad'", DEEP),
        ("queue set payloads = ? where name = 'bad'", ""),
        ("queue set payloads = ? where name = 'bad'", "folder"),
        ("queue set payloads = ? where name = 'bad'", "s3://bucket/folder/"),
        ("segment set first_timestamp = ? where start_index = 0", HUGE),
        ("partition set last_timestamp = ?", HUGE),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_read_is_named_and_hides_nothing_else(
    filled: penstock.Store, store_url: str, change: str, value: object
) -> None:
    write_unchecked(filled, change, value)
    snapshot = shown(store_url)
    assert snapshot["unreadable"] > 0
    assert any("cannot be shown" in note for note in snapshot["notes"])
    assert "good" in [query["name"] for query in snapshot["queries"]]
    if change.startswith("query"):
        assert len(snapshot["queues"]) == len(snapshot["consumers"]) == 2
        bad = [query for query in snapshot["queries"] if query["name"] == "bad"]
        # A report that cannot be read does not hide its query.
        assert len(bad) == (change.startswith("query_progress"))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        *((PROGRESS.format(column), float("inf")) for column in ("p50", "p90", "p99", "max", "duration")),
        (PROGRESS.format("warnings"), '[1, [2], "%s"]' % ("x" * 5000)),
        *((QUERY.format("spark_ui"), value) for value in ("http://[::1", "javascript:alert(1)", "x" * 10**7)),
        *((QUERY.format(column), "x" * 10**7) for column in ("name", "error_message", "source", "run_id")),
        ("queue set name = ? where name = 'bad'", "x" * 10**5),
        ("consumer set name = ? where name = 'bad'", "x" * 10**5),
        ("queue set schema = ? where name = 'bad'", bytes(10**7)),
        ("partition set next_index = ?", 10**12),
        (PROGRESS.format("reported_at"), 250_000_000_000_000_000),
    ],
)  # fmt: skip
def test_odd_values_are_bounded_and_hide_nothing(
    filled: penstock.Store, store_url: str, change: str, value: object
) -> None:
    write_unchecked(filled, change, value)
    snapshot = shown(store_url)
    assert [len(snapshot[kind]) for kind in ("queues", "consumers", "queries")] == [2, 2, 2]


def test_text_of_a_file_that_is_not_utf8_is_shown(filled: penstock.Store, store_url: str) -> None:
    if filled.database.dialect == "sqlite":
        run_sql(filled.database, "update penstock_query set name = cast(x'ff' as text) where name = 'bad'")
        assert {query["name"] for query in shown(store_url)["queries"]} == {"\\xff", "good"}
        listed = run_penstock("query", "list", "--url", store_url)
        assert listed.code == 0
        assert "good" in listed.out


def test_names_that_are_equal_once_they_are_cut_are_one_series(
    filled: penstock.Store, store_url: str
) -> None:
    """Prometheus refuses all metrics of a page on which a series occurs twice."""
    for name in ("bad", "good"):
        write_unchecked(filled, "queue set name = ? where name = ?", "x" * 300 + name, name)
        run = QueryRun("y" * 64 + name, "run", name, "continuous", 5)
        filled.database.run(lambda tx, run=run: queries.begin(tx, run))
        filled.database.run(lambda tx, run=run: queries.report(tx, run, PROGRESS_MADE))
    snapshot = shown(store_url)
    assert [len(snapshot[kind]) for kind in ("queues", "queries")] == [2, 2]
    assert "its id is longer than 64 characters" in str(snapshot["notes"])
    series = [line.rpartition(" ")[0] for line in exposition(snapshot).decode().splitlines()]
    assert len(series) == len(set(series))


def test_dead_letters_are_read_from_the_partitions_that_were_appended_to_last(
    store: penstock.Store, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a queue of many partitions would be read as a whole."""
    queue = store.create_queue("letters", DEAD_LETTERS, partitions=20)
    for number in range(20):
        letter = {"reason": str(number), "topic": None, "partition": None, "offset": None, "value": "v"}
        queue.append([letter], partition=number)
    read, seen = queues.reading.read, []

    def counted(*arguments: Any, **more: Any) -> Any:
        seen.append(arguments[2])
        return read(*arguments, **more)

    monkeypatch.setattr(queues.reading, "read", counted)
    collector = Collector(store_url)
    (letters,) = collector.collect()["dead_letters"]
    collector.close()
    assert [each["reason"] for each in letters["newest"]] == ["19", "18", "17", "16", "15"]
    assert len(seen) == 5


def test_what_is_reported_after_a_wrong_time_is_shown(filled: penstock.Store, store_url: str) -> None:
    """A report of the year 9892 does not hide the next ones."""
    write_unchecked(filled, PROGRESS.format("reported_at"), 250_000_000_000_000_000)
    write_unchecked(filled, QUERY.format("reported_at"), 250_000_000_000_000_000)
    collector = Collector(store_url)
    collector.collect()
    run = QueryRun("bad", "run", "bad", "continuous", 5)
    filled.database.run(lambda tx: queries.report(tx, run, QueryProgress(4, 1)))
    assert [query["batch"] for query in collector.collect()["queries"] if query["name"] == "bad"] == [4]
    collector.close()


def test_dead_letters_that_cannot_be_read_are_named(filled: penstock.Store, store_url: str) -> None:
    for name in ("letters", "other letters"):
        queue = filled.create_queue(name, DEAD_LETTERS)
        queue.append([{"reason": "r", "topic": None, "partition": None, "offset": None, "value": "v"}])
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    other = [pa.nulls(1, field.type) for field in list(DEAD_LETTERS)[1:]]
    bad = encode(pa.RecordBatch.from_arrays([text, *other], schema=DEAD_LETTERS)).to_pybytes()
    latest = "(select max(payload_id) from penstock.payload)"
    for data in (b"nonsense", bad):
        write_unchecked(filled, f"payload set data = ? where payload_id = {latest}", data)
        snapshot = shown(store_url)
        assert [len(each["newest"]) for each in snapshot["dead_letters"]] == [1, 0]
        assert "the newest rows of queue 'other letters' cannot be shown" in str(snapshot["notes"])


def test_the_command_lists_the_other_queries(filled: penstock.Store, store_url: str) -> None:
    write_unchecked(filled, QUERY.format("state"), "odd")
    found = run_penstock("query", "list", "--url", store_url)
    assert found.code == 0
    assert "good" in found.out
    assert "'bad' cannot be shown" in found.err


def test_a_commit_far_below_zero_hides_nothing(filled: penstock.Store, store_url: str) -> None:
    run_sql(
        filled.database,
        "insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, committed_at) "
        "values ('table:t', 'a', -9223372036854775808, -1, '[]', 1, 1)",
    )
    assert len(shown(store_url)["queues"]) == 2


def test_the_list_of_lags_leaves_out_a_consumer_that_cannot_be_read(
    filled: penstock.Store, store_url: str
) -> None:
    run_sql(
        filled.database,
        "update penstock.segment set first_timestamp = first_timestamp - 1 "
        "where queue_id = (select queue_id from penstock.queue where name = 'bad')",
    )
    found = run_penstock("consumer", "lag", "--url", store_url)
    assert found.code == 0
    assert "good" in found.out
    assert "'bad' cannot be shown" in found.err


def test_long_and_odd_texts_of_a_checkpoint_are_cut(
    store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    (tmp_path / "ck" / "offsets").mkdir(parents=True)
    queue = "x" * 10**6
    offset = {"store": "s", "queue": queue, "generation": 1, "from": [0], "to": [1]}
    (tmp_path / "ck" / "metadata").write_text(json.dumps({"id": "\ud800" + "y" * 10**6}))
    (tmp_path / "ck" / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(offset)}")
    collector = Collector(store_url, [str(tmp_path / "ck")])
    snapshot = collector.collect()
    collector.close()
    assert len(snapshot["queries"]) == 1
    assert len(EncodedSnapshot.of(snapshot).text) < MOST_BYTES
    assert len(exposition(snapshot)) < MOST_BYTES


def test_a_deeply_nested_checkpoint_is_a_note(store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    (tmp_path / "ck" / "offsets").mkdir(parents=True)
    (tmp_path / "ck" / "metadata").write_text(DEEP)
    (tmp_path / "ck" / "offsets" / "0").write_text(f"v1\n{DEEP}\n{DEEP}")
    collector = Collector(store_url, [str(tmp_path / "ck")])
    assert collector.collect()["notes"]
    exposition(collector.collect())
    collector.close()
