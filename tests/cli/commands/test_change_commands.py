"""``penstock changes show`` and ``tail``."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from penstock import ChangeContract, QueueFeed
from penstock.cli.commands.changes import change_columns, change_style
from penstock.cli.text_output import TextOutput
from tests.support.commands import Penstock
from tests.support.waiting import readable, wait_until

DATA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string())])
CONTRACT = ChangeContract(
    "id", carryover_rows=True, updates_as_delete_and_insert=True, intermediate_changes=True
)
START = datetime(2026, 1, 1, tzinfo=UTC)
Append = Callable[..., None]


@pytest.fixture
def append(store_url: str) -> Append:
    def add(version: int, *rows: tuple[str, int, str]) -> None:
        changes = [{"id": id, "data": data, "_change_type": kind} for kind, id, data in rows]
        feed.append_commit(version, START + timedelta(seconds=version), changes)

    feed = QueueFeed("f", store_url)
    return add


@pytest.fixture
def feed(penstock: Penstock, store_url: str, append: Append) -> Penstock:
    """Three commits: two rows are inserted; one is updated, the other carried over; that one is deleted."""
    QueueFeed.create("f", DATA, CONTRACT, store=store_url, partitions=2)
    append(1, ("insert", 1, "a"), ("insert", 2, "b"))
    append(2, ("delete", 1, "a"), ("insert", 1, "x"), ("delete", 2, "b"), ("insert", 2, "b"))
    append(4, ("delete", 2, "b"))
    return penstock


def shown(penstock: Penstock, *words: object) -> list[tuple[str, int, int, str]]:
    rows = penstock("changes", "show", "queue:f", *words, "--json").lines
    return sorted((row["_change_type"], row["_commit_version"], row["id"], row["data"]) for row in rows)


def test_show_leaves_out_carried_over_rows(feed: Penstock) -> None:
    assert shown(feed) == [
        ("delete", 2, 1, "a"),
        ("delete", 4, 2, "b"),
        ("insert", 1, 1, "a"),
        ("insert", 1, 2, "b"),
        ("insert", 2, 1, "x"),
    ]
    assert len(shown(feed, "--mode", "none")) == 7
    assert shown(feed, "--mode", "netchanges") == [("insert", 2, 1, "x")]
    assert shown(feed, "--updates", "--from", 2, "--to", 3) == [
        ("update_postimage", 2, 1, "x"),
        ("update_preimage", 2, 1, "a"),
    ]
    assert shown(feed, "--from", "2026-01-01T00:00:03Z") == [("delete", 4, 2, "b")]
    assert len(shown(feed, "-n", 2)) == 2


def test_show_prints_changes_as_lines_with_signs(feed: Penstock) -> None:
    out = feed("changes", "show", "queue:f", "--from", 2, "--updates").out
    assert [line.split() for line in out.splitlines()] == [
        ["version", "time", "id", "data"],
        ["<", "2", "2026-01-01T00:00:02.000000Z", "1", "a"],
        [">", "2", "2026-01-01T00:00:02.000000Z", "1", "x"],
        ["-", "4", "2026-01-01T00:00:04.000000Z", "2", "b"],
    ]
    assert feed("changes", "show", "queue:f", "--from", 9).out == ""


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        (["queue:g"], "QUEUE_NOT_FOUND"),
        (["quueue:f"], "INVALID_URL.UNKNOWN_KIND"),
        (["queue:f?stor=x"], "INVALID_URL.UNKNOWN_PARAMETER"),
        (["queue:f", "--mode", "al"], "INVALID_CDC_OPTION.INVALID_DEDUPLICATION_MODE"),
        (["queue:f", "--to", 3], "INVALID_CDC_OPTION.MISSING_STARTING_VERSION"),
        (["queue:f", "--from", 3, "--to", 2], "INVALID_CDC_OPTION.REVERSED_RANGE"),
        (["queue:f", "--from", "noon"], "INVALID_CDC_OPTION.INVALID_TIMESTAMP"),
    ],
)
def test_show_reports_what_does_not_exist(feed: Penstock, words: list[object], condition: str) -> None:
    assert feed("changes", "show", *words, "--json", code=1).error["error"] == condition


@pytest.mark.parametrize("command", ["show", "tail"])
def test_an_invalid_bound_is_reported_with_its_option(feed: Penstock, command: str) -> None:
    error = feed("changes", command, "queue:f", "--from", "noon", "--json", code=1).error
    assert error["message"].startswith("--from='noon': give a time such as")


def test_bounds_in_the_wrong_order_are_reported_with_their_options(feed: Penstock) -> None:
    error = feed("changes", "show", "queue:f", "--from", 3, "--to", 2, "--json", code=1).error
    assert error["message"] == "--to is before --from: swap them"


def test_snapshots_without_a_row_id_are_refused_with_how_to_give_it(
    penstock_sqlite: Penstock, tmp_path: Path
) -> None:
    folder = tmp_path / "daily"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "1.parquet")
    error = penstock_sqlite("changes", "show", f"snapshots:{folder}", "--json", code=1).error
    assert error["error"] == "INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID"
    assert "snapshots:PATH?row_id=COLUMN" in error["message"]
    assert "SnapshotFeed(path, row_id=" in error["message"]
    (row,) = penstock_sqlite("changes", "show", f"snapshots:{folder}?row_id=id", "--json").lines
    assert (row["_change_type"], row["id"]) == ("insert", 1)


def test_net_changes_of_a_feed_without_a_row_id_are_refused(
    penstock_sqlite: Penstock, tmp_path: Path
) -> None:
    path = str(tmp_path / "orders")
    feed_on = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(path, pa.table({"id": [1]}), configuration=feed_on)
    assert len(penstock_sqlite("changes", "show", f"delta:{path}", "--json").lines) == 1
    words = ("changes", "show", f"delta:{path}", "--mode", "netChanges", "--json")
    error = penstock_sqlite(*words, code=1).error
    assert error["error"] == "INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID"


def test_the_help_shows_how_to_name_feeds(penstock_sqlite: Penstock) -> None:
    assert "snapshots:PATH?row_id=COLUMN" in penstock_sqlite("changes", "show", "--help").out


@contextmanager
def tailing(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A tail that is interrupted as on a terminal."""
    tail = subprocess.Popen(
        [sys.executable, "-m", "penstock", "changes", "tail", "queue:f", *words],
        stdout=subprocess.PIPE,
        env=os.environ,
        text=True,
    )
    assert tail.stdout is not None
    try:
        yield tail
    finally:
        tail.send_signal(signal.SIGINT)
        assert wait_until(lambda: tail.poll() is not None, 20, "tail ends") is True
        tail.stdout.close()
    assert tail.returncode == 130


def test_tail_shows_commits_as_they_arrive(feed: Penstock, append: Append) -> None:
    with tailing("--from", "4", "--json") as tail:
        assert json.loads(tail.stdout.readline())["_commit_version"] == 4
        append(5, ("insert", 7, "new"))
        assert json.loads(tail.stdout.readline())["id"] == 7


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_tail_ends_after_the_requested_number_of_rows(feed: Penstock, rows: int) -> None:
    wanted = feed("changes", "show", "queue:f", "--json").lines
    found = feed("changes", "tail", "queue:f", "--from", "1", "-n", rows, "--json").lines
    assert found == wanted[:rows]
    assert len(found) == rows


def test_tail_shows_the_net_changes_of_each_commit(feed: Penstock, append: Append) -> None:
    append(6, ("insert", 9, "end"))
    with tailing("--from", "1", "--mode", "netChanges", "--updates", "--json") as tail:
        found = [json.loads(tail.stdout.readline())]
        while found[-1]["id"] != 9:
            found.append(json.loads(tail.stdout.readline()))
    assert [(row["_commit_version"], row["_change_type"], row["id"]) for row in found] == [
        (1, "insert", 1),
        (1, "insert", 2),
        (2, "update_preimage", 1),
        (2, "update_postimage", 1),
        (4, "delete", 2),
        (6, "insert", 9),
    ]


def test_tail_starts_with_the_next_commit(feed: Penstock, append: Append) -> None:
    with tailing() as tail:
        version = 10

        def shown() -> bool:
            nonlocal version
            version += 1
            append(version, ("insert", version, "new"))
            return readable(tail.stdout, 0.2)

        wait_until(shown, 60, "tail shows something")
        header, first = (tail.stdout.readline().split() for _ in range(2))
    assert header == ["version", "time", "id", "data"]
    assert first[:2] == ["+", first[3]]
    assert int(first[1]) > 10


def test_change_types_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show = TextOutput("sqlite:///x").row_printer(change_columns(["id"]), change_style)
    kinds = ["insert", "delete", "update_preimage", "update_postimage"]
    show([{"_change_type": kind, "_commit_version": 1, "_commit_timestamp": "", "id": 1} for kind in kinds])
    assert [line[:6] for line in screen.getvalue().splitlines()[1:]] == [
        "\x1b[32m+",
        "\x1b[31m-",
        "\x1b[33m<",
        "\x1b[93m>",
    ]


def test_a_feed_without_a_slot_has_no_lag(feed: Penstock) -> None:
    assert feed("changes", "lag", "queue:f", "--json", code=1).error["error"] == "NO_LAG"
