"""What the kernel tells of files: writes to those that are named, whenever they were made."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import AlreadyExists
from penstock.store.file_events import FileEvents, Heard
from tests.store.programs import SCHEMA

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def events(tmp_path: Path) -> Iterator[FileEvents]:
    (tmp_path / "one").write_text("")
    opened = FileEvents(str(tmp_path), ["one", "two ä"], "bell")
    yield opened
    opened.close()


def _heard(events: FileEvents) -> bool:
    assert select.select([events], [], [], 10)[0]
    return events.heard() is Heard.WRITE


def _silent(events: FileEvents) -> bool:
    return not select.select([events], [], [], 0)[0] and events.heard() is Heard.NOTHING


def _append(file: Path) -> None:
    with file.open("a") as out:
        out.write("x")


def test_a_write_is_heard_of_once(events: FileEvents, tmp_path: Path) -> None:
    assert _silent(events)
    for _ in range(3):
        _append(tmp_path / "one")
        assert _heard(events)
        assert _silent(events)


def test_files_that_are_made_later_and_made_again_are_heard_of_too(
    events: FileEvents, tmp_path: Path
) -> None:
    file = tmp_path / "two ä"
    for _ in range(3):
        file.write_text("")
        assert _heard(events), "it appeared"
        assert _silent(events)
        _append(file)
        assert _heard(events)
        file.unlink()
        events.heard()
    other = tmp_path / "other"
    other.write_text("x")
    events.heard()
    other.rename(tmp_path / "one")
    assert _heard(events), "another one took its place"
    events.heard()
    _append(tmp_path / "one")
    assert _heard(events)


def test_other_files_of_the_folder_are_not(events: FileEvents, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    assert events.heard() is Heard.NOTHING, "one that appears wakes, and is passed over"
    _append(other)
    (tmp_path / "one").read_text()
    assert _silent(events)


def test_a_bell_is_told_from_a_write_and_the_last_of_them_counts(events: FileEvents, tmp_path: Path) -> None:
    bell = tmp_path / "bell"
    bell.touch()
    assert events.heard() is Heard.WRITE, "what was rung before it was watched went unheard"
    for _ in range(3):
        bell.read_text()
        assert events.heard() is Heard.BELL
        _append(tmp_path / "one")
        bell.read_text()
        assert events.heard() is Heard.BELL
        bell.read_text()
        _append(tmp_path / "one")
        assert _heard(events)
    _append(bell)
    assert _silent(events)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FileEvents(str(tmp_path / "none"), ["one"], "bell")


def test_a_commit_rings_and_neither_a_read_nor_a_rollback_does(tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        queue = store.create_queue("q", SCHEMA)
        events = FileEvents(str(tmp_path), [], "x.db-lock")
        for n in range(3):
            queue.append([{"n": n}])
            assert events.heard() is Heard.BELL
            assert queue.read(0, 0).num_rows == n + 1
            with pytest.raises(AlreadyExists):
                store.create_queue("q", SCHEMA)
            assert _silent(events)
        events.close()
