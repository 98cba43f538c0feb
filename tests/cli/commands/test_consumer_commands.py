"""``penstock consumer``, in text and in JSON, on both kinds of database."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

import pytest

from penstock.cli.commands.consumer import parse_position
from penstock.errors import InvalidPositionError
from penstock.queue.store import connect
from tests.support.commands import Penstock
from tests.support.raw_sql import long_text, run_sql


@pytest.fixture
def filled(penstock: Penstock, store_url: str) -> Penstock:
    """A queue of 10 rows in partition 0 and 4 in partition 1, and a consumer."""
    penstock("queue", "create", "q", "--schema", "id int", "--partitions", 2)
    with connect(store_url) as store:
        queue = store.queue("q")
        queue.append([{"id": number} for number in range(10)], 0)
        queue.append([{"id": number} for number in range(4)], 1)
    penstock("consumer", "create", "c")
    return penstock


def offsets(store_url: str, queue: str = "q") -> dict[int, int]:
    with connect(store_url) as store:
        return store.consumer("c").offsets(queue)


def test_create_and_drop(penstock: Penstock) -> None:
    assert penstock("consumer", "create", "c", "--json").json == {"consumer": "c"}
    assert penstock("consumer", "create", "c", "--json", code=1).error["error"] == "ALREADY_EXISTS"
    assert penstock("consumer", "drop", "c", "--json", code=1).error["error"] == "CONFIRMATION_NEEDED"
    assert penstock("consumer", "drop", "c", "--yes", "--json").json == {"consumer": "c", "queues": []}
    error = penstock("consumer", "drop", "c", "--yes", "--json", code=1).error
    assert error["error"] == "CONSUMER_NOT_FOUND"
    assert "created consumer 'c'" in penstock("consumer", "create", "c").out
    assert "dropped consumer 'c'" in penstock("consumer", "drop", "c", "-y").out


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ((), {0: 0, 1: 0}),
        (("--start", "latest"), {0: 10, 1: 4}),
        (("--start", "EARLIEST"), {0: 0, 1: 0}),
        (("--start", '{"0": 5, "1": 2}'), {0: 5, 1: 2}),
        (("--start", '{"1": 2}'), {0: 0, 1: 2}),
        (("--start", "2000-01-01T00:00:00Z"), {0: 0, 1: 0}),
        (("--start", "2999-01-01T00:00:00+02:00"), {0: 10, 1: 4}),
    ],
)
def test_register_at_a_position(
    filled: Penstock, store_url: str, start: tuple[str, ...], found: dict[int, int]
) -> None:
    made = filled("consumer", "register", "c", "q", *start, "--json").json
    assert made["offsets"] == {str(partition): index for partition, index in found.items()}
    assert offsets(store_url) == found


def test_registering_again_changes_only_vital(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q", "--start", "latest")
    said = filled("consumer", "register", "c", "q", "--vital").out
    assert "vital consumer 'c' is registered on queue 'q', at {\"0\": 10, \"1\": 4}" in said
    assert offsets(store_url) == {0: 10, 1: 4}
    for words, vital in (([], True), (["--no-vital"], False), ([], False), (["--vital"], True)):
        assert filled("consumer", "register", "c", "q", *words, "--json").json["vital"] is vital
    filled("consumer", "unregister", "c", "q", "--yes")
    assert filled("consumer", "lag", "c", "q", "--json", code=1).error["error"] == "CONSUMER_NOT_REGISTERED"
    assert (
        filled("consumer", "unregister", "c", "q", "--yes", "--json", code=1).error["error"]
        == "CONSUMER_NOT_REGISTERED"
    )


def test_list(filled: Penstock, store_url: str) -> None:
    assert "no consumers" not in filled("consumer", "list").out
    filled("consumer", "create", "idle")
    filled("consumer", "register", "c", "q", "--vital")
    with connect(store_url) as store:
        (registration,) = store.registrations()
        lock = store.database.owner_lock(registration.lock_name(store.uuid))
        assert filled("consumer", "list", "--json").json["consumers"][0]["live"] is False
        assert lock.acquire()
        found = filled("consumer", "list", "--json").json["consumers"]
        lock.release()
    assert found == [
        {"consumer": "c", "queue": "q", "vital": True, "live": True, "app_id": None},
        {"consumer": "idle", "queue": None, "vital": None, "live": None, "app_id": None},
    ]
    assert filled("consumer", "list").out.splitlines()[1].split() == ["c", "q", "yes", "no"]


def test_a_list_has_the_first_rows_and_counts_the_others(
    filled: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.commands.consumer.MAX_LISTED", 3)
    monkeypatch.setattr("penstock.cli.commands.consumer_lag.MAX_LISTED", 3)
    filled("queue", "create", "r", "--schema", "id int")
    for name in ("a", "b"):
        filled("consumer", "create", name)
        for queue in ("q", "r"):
            filled("consumer", "register", name, queue)
    listed = filled("consumer", "list", "--json")
    found = [(row["consumer"], row["queue"]) for row in listed.json["consumers"]]
    assert found == [("a", "q"), ("a", "r"), ("b", "q")]
    note = "consumers that are not listed: 2. The list has the first ones by name"
    assert listed.error == {"note": note}
    lag = filled("consumer", "lag")
    assert [line.split()[:2] for line in lag.out.splitlines()[1:]] == [["a", "q"], ["a", "r"], ["b", "q"]]
    assert lag.err == f"{note}\n"


def test_the_lags_of_too_many_partitions_are_counted(
    filled: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ui.reading.MAX_PARTITIONS", 3)
    for name in ("a", "b", "c"):
        if name != "c":
            filled("consumer", "create", name)
        filled("consumer", "register", name, "q")
    lag = filled("consumer", "lag", "--json")
    assert [row["consumer"] for row in lag.json["lags"]] == ["a", "b"]
    assert "consumers that are not listed: 1" in lag.error["note"]


def test_long_names_that_others_have_written_are_cut(filled: Penstock, store_url: str) -> None:
    """The longest name that Penstock accepts is whole."""
    whole = "w" * 255
    for name in (whole, "n"):
        filled("consumer", "create", name)
        filled("consumer", "register", name, "q")
    with connect(store_url) as store:
        for table, column, size in (
            ("consumer", "name", 200_000),
            ("registration", "app_id", 4000),
            ("queue", "name", 200_000),
        ):
            where = "where name = 'n'" if table == "consumer" else ""
            long = f"'n' || {long_text(store.database, size)}"
            run_sql(store.database, f"update penstock.{table} set {column} = {long} {where}")
    listed = filled("consumer", "list")
    assert len(listed.out) < 5000
    cut = "n" + "x" * 299
    assert [row.split()[0] for row in listed.out.splitlines()] == ["consumer", "c", cut, whole]
    rows = filled("consumer", "list", "--json").json["consumers"]
    assert [row["consumer"] for row in rows] == ["c", cut, whole]
    assert rows[1] == {"consumer": cut, "queue": cut, "vital": False, "live": False, "app_id": cut}
    assert filled("queue", "list", "--json").json["queues"][0]["name"] == cut
    assert len(filled("queue", "list").out) < 2000
    lag = filled("consumer", "lag")
    assert lag.out == "no lags\n"
    assert "consumer 'nxxx" in lag.err
    assert "cannot be shown" in lag.err


def test_lag(filled: Penstock) -> None:
    filled("consumer", "register", "c", "q", "--start", '{"0": 7, "1": 4}')
    (found,) = filled("consumer", "lag", "--json").json["lags"]
    assert (found["consumer"], found["queue"], found["rows"]) == ("c", "q", 3)
    assert found["bytes"] > 0
    assert found["seconds"] > 0
    assert [(part["offset"], part["next_index"], part["rows"]) for part in found["partitions"]] == [
        (7, 10, 3),
        (4, 4, 0),
    ]
    for words in (["c"], ["c", "q"]):
        (again,) = filled("consumer", "lag", *words, "--json").json["lags"]
        assert again["rows"] == 3
    assert filled("consumer", "lag").out.splitlines()[1].split()[:3] == ["c", "q", "3"]
    text = filled("consumer", "lag", "c", "q").out
    assert "3 rows" in text
    assert text.splitlines()[-2].split()[:4] == ["0", "7", "10", "3"]


def test_the_lag_of_a_consumer_that_has_caught_up_has_no_age(filled: Penstock) -> None:
    filled("consumer", "register", "c", "q", "--start", "latest")
    (found,) = filled("consumer", "lag", "--json").json["lags"]
    assert (found["rows"], found["trimmed_rows"], found["bytes"], found["seconds"]) == (0, 0, 0, None)
    assert [part["seconds"] for part in found["partitions"]] == [None, None]
    assert filled("consumer", "lag").out.splitlines()[1].split() == ["c", "q", "0", "0", "0", "B"]
    assert "nothing: it has processed all rows" in filled("consumer", "lag", "c", "q").out


def test_the_lag_tells_trimmed_rows_from_those_that_exist(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q", "--start", '{"0": 1}')
    with connect(store_url) as store:
        for partition in (0, 1):
            store.queue("q").append([{"id": 1}], partition)
        assert store.queue("q").trim(0, 10) == 10
        assert store.queue("q").trim(1, 5) == 5
    (found,) = filled("consumer", "lag", "c", "--json").json["lags"]
    assert (found["rows"], found["trimmed_rows"]) == (15, 14)
    first, second = found["partitions"]
    assert (first["rows"], first["trimmed_rows"]) == (10, 9)
    assert (second["rows"], second["trimmed_rows"], second["bytes"]) == (5, 5, 0)
    assert first["seconds"] is not None
    assert second["seconds"] is None
    assert found["seconds"] == pytest.approx(first["seconds"])
    text = filled("consumer", "lag", "c", "q").out
    assert "15 rows, 14 of them trimmed, " in text
    assert "DATA_LOST.TRIMMED" in text
    assert text.splitlines()[-1].split() == ["1", "0", "5", "5", "5", "0", "B"]


def test_a_lag_without_remaining_rows_has_no_age(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q")
    with connect(store_url) as store:
        store.queue("q").trim(0, 10)
        store.queue("q").trim(1, 4)
    (found,) = filled("consumer", "lag", "--json").json["lags"]
    assert (found["rows"], found["trimmed_rows"], found["seconds"]) == (14, 14, None)
    behind = next(line for line in filled("consumer", "lag", "c", "q").out.splitlines() if "behind" in line)
    assert behind.split(maxsplit=1)[1].strip() == "14 rows, 14 of them trimmed"


def test_lag_of_a_missing_queue_or_consumer_is_refused(filled: Penstock) -> None:
    assert filled("consumer", "lag", "--json").json == {"lags": []}
    assert filled("consumer", "lag").out == "no lags\n"
    error = filled("consumer", "lag", "cc", "--json", code=1).error
    assert error["error"] == "CONSUMER_NOT_FOUND"
    assert "Did you mean 'c'?" in error["message"]
    assert filled("consumer", "lag", "c", "qq", "--json", code=1).error["error"] == "QUEUE_NOT_FOUND"


def test_seek_shows_the_change_before_it_moves(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q")
    move = ("consumer", "seek", "c", "q", "--to")
    tried = filled(*move, "latest", "--dry-run", "--json").json
    assert offsets(store_url) == {0: 0, 1: 0}
    done = filled(*move, "latest", "--json").json
    assert offsets(store_url) == {0: 10, 1: 4}
    assert tried["dry_run"]
    assert not done["dry_run"]
    assert (
        tried["partitions"]
        == done["partitions"]
        == [
            {"partition": 0, "from": 0, "to": 10, "rows": 10},
            {"partition": 1, "from": 0, "to": 4, "rows": 4},
        ]
    )
    text = filled(*move, '{"0": 5}').out
    assert "consumer 'c' moved on queue 'q'" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["0", "10", "5", "-5"], ["1", "4", "4", "0"]]
    assert offsets(store_url) == {0: 5, 1: 4}
    assert "would move" in filled(*move, "2000-01-01T00:00:00Z", "--dry-run").out


def test_a_move_says_how_to_undo_it(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q", "--start", '{"0": 7}')
    assert "to undo" not in filled("consumer", "seek", "c", "q", "--to", "latest", "--dry-run").out
    text = filled("consumer", "seek", "c", "q", "--to", "latest").out
    (undo,) = (line for line in text.splitlines() if line.startswith("to undo"))
    words = shlex.split(undo.removeprefix("to undo"))
    assert words[0] == "penstock"
    again = filled(*words[1:]).out
    assert offsets(store_url) == {0: 7, 1: 0}
    assert "to undo" in again
    assert "to undo" not in filled(*words[1:]).out


def test_the_offsets_of_a_registration_can_be_used_as_a_position(filled: Penstock, store_url: str) -> None:
    said = filled("consumer", "register", "c", "q", "--start", '{"0": 3}').out
    filled("consumer", "seek", "c", "q", "--to", "latest")
    filled("consumer", "seek", "c", "q", "--to", said[said.index("{") :].strip())
    assert offsets(store_url) == {0: 3, 1: 0}


def test_of_very_many_offsets_the_first_are_printed(filled: Penstock) -> None:
    filled("queue", "create", "wide", "--schema", "id int", "--partitions", 102)
    said = filled("consumer", "register", "c", "wide").out
    assert said.strip().endswith('"99": 0} and 2 more partitions: --json has all')


def test_a_consumer_in_use_is_neither_moved_nor_dropped(filled: Penstock, store_url: str) -> None:
    filled("consumer", "register", "c", "q")
    with connect(store_url) as store:
        (registration,) = store.registrations()
        lock = store.database.owner_lock(registration.lock_name(store.uuid))
        assert lock.acquire()
        for words in (
            ["seek", "c", "q", "--to", "latest"],
            ["drop", "c", "--yes"],
            ["unregister", "c", "q", "--yes"],
        ):
            error = filled("consumer", *words, "--json", code=1).error
            assert error["error"] == "CONSUMER_IN_USE.RUNNING_QUERY", words
        assert filled("consumer", "seek", "c", "q", "--to", "latest", "--dry-run").code == 0
        lock.release()
    assert offsets(store_url) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("position", "condition"),
    [
        ("yesterday", "INVALID_POSITION"),
        ("2024-01-01T00:00:00", "INVALID_POSITION.NO_TIME_ZONE"),
        ("5", "INVALID_POSITION"),
        ("{", "INVALID_POSITION"),
        ('{"0": -1}', "INVALID_POSITION"),
        ('{"9": 0}', "INVALID_POSITION.UNKNOWN_PARTITION"),
        ('{"0": 99}', "INVALID_POSITION.PAST_END"),
    ],
)
def test_invalid_positions_are_refused(
    filled: Penstock, store_url: str, position: str, condition: str
) -> None:
    filled("consumer", "register", "c", "q")
    error = filled("consumer", "seek", "c", "q", "--to", position, "--json", code=1).error
    assert error["error"] == condition
    assert offsets(store_url) == {0: 0, 1: 0}


def test_positions_are_parsed_from_text() -> None:
    assert parse_position("Latest") == "latest"
    assert parse_position("2024-01-31T12:00:00Z") == datetime(2024, 1, 31, 12, tzinfo=UTC)
    assert parse_position(' {"0": 5, "12": 0}') == {0: 5, 12: 0}
    assert parse_position("{0: 5, 12 : 0}") == {0: 5, 12: 0}
    for text in ("", "{}", "[]", '{"a": 1}', '{"0": "x"}', '{"0": true}', '{"0": 1.5}', "{" * 100_000):
        with pytest.raises(InvalidPositionError):
            parse_position(text)
    with pytest.raises(InvalidPositionError, match=r"write 2024-01-31T00:00:00Z or"):
        parse_position("2024-01-31")
