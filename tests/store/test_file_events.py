"""What the kernel tells of files: writes to those that are named, whenever they were made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.store.sqlite.wakeups import VISITED, WRITTEN, FileEvents
from tests.support.waiting import readable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def events(tmp_path: Path) -> Iterator[FileEvents]:
    (tmp_path / "one").write_text("")
    opened = FileEvents(str(tmp_path), ["one", "two ä"], WRITTEN)
    yield opened
    opened.close()


def _heard(events: FileEvents) -> bool:
    assert readable(events, 10)
    return events.heard()


def _silent(events: FileEvents) -> bool:
    return not readable(events, 0) and not events.heard()


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
    assert not events.heard(), "one that appears wakes, and is passed over"
    _append(other)
    (tmp_path / "one").read_text()
    assert _silent(events)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FileEvents(str(tmp_path / "none"), ["one"], WRITTEN)


def test_a_visit_is_heard_of_by_who_asked_for_visits(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    events = FileEvents(str(tmp_path), ["one"], VISITED)
    for _ in range(3):
        (tmp_path / "one").read_text()
        assert _heard(events)
        _append(tmp_path / "one")
        assert _silent(events)
    events.close()
