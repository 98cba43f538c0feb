"""Entries of a continuous query's checkpoint: created, never replaced, and synced when written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest

from penstock.continuous.driver import checkpoint_log
from penstock.continuous.driver.checkpoint_log import CheckpointLog, create_durably
from penstock.errors import CommitRefusedError, OwnerFencedError
from tests.continuous.copying import PATIENCE, Copy

places = pytest.mark.parametrize("place", ["local", "remote"])


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "0"
    create_durably(str(path), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["0"], "nothing half-written is left"


@pytest.mark.parametrize("write", ["add_entry", "_replace"])
def test_a_deleted_checkpoint_is_named(tmp_path: Path, write: str) -> None:
    logs = CheckpointLog(str(tmp_path / "ck"))
    shutil.rmtree(tmp_path / "ck")
    arguments = [lambda: True] if write == "_replace" else []
    with pytest.raises(CommitRefusedError, match="its folder was deleted or moved") as refused:
        getattr(logs, write)("offsets/0", "v1", *arguments)
    assert refused.value.condition == "COMMIT_REFUSED.CHECKPOINT_DAMAGED"
    assert not (tmp_path / "ck").exists()


@pytest.mark.timeout(60)
def test_pruning_takes_no_time_for_numbers_that_are_not_there(tmp_path: Path) -> None:
    """Whoever may write to the checkpoint can leave any gap."""
    logs = CheckpointLog(str(tmp_path / "ck"))
    for number in (0, 5, 10**12):
        (tmp_path / "ck/offsets" / str(number)).touch()
    logs = CheckpointLog(str(tmp_path / "ck"))
    logs.prune(10**12, 10)
    assert logs.numbers("offsets") == [10**12]


def test_content_is_synced_before_the_file_gets_its_name_and_the_name_is_synced_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def syncing(file: int) -> None:
        status = os.fstat(file)
        steps.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes")
        sync(file)

    def linking(source: str, target: str) -> None:
        steps.append("name")
        link(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "link", linking)
    create_durably(str(tmp_path / "0"), b"content")
    assert steps == ["file of 7 bytes", "name", "folder"]


def test_each_folder_of_a_new_checkpoint_is_synced_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def syncing(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", syncing)
    CheckpointLog(str(tmp_path / "new" / "checkpoint"))
    root = tmp_path / "new" / "checkpoint"
    parents = [tmp_path, root.parent, root, root / "sources"]
    assert {each.stat().st_ino for each in parents} <= set(synced)
    assert all((root / name).is_dir() for name in ("offsets", "commits", "sources/0"))


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "offsets").write_text("")
    with pytest.raises(OSError, match="offsets"):
        CheckpointLog(str(tmp_path))


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
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


def test_a_file_is_not_replaced_on_file_systems_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: str, target: str) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "link", refused)
    create_durably(str(tmp_path / "0"), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(tmp_path / "0"), b"second")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("0", b"first")]


@places
def test_an_entry_of_another_driver_is_not_replaced_and_stops_this_driver(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_log, "is_local", lambda files: place == "local")
    mine, other = CheckpointLog(str(tmp_path)), CheckpointLog(str(tmp_path))
    assert mine.query_id() == other.query_id()
    other.write_offset(0, {"to": [2]}, 5)
    with pytest.raises(OwnerFencedError, match=r"offsets/0 of the checkpoint .* by another driver") as caught:
        mine.write_offset(0, {"to": [1]})
    assert caught.value.condition == "OWNER_FENCED.CHECKPOINT"
    other.write_commit(0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OwnerFencedError, match=r"commits/0 of the checkpoint .* by another driver") as caught:
        mine.write_commit(0)
    assert caught.value.condition == "OWNER_FENCED.CHECKPOINT"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert mine.single_offset(0) == {"to": [2]}
    mine.write_offset(1, {"to": [3]})
    assert mine.uncommitted() == 1, "the next one is free"


@places
def test_two_drivers_that_create_a_checkpoint_simultaneously_share_one_id(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver creates it after this one has found no checkpoint."""
    monkeypatch.setattr(checkpoint_log, "is_local", lambda files: place == "local")
    # An object store has to be asked first whether the file is there; a local file is created or refused in
    # one step.
    owner, name = (checkpoint_log, "create_durably") if place == "local" else (CheckpointLog, "_create")
    create = getattr(owner, name)
    others: list[str] = []

    def meanwhile(*arguments: object) -> None:
        monkeypatch.setattr(owner, name, create)
        others.append(CheckpointLog(str(tmp_path)).query_id())
        create(*arguments)

    monkeypatch.setattr(owner, name, meanwhile)
    assert others == [CheckpointLog(str(tmp_path)).query_id()]


@pytest.mark.parametrize("consumer", ["c", None])
def test_a_query_whose_next_entry_already_exists_stops_and_keeps_it(copy: Copy, consumer: str | None) -> None:
    copy.consumer = consumer
    query = copy.add().query()
    copy.through(query)
    number = copy.files("commits")[-1] + 1
    theirs = {"to": [9, 9]}
    other = CheckpointLog(str(copy.folder / "ck"))
    # The rows may come in several epochs, of which the checkpoint of a query with a consumer has only some.
    for each in range(number, number + 10):
        other.write_offset(each, theirs)
        if consumer is not None:
            # The sink has the query's own epoch, which replaces one that was only begun.
            other.write_commit(each)
    copy.add()
    assert query.join(PATIENCE)
    assert isinstance(query.failure, OwnerFencedError)
    assert query.failure.condition == "OWNER_FENCED.CHECKPOINT"
    assert query.checkpoint.single_offset(number) == theirs
