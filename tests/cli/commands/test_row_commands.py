"""``penstock queue peek`` and ``tail``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import pyarrow as pa
import pytest

from penstock.cli.commands import queue_rows
from penstock.cli.commands.queue_rows import QueuePrinter
from penstock.cli.commands.shared import Common, Run
from penstock.cli.output import Row
from penstock.errors import DataLostError
from penstock.queue.store import connect
from tests.support.commands import Penstock
from tests.support.waiting import wait_until


@pytest.fixture
def filled(penstock: Penstock, store_url: str) -> Penstock:
    """A queue of 12 rows in partition 0 (2 of them trimmed), none in partition 1 and 3 in partition 2."""
    penstock("queue", "create", "q", "--schema", "id int, name string", "--partitions", 3)
    with connect(store_url) as store:
        queue = store.queue("q")
        queue.append([{"id": number, "name": f"n{number}"} for number in range(12)], 0)
        queue.append([{"id": 100 + number} for number in range(3)], 2)
        queue.trim(0, 2)
    return penstock


def ids(penstock: Penstock, *words: object) -> list[int]:
    return [row["id"] for row in penstock("queue", *words, "--json").lines]


def test_text_that_is_not_utf8_is_shown_with_replacements(penstock: Penstock, store_url: str) -> None:
    """A queue keeps text as it was written, by Spark for instance."""
    penstock("queue", "create", "q", "--schema", "name string, list array<struct<t: string>>")
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a\xff", b"b"]).buffers())
    with connect(store_url) as store:
        structs = pa.StructArray.from_arrays([text], ["t"])
        rows = pa.table({"name": text, "list": pa.ListArray.from_arrays([0, 1, 2], structs)})
        store.queue("q").append(rows)
    shown = [json.loads(line) for line in penstock("queue", "peek", "q", "--json").out.splitlines()]
    assert shown == [
        {"name": "a\ufffd", "list": [{"t": "a\ufffd"}]},
        {"name": "b", "list": [{"t": "b"}]},
    ]
    assert "a\ufffd" in penstock("queue", "peek", "q").out


def test_a_time_that_cannot_be_written_is_shown_as_its_number(penstock: Penstock, store_url: str) -> None:
    penstock("queue", "create", "q", "--schema", "at timestamp, local timestamp_ntz, day date")
    largest = 2**63 - 1
    schema = pa.schema(
        [("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us")), ("day", pa.date32())]
    )
    days = [2**31 - 1, 0]
    arrays = [pa.array(values, pa.int64()) for values in ([largest, 0], [largest, 0])]
    arrays.append(pa.array(days, pa.int32()))
    with connect(store_url) as store:
        rows = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
        store.queue("q").append(pa.table(rows, schema))
    outside = f"<value out of range: {largest}>"
    assert penstock("queue", "peek", "q", "--json").lines == [
        {"at": outside, "local": outside, "day": f"<value out of range: {2**31 - 1}>"},
        {"at": "1970-01-01T00:00:00.000000Z", "local": "1970-01-01T00:00:00.000000", "day": "1970-01-01"},
    ]


def test_json_has_control_characters_escaped(penstock: Penstock, store_url: str) -> None:
    name = "a\x00\x1b[2J\x7f\x80\x9b\x9f\xa0é"
    penstock("queue", "create", "q", "--schema", "name string, items map<string, string>")
    row = {"name": name, "items": {name: name}}
    with connect(store_url) as store:
        store.queue("q").append([row])
    shown = penstock("queue", "peek", "q", "--json")
    assert shown.lines == [row]
    assert "\\u007f\\u0080\\u009b\\u009f\xa0é" in shown.out
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown.out.strip())


def test_peek_shows_each_partition_from_its_oldest_row(filled: Penstock) -> None:
    assert ids(filled, "peek", "q") == list(range(2, 12))
    assert ids(filled, "peek", "q", "-n", 12) == [*range(2, 12), 100, 101]
    assert ids(filled, "peek", "q", "-n", 0) == []
    assert ids(filled, "peek", "q", "--partition", 2, "--rows", 2) == [100, 101]
    assert ids(filled, "peek", "q", "--partition", 0, "--from", 10) == [10, 11]
    assert ids(filled, "peek", "q", "--partition", 0, "--from", 12) == []


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        (["--from", 3], "INVALID_INPUT"),
        (["--partition", 0, "--from", 13], "INVALID_POSITION.PAST_END"),
        (["--partition", 0, "--from", 1], "DATA_LOST.TRIMMED"),
        (["--partition", 0, "--from", -1], "INVALID_POSITION"),
        (["--partition", 3], "PARTITION_NOT_FOUND"),
        (["--columns", "id,nam"], "INVALID_INPUT.UNKNOWN_COLUMN"),
    ],
)
def test_peek_refuses_a_missing_queue_partition_or_column(
    filled: Penstock, words: list[object], condition: str
) -> None:
    assert filled("queue", "peek", "q", *words, "--json", code=1).error["error"] == condition


def test_tail_shows_the_newest_rows_of_each_partition(filled: Penstock) -> None:
    assert ids(filled, "tail", "q", "-n", 2) == [10, 11, 101, 102]
    assert ids(filled, "tail", "q") == [*range(2, 12), 100, 101, 102]
    assert ids(filled, "tail", "q", "-n", 1, "--partition", 2) == [102]


def test_rows_are_shown_with_partition_and_index(filled: Penstock) -> None:
    rows = filled("queue", "tail", "q", "-n", 1, "--json", "--with-index").lines
    assert rows == [
        {"id": 11, "name": "n11", "_partition": 0, "_row_index": 11},
        {"id": 102, "name": None, "_partition": 2, "_row_index": 2},
    ]
    assert [line.split() for line in filled("queue", "tail", "q", "-n", 1).out.splitlines()] == [
        ["partition", "index", "id", "name"],
        ["0", "11", "11", "n11"],
        ["2", "2", "102", "null"],
    ]


def test_columns_can_be_selected(filled: Penstock) -> None:
    assert filled("queue", "peek", "q", "-n", 1, "--columns", "name", "--json").lines == [{"name": "n2"}]
    assert "id" not in filled("queue", "peek", "q", "-n", 1, "--columns", "name").out


def test_control_characters_in_text_are_escaped(penstock_sqlite: Penstock) -> None:
    penstock_sqlite("queue", "create", "q", "--schema", "a string")
    penstock_sqlite("queue", "put", "q", stdin=json.dumps({"a": "x\x1b[2J\ny\u202e[red]"}))
    assert "x\\x1b[2J\\ny\\u202e[red]" in penstock_sqlite("queue", "peek", "q").out
    assert len(penstock_sqlite("queue", "peek", "q").out.splitlines()) == 2


class Follower:
    """A running ``tail --follow`` and the rows that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.rows: list[object] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.rows.append(json.loads(line)["id"])

    def wait_for(self, rows: list[int]) -> None:
        wait_until(lambda: self.rows == rows or self.process.poll() is not None, 60, f"the rows {rows}")
        assert self.rows == rows


@contextmanager
def following(*words: str) -> Iterator[Follower]:
    command = [sys.executable, "-m", "penstock", "queue", "tail", *words, "--follow", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Follower(process)
    finally:
        process.kill()
        process.communicate()


def test_following_shows_new_rows_until_it_is_interrupted(filled: Penstock, store_url: str) -> None:
    with following("q", "-n", "1") as follower, connect(store_url) as store:
        queue = store.queue("q")
        follower.wait_for([11, 102])
        queue.append([{"id": 12}], 0)
        follower.wait_for([11, 102, 12])
        queue.append([{"id": 13}, {"id": 14}], 1)
        follower.wait_for([11, 102, 12, 13, 14])
        queue.add_partitions(1)
        queue.append([{"id": 15}], 3)
        follower.wait_for([11, 102, 12, 13, 14, 15])
        follower.process.send_signal(signal.SIGINT)
        assert follower.process.wait(30) == 130
        assert follower.process.stderr is not None
        assert follower.process.stderr.read() == ""


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system has no poll")
def test_following_ends_when_its_output_is_closed(penstock_sqlite: Penstock) -> None:
    penstock_sqlite("queue", "create", "q", "--schema", "id int")
    penstock_sqlite("queue", "put", "q", stdin='{"id": 1}\n')
    command = (
        f"{sys.executable} -m penstock queue tail q --follow --json | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout == '{"id": 1}\n'
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_rows_trimmed_while_following_are_skipped(
    penstock: Penstock, store_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only these rows are skipped: the remaining ones are shown."""
    monkeypatch.setattr(queue_rows, "_BLOCK_ROWS", 2)
    penstock("queue", "create", "q", "--schema", "id int")
    with connect(store_url) as store:
        queue = store.queue("q")
        queue.append([{"id": number} for number in range(10)])
        before = list(queue.info().partitions)
        shown: list[object] = []

        def show(rows: Sequence[Row]) -> None:
            shown.extend(row["id"] for row in rows)
            if rows[0]["id"] == 0:
                queue.trim(0, 5)

        printer = QueuePrinter(Run(Common(json=True)), queue, None, False)
        printer._print = show
        printer.show_new(before)
        assert (shown, printer.next_indexes) == ([0, 1, 5, 6, 7, 8, 9], {0: 10})
        note = "warning: rows [2, 5) of queue 'q', partition 0, have been trimmed"
        assert [json.loads(line) for line in capsys.readouterr().err.splitlines()] == [{"note": note}]
        shown.clear()
        printer.next_indexes = {0: 2}
        printer.show_new(list(queue.info().partitions))
        assert shown == [5, 6, 7, 8, 9]
        shown.clear()
        queue.trim(0, 10)
        printer.next_indexes = {0: 2}
        printer.show_new(before)
        assert shown == []


def test_following_fails_if_rows_disappear_without_a_trim(
    penstock: Penstock, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would look for these rows forever."""
    penstock("queue", "create", "q", "--schema", "id int")
    with connect(store_url) as store:
        queue = store.queue("q")
        queue.append([{"id": 1}])

        def gone(*_: object, **__: object) -> NoReturn:
            raise DataLostError("rows [0, 1) are not there", queue="q", partition=0)

        monkeypatch.setattr(queue, "read", gone)
        with pytest.raises(DataLostError):
            QueuePrinter(Run(Common()), queue, None, False).show_new(list(queue.info().partitions))
