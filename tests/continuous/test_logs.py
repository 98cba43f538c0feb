"""Entries of a continuous query's checkpoint: created, never replaced, on the disk when they have been written."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from penstock.continuous.logs import CheckpointLog, create_durably
from penstock.errors import OwnerFenced


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "0"
    create_durably(str(path), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["0"], "nothing half-written is left"


def test_a_file_has_its_name_when_its_content_is_on_the_disk_and_is_done_when_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, link = os.fsync, os.link

    def syncing(file: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{file}") else "content")
        sync(file)

    def linking(source: str, target: str) -> None:
        done.append("name")
        link(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "link", linking)
    create_durably(str(tmp_path / "0"), b"content")
    assert done == ["content", "name", "folder"]


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            create_durably(str(tmp_path / "0"), b"more than that")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_links_a_file_is_not_replaced_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: str, target: str) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "link", refused)
    create_durably(str(tmp_path / "0"), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(tmp_path / "0"), b"second")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("0", b"first")]


def test_an_epoch_that_another_driver_has_logged_ends_this_one(tmp_path: Path) -> None:
    mine, other = CheckpointLog(str(tmp_path)), CheckpointLog(str(tmp_path))
    assert mine.query_id == other.query_id
    other.write_offset(0, {"to": [2]})
    with pytest.raises(OwnerFenced) as caught:
        mine.write_offset(0, {"to": [1]})
    assert caught.value.condition == "OWNER_FENCED.CHECKPOINT"
    assert mine.offset(0) == {"to": [2]}
    other.write_commit(0)
    with pytest.raises(OwnerFenced):
        mine.write_commit(0)


def test_the_checkpoint_of_two_drivers_that_begin_at_once_has_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.continuous import logs

    other: list[CheckpointLog] = []

    def meanwhile(path: str, content: bytes) -> None:
        monkeypatch.undo()
        other.append(CheckpointLog(str(tmp_path)))
        create_durably(path, content)

    monkeypatch.setattr(logs, "create_durably", meanwhile)
    assert CheckpointLog(str(tmp_path)).query_id == other[0].query_id
