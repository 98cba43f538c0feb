"""Wakeups of a SQLite store's watchers: events of named files, and a queue's wakeup file, which appends open
and close.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.store.sqlite import wakeups
from penstock.store.sqlite.files import StoreFiles
from penstock.store.sqlite.wakeups import CLOSED_AFTER_READING, MODIFIED, FileEvents
from tests.store.programs import SCHEMA
from tests.support.processes import ChildProcess
from tests.support.waiting import readable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def events(tmp_path: Path) -> Iterator[FileEvents]:
    (tmp_path / "one").write_text("")
    opened = FileEvents(str(tmp_path), ["one", "two ä"], MODIFIED)
    yield opened
    opened.close()


def _heard(events: FileEvents) -> bool:
    assert readable(events, 10)
    return events.has_events()


def _silent(events: FileEvents) -> bool:
    return not readable(events, 0) and not events.has_events()


def _append(file: Path) -> None:
    with file.open("a") as out:
        out.write("x")


def test_a_write_is_reported_once(events: FileEvents, tmp_path: Path) -> None:
    assert _silent(events)
    for _ in range(3):
        _append(tmp_path / "one")
        assert _heard(events)
        assert _silent(events)


def test_files_that_are_created_later_or_recreated_are_reported(events: FileEvents, tmp_path: Path) -> None:
    file = tmp_path / "two ä"
    for _ in range(3):
        file.write_text("")
        assert _heard(events), "it appeared"
        assert _silent(events)
        _append(file)
        assert _heard(events)
        file.unlink()
        events.has_events()
    other = tmp_path / "other"
    other.write_text("x")
    events.has_events()
    other.rename(tmp_path / "one")
    assert _heard(events), "another one took its place"
    events.has_events()
    _append(tmp_path / "one")
    assert _heard(events)


def test_other_files_of_the_folder_are_not_reported(events: FileEvents, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    assert not events.has_events(), "one that appears wakes, and is passed over"
    _append(other)
    (tmp_path / "one").read_text()
    assert _silent(events)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FileEvents(str(tmp_path / "none"), ["one"], MODIFIED)


def test_closing_a_file_after_reading_is_reported_to_its_listeners(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    events = FileEvents(str(tmp_path), ["one"], CLOSED_AFTER_READING)
    for _ in range(3):
        (tmp_path / "one").read_text()
        assert _heard(events)
        _append(tmp_path / "one")
        assert _silent(events)
    events.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        yield store


def test_only_an_append_to_the_queue_wakes_its_watchers(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    """This runs in a separate process. Children of other tests would keep files open for a moment, and the
    event occurs only when the last copy of a file is closed.
    """
    child = run_child("tests.store.programs", "wakeups_of", f"sqlite:///{tmp_path}/x.db")
    assert child.wait() == 0
    assert child.output.splitlines() == [
        "files before anybody listens: 0",
        "listening: silent",
        *[
            "append: woken",
            "append to another queue: silent",
            "read: silent",
            "create the queue again: AlreadyExistsError: silent",
        ]
        * 3,
    ]


def test_without_a_wakeup_file_writes_to_the_store_are_watched(tmp_path: Path, store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    Path(wakeups.wakeup_file(str(tmp_path / "x.db"), queue.record.queue_id)).mkdir()
    assert (
        wakeups.listen(str(tmp_path / "x.db"), queue.record.queue_id, StoreFiles(str(tmp_path / "x.db")))
        is None
    )
    with queue.watch() as watch:
        for n in range(3):
            queue.append([{"n": n}])
            assert watch.wait({0: n}, 30).ends == {0: n + 1}
