"""``penstock store``, in text and in JSON, on both kinds of database."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from penstock.queue.store import connect
from tests.support.commands import Penstock, run_penstock
from tests.support.raw_sql import run_sql


def test_init_creates_a_store_once(store_url: str) -> None:
    first = run_penstock("store", "init", "--url", store_url, "--json").json
    again = run_penstock("store", "init", "--url", store_url, "--json").json
    assert (first["created"], again["created"]) == (True, False)
    assert first["uuid"] == again["uuid"]
    with connect(store_url, create=False) as store:
        assert store.uuid == first["uuid"]
    assert "already exists" in run_penstock("store", "init", "--url", store_url).out


def test_info_shows_the_contents_of_a_store(penstock: Penstock, store_url: str) -> None:
    with connect(store_url) as store:
        store.create_consumer("c")
        queue = store.create_queue("q", _schema(), partitions=2)
        queue.append([{"id": 1}, {"id": 2}])
        expected = store.info()
    found = penstock("store", "info", "--json").json
    assert found == {
        "url": expected.url,
        "uuid": expected.uuid,
        "version": expected.version,
        "queues": 1,
        "consumers": 1,
        "rows": 2,
        "bytes": expected.bytes,
        "commits": 0,
        "staged_segments": 0,
        "staged_bytes": 0,
    }
    text = penstock("store", "info").out
    assert expected.uuid in text
    assert "0 segments, 0 B" in text


def _schema() -> object:
    import pyarrow as pa

    return pa.schema([("id", pa.int64())])


def test_clean_up_reports_how_much_it_dropped(penstock: Penstock) -> None:
    assert penstock("store", "clean-up", "--older-than", "6h", "--json").json == {
        "dropped_segments": 0,
        "older_than_seconds": 21600.0,
        "deleted_objects": 0,
    }
    assert "dropped 0 segments staged more than 1 d ago" in penstock("store", "clean-up").out
    assert "is a duration such as" in penstock("store", "clean-up", "--older-than", "soon", code=1).err


@pytest.mark.parametrize(
    "words",
    [
        ["store", "info"],
        ["store", "clean-up"],
        ["queue", "list"],
        ["queue", "put", "q"],
        ["queue", "peek", "q"],
        ["queue", "create", "q", "--schema", "id int"],
        ["consumer", "create", "c"],
        ["consumer", "lag"],
    ],
)
def test_only_init_creates_a_store(store_url: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # No message has it.
    monkeypatch.setenv("PGPASSWORD", urlsplit(store_url).password or "")
    error = run_penstock(*words, "--url", store_url, "--json", code=1).error
    assert error["error"] == "STORE_NOT_FOUND"
    assert run_penstock(*_advised(error["message"]), "--json").json["created"]
    assert run_penstock("store", "info", "--url", store_url, "--json").json


def test_without_a_url_the_error_names_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "variable PENSTOCK_URL" in run_penstock("queue", "list", "--json", code=1).error["message"]
    monkeypatch.setenv("PENSTOCK_URL", "sqlite:///other.db")
    assert "variable" not in run_penstock("queue", "list", "--json", code=1).error["message"]


def _advised(message: str) -> list[str]:
    """The arguments of the command that a message recommends."""
    program, *words = shlex.split(message.split("`")[1])
    assert program == "penstock"
    return words


def test_without_a_url_the_store_is_a_file_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    run_penstock("store", "init")
    assert (tmp_path / "penstock.db").exists()


def test_the_url_option_may_precede_or_follow_the_command_and_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", f"sqlite:///{tmp_path}/environment.db")
    run_penstock("--url", f"sqlite:///{tmp_path}/before.db", "store", "init")
    run_penstock("store", "init", "--url", f"sqlite:///{tmp_path}/behind.db")
    run_penstock("store", "init")
    assert {path.name for path in tmp_path.glob("*.db")} == {"before.db", "behind.db", "environment.db"}


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_empty_url_is_refused_and_no_other_store_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """As of an unset variable of a shell script: the command must not change the default store."""
    monkeypatch.setenv("PENSTOCK_URL", f"sqlite:///{tmp_path}/environment.db")
    words = ["--url", "", "store", "init"] if place == "before" else ["store", "init", "--url", ""]
    result = run_penstock(*words, code=1)
    assert "[INVALID_URL] a store URL is one of" in result.err
    assert not list(tmp_path.glob("*.db"))


def test_check_compares_objects_with_the_store(penstock: Penstock, store_url: str, tmp_path: Path) -> None:
    assert penstock("store", "check", "--json").json == {"queues": []}
    assert penstock("store", "check").out == "no queue keeps rows in object storage\n"
    folder = tmp_path / "rows"
    created = penstock("queue", "create", "q", "--schema", "data binary", "--payloads", str(folder)).out
    assert "created queue 'q'" in created
    with connect(store_url) as store:
        store.queue("q").append([{"data": os.urandom(100_000)}])
        store.queue("q").append([{"data": os.urandom(100_000)}])
    first, second = sorted(folder.glob("*/*/*.segments"))
    (found,) = penstock("store", "check", "--json").json["queues"]
    assert (found["queue"], found["objects"], found["missing"]) == ("q", 2, [])
    assert found["read_bytes"] is None
    (found,) = penstock("store", "check", "--read", "--json").json["queues"]
    assert found["read_bytes"] > 200_000
    data = second.read_bytes()
    second.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    assert penstock("store", "check", "--json").json["queues"][0]["damaged"] == []
    text = penstock("store", "check", "--read", code=1).out
    assert str(second.relative_to(folder)) in text
    assert "rows as written" in text
    first.unlink()
    second.write_bytes(b"")
    (found,) = penstock("store", "check", "--json", code=1).json["queues"]
    assert found["missing"] == [str(first.relative_to(folder))]
    assert found["damaged"] == [str(second.relative_to(folder))]
    text = penstock("store", "check", code=1).out
    assert str(first.relative_to(folder)) in text


def test_a_location_that_nobody_can_read_hides_no_other_one(
    penstock: Penstock, store_url: str, tmp_path: Path
) -> None:
    with connect(store_url) as store:
        for name in ("bad", "good"):
            queue = store.create_queue(name, pa.schema([("data", pa.binary())]), payloads=tmp_path / name)
            queue.append([{"data": os.urandom(100_000)}])
        run_sql(store.database, "update penstock.queue set payloads = '' where name = 'bad'")
        orphan = tmp_path / "good" / store.uuid / str(queue.record.queue_id) / f"{'0' * 32}.segments"
    bad, good = penstock("store", "check", "--json", code=1).json["queues"]
    assert (bad["queue"], good["queue"], good["objects"], good["error"]) == ("bad", "good", 1, None)
    assert "does not have the form in which Penstock stores locations" in bad["error"]
    assert "not compared" in penstock("store", "check", code=1).out
    orphan.write_bytes(b"of a dead process")
    then = time.time() - 2 * 86_400
    os.utime(orphan, (then, then))
    penstock("store", "clean-up", code=1)
    penstock("store", "clean-up", code=1)
    assert not orphan.exists()


def test_clean_up_deletes_old_objects_without_rows(
    penstock: Penstock, store_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    with connect(store_url) as store:
        number = store.create_queue("q", _schema(), payloads=folder).record.queue_id
        orphan = folder / store.uuid / str(number) / f"{'0' * 32}.segments"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"of a dead process")
    assert penstock("store", "clean-up", "--json").json["deleted_objects"] == 0
    then = time.time() - 2 * 86_400
    os.utime(orphan, (then, then))
    assert "deleted 1 object without rows" in penstock("store", "clean-up").out
    assert not orphan.exists()
