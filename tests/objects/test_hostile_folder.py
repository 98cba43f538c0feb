"""A folder of objects where somebody else may write, too: nothing outside it is read, changed or deleted, and
nobody waits for what never comes.
"""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.errors import StoreError
from penstock.objects.local import LocalStorage
from penstock.objects.location import parse_location
from penstock.parallel import in_parallel
from tests.support.raw_sql import run_sql
from tests.support.spark_queues import one_store

SCHEMA = pa.schema([("text", pa.string())])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "rows"
    made.mkdir()
    return made


@pytest.fixture
def storage(folder: Path) -> LocalStorage:
    return LocalStorage(parse_location(folder))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a file that is as old as an orphan."""
    made = tmp_path / "elsewhere"
    made.mkdir(mode=0o700)
    for name in ("file", f"{'0' * 32}.segments"):
        (made / name).write_bytes(b"secret")
        os.utime(made / name, (0, 0))
    return made


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_an_object_is_damage(storage: LocalStorage, folder: Path) -> None:
    storage.put("a/rows", [b"0123"])
    (folder / "a/rows").unlink()
    os.mkfifo(folder / "a/rows")
    with pytest.raises(StoreError, match="is not a file") as damaged:
        storage.read("a/rows", [(0, 4)])
    assert damaged.value.condition == "STORE_ERROR.OBJECT_DAMAGED"
    assert storage.listed("a/") == []


def test_a_link_in_the_place_of_an_object_is_not_followed(
    storage: LocalStorage, folder: Path, elsewhere: Path
) -> None:
    storage.put("a/rows", [b"0123"])
    (folder / "a/rows").unlink()
    (folder / "a/rows").symlink_to(elsewhere / "file")
    with pytest.raises(StoreError, match="a link") as damaged:
        storage.read("a/rows", [(0, 4)])
    assert damaged.value.condition == "STORE_ERROR.OBJECT_DAMAGED"
    assert storage.listed("a/") == []
    storage.put("a/rows", [b"4567"])
    assert storage.read("a/rows", [(0, 4)]) == [b"4567"]
    assert (elsewhere / "file").read_bytes() == b"secret"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_link_in_the_place_of_a_folder_is_not_followed(
    storage: LocalStorage, folder: Path, elsewhere: Path, depth: int
) -> None:
    if depth == 1:
        (folder / "a").symlink_to(elsewhere)
        (elsewhere / "b").mkdir()
        (elsewhere / "file").rename(elsewhere / "b/file")
    else:
        (folder / "a").mkdir()
        (folder / "a/b").symlink_to(elsewhere)
    for refused in (
        lambda: storage.read("a/b/file", [(0, 4)]),
        lambda: storage.listed("a/b/"),
        lambda: storage.delete(["a/b/file"]),
        lambda: storage.put("a/b/new", [b"0"]),
    ):
        with pytest.raises(StoreError, match="a link or another kind of file"):
            refused()
    assert sorted(each.name for each in elsewhere.rglob("*") if each.is_file()) == [
        f"{'0' * 32}.segments",
        "file",
    ]


def test_a_new_folder_that_is_exchanged_does_not_pass_its_permissions_on(
    storage: LocalStorage, folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o2770)
    mkdir = os.mkdir

    def exchanged(path: str, mode: int, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        (folder / path).rmdir()
        elsewhere.rename(folder / path)

    monkeypatch.setattr("penstock.objects.local.os.mkdir", exchanged)
    storage.put("a/rows", [b"0123"])
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o700


def put_number(storage: LocalStorage, number: int) -> None:
    storage.put(f"a/b/{number}", [b"0"])


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_folders_that_several_make_at_once_have_the_permissions_of_the_location(
    tmp_path: Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            folder.chmod(0o775)
            storage = LocalStorage(parse_location(folder))
            in_parallel(partial(put_number, storage), range(4))
            assert {stat.S_IMODE(each.stat().st_mode) for each in (folder / "a", folder / "a/b")} == {0o775}
            assert sorted(each.name for each in (folder / "a").iterdir()) == ["b"]
    finally:
        os.umask(before)


def test_writes_go_on_while_others_remove_empty_folders(storage: LocalStorage) -> None:
    def write_and_delete(number: int) -> None:
        for n in range(100):
            name = f"a/b/{number}-{n}"
            storage.put(name, [b"0123"])
            assert storage.read(name, [(0, 4)]) == [b"0123"]
            storage.delete([name])

    in_parallel(write_and_delete, range(3))
    assert storage.listed("a/b/") == []


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_location_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(parse_location(f"{tmp_path}/file{below}"))
    for refused in (lambda: storage.put("a/b", [b"0"]), lambda: storage.listed("a/")):
        with pytest.raises(StoreError, match="not a folder") as caught:
            refused()
        assert caught.value.condition == "STORE_ERROR.CANNOT_OPEN"


def test_one_that_cannot_be_deleted_keeps_no_others(storage: LocalStorage, folder: Path) -> None:
    for name in ("a/1", "a/2"):
        storage.put(name, [b"0"])
    (folder / "a/0").mkdir()
    with pytest.raises(StoreError):
        storage.delete(["a/0", "a/1", "a/2"])
    assert storage.listed("a/") == []


def test_folders_and_files_have_the_permissions_of_the_location(storage: LocalStorage, folder: Path) -> None:
    folder.chmod(0o770)
    before = os.umask(0o077)
    try:
        storage.put("a/b/rows", [b"0123"])
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in ("a", "a/b", "a/b/rows")]
    assert modes == [0o770, 0o770, 0o660]


@one_store
@pytest.mark.timeout(60)
def test_cleaning_deletes_nothing_elsewhere(store: penstock.Store, folder: Path, elsewhere: Path) -> None:
    queue = store.create_queue("q", SCHEMA, payloads=folder)
    queue.append([{"text": os.urandom(80 << 10).hex()}])
    (own,) = folder.glob(f"*/{queue.record.queue_id}")
    own.rename(folder / "away")
    own.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="a link or another kind of file"):
        store.clean_up_objects(take_over=True)
    own.unlink()
    (folder / "away").rename(own)
    # What is not named like an object is somebody else's.
    (own / "notes").write_bytes(b"mine")
    os.utime(own / "notes", (0, 0))
    assert store.clean_up_objects(take_over=True) == 0
    assert (own / "notes").exists()
    assert len(list(elsewhere.iterdir())) == 2
    (token,) = folder.glob("*/cleaning/token")
    token.unlink()
    os.mkfifo(token)
    with pytest.raises(StoreError, match="another copy"):
        store.clean_up_objects()


def test_an_identity_that_leads_elsewhere_is_refused(store: penstock.Store, store_url: str) -> None:
    run_sql(store.database, "update penstock.store set uuid = '../../elsewhere'")
    store.close()
    with pytest.raises(StoreError, match=r"the store UUID of .* is not valid") as refused:
        penstock.connect(store_url)
    assert refused.value.condition == "STORE_ERROR.DAMAGED"
