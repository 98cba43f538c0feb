"""Checkpoint entries of continuous queries are created durably and never replaced."""

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
from tests.continuous.queue_copy import TIMEOUT, Copy

storages = pytest.mark.parametrize("storage", ["local", "remote"])


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "0"
    create_durably(str(path), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["0"], "no partial file is left"


@pytest.mark.parametrize("write", ["add_entry", "_replace"])
def test_writing_to_a_deleted_checkpoint_is_refused_with_its_reason(tmp_path: Path, write: str) -> None:
    logs = CheckpointLog(str(tmp_path / "ck"))
    shutil.rmtree(tmp_path / "ck")
    arguments = [lambda: True] if write == "_replace" else []
    with pytest.raises(CommitRefusedError, match="its folder was deleted or moved") as refused:
        getattr(logs, write)("offsets/0", "v1", *arguments)
    assert refused.value.condition == "COMMIT_REFUSED.CHECKPOINT_DAMAGED"
    assert not (tmp_path / "ck").exists()


@pytest.mark.timeout(60)
def test_pruning_takes_no_time_for_missing_numbers(tmp_path: Path) -> None:
    """Anybody who can write to the checkpoint can leave a gap of any size."""
    logs = CheckpointLog(str(tmp_path / "ck"))
    for number in (0, 5, 10**12):
        (tmp_path / "ck/offsets" / str(number)).touch()
    logs = CheckpointLog(str(tmp_path / "ck"))
    logs.prune(10**12, 10)
    assert logs.numbers("offsets") == [10**12]


def test_content_is_synced_before_the_file_is_named_and_the_folder_is_synced_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def record_and_sync(file: int) -> None:
        status = os.fstat(file)
        steps.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes")
        sync(file)

    def record_and_link(source: str, target: str) -> None:
        steps.append("name")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    monkeypatch.setattr(os, "link", record_and_link)
    create_durably(str(tmp_path / "0"), b"content")
    assert steps == ["file of 7 bytes", "name", "folder"]


def test_each_folder_of_a_new_checkpoint_is_synced_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def record_and_sync(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    CheckpointLog(str(tmp_path / "new" / "checkpoint"))
    root = tmp_path / "new" / "checkpoint"
    parents = [tmp_path, root.parent, root, root / "sources"]
    assert {folder.stat().st_ino for folder in parents} <= set(synced)
    assert all((root / name).is_dir() for name in ("offsets", "commits", "sources/0"))


def test_a_file_with_the_name_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "offsets").write_text("")
    with pytest.raises(OSError, match="offsets"):
        CheckpointLog(str(tmp_path))


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            create_durably(str(tmp_path / "0"), b"more than four bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous_handler)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_on_file_systems_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_link(source: str, target: str) -> None:
        raise PermissionError(1, "hard links are not supported")

    monkeypatch.setattr(os, "link", refuse_link)
    create_durably(str(tmp_path / "0"), b"first")
    with pytest.raises(FileExistsError):
        create_durably(str(tmp_path / "0"), b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("0", b"first")]


@storages
def test_an_entry_of_another_driver_is_not_replaced_and_stops_this_driver(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_log, "is_local", lambda files: storage == "local")
    own, other = CheckpointLog(str(tmp_path)), CheckpointLog(str(tmp_path))
    assert own.query_id() == other.query_id()
    other.write_offset(0, {"to": [2]}, 5)
    with pytest.raises(OwnerFencedError, match=r"offsets/0 of the checkpoint .* by another driver") as caught:
        own.write_offset(0, {"to": [1]})
    assert caught.value.condition == "OWNER_FENCED.CHECKPOINT"
    other.write_commit(0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OwnerFencedError, match=r"commits/0 of the checkpoint .* by another driver") as caught:
        own.write_commit(0)
    assert caught.value.condition == "OWNER_FENCED.CHECKPOINT"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert own.single_offset(0) == {"to": [2]}
    own.write_offset(1, {"to": [3]})
    assert own.uncommitted() == 1, "the next epoch number is free"


@storages
def test_two_drivers_that_create_a_checkpoint_simultaneously_share_one_id(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver creates the checkpoint after this one has found none."""
    monkeypatch.setattr(checkpoint_log, "is_local", lambda files: storage == "local")
    # With an object store, a separate request checks first whether the file exists. Locally, one step creates
    # the file or fails.
    owner, name = (checkpoint_log, "create_durably") if storage == "local" else (CheckpointLog, "_create")
    create = getattr(owner, name)
    other_ids: list[str] = []

    def create_after_other_driver(*args: object) -> None:
        monkeypatch.setattr(owner, name, create)
        other_ids.append(CheckpointLog(str(tmp_path)).query_id())
        create(*args)

    monkeypatch.setattr(owner, name, create_after_other_driver)
    assert other_ids == [CheckpointLog(str(tmp_path)).query_id()]


@pytest.mark.parametrize("consumer", ["c", None])
def test_a_query_whose_next_entry_already_exists_stops_and_keeps_it(copy: Copy, consumer: str | None) -> None:
    copy.consumer = consumer
    query = copy.add().create_query()
    copy.wait_until_committed(query)
    number = copy.logged_epochs("commits")[-1] + 1
    other_offset = {"to": [9, 9]}
    other = CheckpointLog(str(copy.folder / "ck"))
    # The rows may be split into several epochs, and the checkpoint of a query with a consumer has only some.
    for epoch in range(number, number + 10):
        other.write_offset(epoch, other_offset)
        if consumer is not None:
            # The query's own epoch, which is in the sink, replaces one that was only begun.
            other.write_commit(epoch)
    copy.add()
    assert query.join(TIMEOUT)
    assert isinstance(query.failure, OwnerFencedError)
    assert query.failure.condition == "OWNER_FENCED.CHECKPOINT"
    assert query.checkpoint.single_offset(number) == other_offset
