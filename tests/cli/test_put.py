"""``penstock queue put``: all of the input or none of it, and a repeat adds what is missing."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.queue.store import connect
from tests.support.commands import Penstock

DDL = "id bigint not null, name string, amount decimal(10,2)"


def lines(numbers: range) -> str:
    return "".join(
        f'{{"id": {number}, "name": "n{number}", "amount": "{number}.25"}}\n' for number in numbers
    )


def ids(penstock: Penstock, queue: str = "q") -> list[int]:
    return sorted(row["id"] for row in penstock("queue", "peek", queue, "-n", 1_000_000, "--json").lines)


@pytest.fixture
def queue(penstock: Penstock) -> Penstock:
    penstock("queue", "create", "q", "--schema", DDL, "--partitions", 2, "--key", "id")
    return penstock


@pytest.fixture
def sqlite_queue(penstock_sqlite: Penstock) -> Penstock:
    penstock_sqlite("queue", "create", "q", "--schema", DDL)
    return penstock_sqlite


def test_piped_rows_are_one_append(queue: Penstock, store_url: str) -> None:
    result = queue("queue", "put", "q", "--json", stdin=lines(range(100))).json
    assert (result["queue"], result["rows"], result["skipped_rows"]) == ("q", 100, 0)
    (append,) = result["appends"]
    assert [part["partition"] for part in append] == [0, 1]
    assert sum(part["end_index"] - part["first_index"] for part in append) == 100
    assert ids(queue) == list(range(100))
    with connect(store_url) as store:
        assert [part.segments for part in store.queue("q").info().partitions] == [1, 1]


def test_a_closed_standard_input_is_an_error(sqlite_queue: Penstock) -> None:
    def put(*words: str) -> subprocess.CompletedProcess[str]:
        command = f"{sys.executable} -m penstock queue {' '.join(words)} <&-"
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)

    said = put("put", "q", "-")
    assert said.returncode == 1
    assert said.stderr.startswith(
        "error: [FILE_UNREADABLE] standard input is closed: name a file, or pipe the rows in\nhelp: "
    )
    assert json.loads(put("put", "q", "--json").stderr)["error"] == "FILE_UNREADABLE"
    assert "[CONFIRMATION_NEEDED]" in put("drop", "q").stderr


def test_batches_larger_than_the_input_make_one_append(sqlite_queue: Penstock) -> None:
    result = sqlite_queue("queue", "put", "q", "--batch-rows", 2**70, "--json", stdin=lines(range(5))).json
    assert (result["rows"], len(result["appends"])) == (5, 1)


def test_csv_from_a_file(queue: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfname,id\r\n"a ""quoted""\r\nname",1\r\n,2\r\n')
    assert "appended 2 rows to queue 'q'" in queue("queue", "put", "q", path).out
    rows = {row["id"]: row["name"] for row in queue("queue", "peek", "q", "--json").lines}
    assert rows == {1: 'a "quoted"\r\nname', 2: None}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'{"id": 1}\n'),
        ("rows.ndjson", b'{"id": 1}\n'),
        ("rows.json", b'{"id": 1}\n'),
        ("rows.csv", b"id\n1\n"),
        ("rows.tsv", b"id\tname\n1\tx,y\n"),
        ("rows.csv.gz", gzip.compress(b"id\n1\n", mtime=0)),
        ("rows.JSONL.GZ", gzip.compress(b'{"id": 1}\n', mtime=0)),
        ("rows.csv.bz2", bz2.compress(b"id\n1\n")),
        ("rows", b'{"id": 1}\n'),
        ("rows.txt", b"id\n1\n"),
    ],
)
def test_the_format_is_detected_from_the_name_or_the_content(
    sqlite_queue: Penstock, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    sqlite_queue("queue", "put", "q", tmp_path / name)
    assert ids(sqlite_queue) == [1]


def test_the_output_of_peek_can_be_put(penstock: Penstock) -> None:
    ddl = "t timestamp, b binary, m map<int,array<double>>, s struct<d:date, x:decimal(38,10)>, o time"
    row = {
        "t": "2024-01-01T00:00:00.000000Z",
        "b": "AP8=",
        "m": {"1": [1.5, "NaN", None]},
        "s": {"d": "2024-01-01", "x": "1.0000000000"},
        "o": "12:00:00.000000",
    }
    for name in ("a", "b"):
        penstock("queue", "create", name, "--schema", ddl)
    penstock("queue", "put", "a", stdin=json.dumps(row))
    shown = penstock("queue", "peek", "a", "--json").out
    penstock("queue", "put", "b", stdin=shown)
    assert penstock("queue", "peek", "b", "--json").lines == [row]


@pytest.mark.parametrize("batch_rows", [(), ("--batch-rows", 10)])
@pytest.mark.parametrize("session", [(), ("--session", "s")])
def test_a_bad_line_in_the_middle_appends_nothing(
    queue: Penstock, batch_rows: tuple[object, ...], session: tuple[object, ...]
) -> None:
    queue("queue", "put", "q", stdin=lines(range(5)))
    text = lines(range(100)) + '{"id": "x"}\n{"id": 7, "amount": 1.234}\n' + lines(range(100))
    error = queue("queue", "put", "q", *batch_rows, *session, "--json", stdin=text, code=1).error
    assert error["error"] == "ROWS_REJECTED"
    assert error["parameters"] == {
        "queue": "q",
        "count": 2,
        "more": False,
        "rows": [
            {
                "line": 101,
                "column": "id",
                "value": '"x"',
                "reason": "is not a valid bigint",
                "condition": None,
            },
            {
                "line": 102,
                "column": "amount",
                "value": "1.234",
                "reason": "is not a valid decimal(10,2)",
                "condition": None,
            },
        ],
    }
    said = queue("queue", "put", "q", *batch_rows, *session, stdin=text, code=1)
    assert said.out == ""
    assert said.err.splitlines() == [
        "line 101: column 'id': \"x\" is not a valid bigint",
        "line 102: column 'amount': 1.234 is not a valid decimal(10,2)",
        "error: [ROWS_REJECTED] 2 rows of the input do not fit queue 'q'; nothing was appended",
    ]
    assert ids(queue) == list(range(5))


def test_max_errors_limits_the_number_of_errors_shown(sqlite_queue: Penstock) -> None:
    bad = '{"id": null}\n' * 30
    assert len(sqlite_queue("queue", "put", "q", stdin=bad, code=1).err.splitlines()) == 11
    assert len(sqlite_queue("queue", "put", "q", "--max-errors", 2, stdin=bad, code=1).err.splitlines()) == 3
    assert len(sqlite_queue("queue", "put", "q", "--max-errors", 0, stdin=bad, code=1).err.splitlines()) == 1


def test_a_repeat_in_the_same_session_is_skipped(queue: Penstock) -> None:
    put = ("queue", "put", "q", "--session", "day 1", "--json")
    assert queue(*put, stdin=lines(range(10))).json["rows"] == 10
    repeat = queue(*put, stdin=lines(range(10))).json
    assert (repeat["rows"], repeat["skipped_rows"], repeat["appends"]) == (0, 10, [])
    longer = queue(*put, "--batch-rows", 4, stdin=lines(range(15))).json
    assert (longer["rows"], longer["skipped_rows"], len(longer["appends"])) == (5, 10, 2)
    said = queue("queue", "put", "q", "--session", "day 1", stdin=lines(range(3))).out
    assert said == (
        "appended 0 rows to queue 'q'; skipped the first 3 rows: session 'day 1' has already appended 15 "
        "rows, which are "
        "counted, not compared\n"
    )
    assert (
        queue("queue", "put", "q", "--session", "day 2", "--json", stdin=lines(range(15, 20))).json["rows"]
        == 5
    )
    assert ids(queue) == list(range(20))


def test_an_interrupted_input_is_completed_by_its_repeat(
    queue: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.queue.producer import Producer

    append = Producer.append
    done: list[int] = []

    def breaks_in_the_third(self: Producer, rows: Any, sequence: int | None = None, **options: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(rows.num_rows)
        return append(self, rows, sequence, **options)

    put = ("queue", "put", "q", "--session", "s", "--batch-rows", 30)
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "append", breaks_in_the_third)
        queue(*put, stdin=lines(range(100)), code=130)
    assert ids(queue) == list(range(60))
    queue("queue", "put", "q", "--session", "s", stdin=lines(range(100)))
    assert ids(queue) == list(range(100))


def test_each_batch_is_one_append(queue: Penstock) -> None:
    result = queue("queue", "put", "q", "--batch-rows", 40, "--json", stdin=lines(range(100))).json
    sizes = [sum(part["end_index"] - part["first_index"] for part in append) for append in result["appends"]]
    assert sizes == [40, 40, 20]


def test_a_partition_can_be_chosen(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", DDL, "--partitions", 3)
    penstock("queue", "put", "q", "--partition", 2, stdin=lines(range(3)))
    shown = penstock("queue", "show", "q", "--json").json
    assert [part["rows"] for part in shown["partitions"]] == [0, 0, 3]
    error = penstock("queue", "put", "q", "--partition", 3, "--json", stdin=lines(range(3)), code=1).error
    assert error["error"] == "PARTITION_NOT_FOUND"


@pytest.mark.parametrize("text", ["", "\n\n", "id,name\n"])
def test_an_input_without_rows_appends_nothing(sqlite_queue: Penstock, text: str) -> None:
    put = sqlite_queue("queue", "put", "q", "--json", stdin=text)
    assert (put.json["rows"], put.json["appends"]) == (0, [])
    assert put.error == {"note": "the input has no rows"}


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        (["nope"], "QUEUE_NOT_FOUND"),
        (["q", "missing.jsonl"], "FILE_UNREADABLE"),
        (["q", "/"], "FILE_UNREADABLE"),
        (["q", "--delimiter", "ab"], "INVALID_INPUT"),
        (["q", "--delimiter", '"'], "INVALID_INPUT"),
        (["q", "--session", ""], "INVALID_NAME"),
    ],
)
def test_wrong_arguments_are_refused(sqlite_queue: Penstock, words: list[str], condition: str) -> None:
    error = sqlite_queue("queue", "put", *words, "--json", stdin=lines(range(3)), code=1).error
    assert error["error"] == condition
    assert ids(sqlite_queue) == []


def test_a_damaged_archive_is_reported(sqlite_queue: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(lines(range(10_000)).encode())[:-200])
    error = sqlite_queue("queue", "put", "q", path, "--json", code=1).error
    assert error["error"] in ("FILE_UNREADABLE", "ROWS_REJECTED")
    (tmp_path / "rows.csv.gz").write_bytes(b"no archive")
    assert (
        sqlite_queue("queue", "put", "q", tmp_path / "rows.csv.gz", "--json", code=1).error["error"]
        == "FILE_UNREADABLE"
    )
    assert ids(sqlite_queue) == []


def test_a_large_input_is_read_fast(sqlite_queue: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(range(200_000)))
    started = time.perf_counter()
    result = sqlite_queue("queue", "put", "q", path, "--json").json
    seconds = time.perf_counter() - started
    assert result["rows"] == 200_000
    # A machine that does nothing else reads several hundred thousand rows a second; this holds on a busy one.
    assert seconds < 5, f"{200_000 / seconds:,.0f} rows/s"
