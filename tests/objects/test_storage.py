"""Writing and reading objects: in a folder and in a bucket, alike."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from penstock.errors import (
    MissingDependencyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from penstock.objects import storage as storages
from penstock.objects.local import LocalStorage
from penstock.objects.location import parse_location
from penstock.objects.opened import OpenedStorages
from penstock.objects.storage import ObjectStorage
from tests.support import object_proxy
from tests.support.object_proxy import ObjectProxy


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    """An empty storage, in a folder of its own."""
    if request.param == "folder":
        return OpenedStorages().at(parse_location(tmp_path / "rows"))
    request.getfixturevalue("bucket")
    return OpenedStorages().at(f"s3://rows/{tmp_path.name}")


@pytest.fixture
def s3(bucket: ObjectProxy, tmp_path: Path) -> ObjectStorage:
    return OpenedStorages().at(f"s3://rows/{tmp_path.name}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after the first repetition."""
    monkeypatch.setattr(storages, "RETRY_SECONDS", 0.5)


def test_ranges_of_an_object_are_read(storage: ObjectStorage) -> None:
    storage.put("a/b/rows", [b"0123", memoryview(b"4567"), b"89"])
    ranges = [(0, 10), (8, 2), (3, 3)]
    assert [bytes(each) for each in storage.read("a/b/rows", ranges)] == [b"0123456789", b"89", b"345"]


def test_writing_again_changes_nothing(storage: ObjectStorage) -> None:
    storage.put("a/rows", [b"0123"])
    storage.put("a/rows", [b"0123"])
    assert storage.read("a/rows", [(0, 4)]) == [b"0123"]
    assert [each.name for each in storage.listed("a/")] == ["a/rows"]


def test_objects_are_listed_with_size_and_time(storage: ObjectStorage) -> None:
    before = time.time() - 2
    for name in ("a/1", "a/b/2", "ab/3"):
        storage.put(name, [name.encode()])
    listed = {each.name: each for each in storage.listed("a/")}
    assert sorted(listed) == ["a/1"]
    assert listed["a/1"].size == 3
    assert before < listed["a/1"].modified_at / 1e6 < time.time() + 2
    assert storage.listed("nothing/") == []


def test_deleting_twice_is_no_error(storage: ObjectStorage) -> None:
    storage.put("a/1", [b"1"])
    storage.put("a/2", [b"2"])
    storage.delete(["a/1", "a/1", "a/3"])
    assert [each.name for each in storage.listed("a/")] == ["a/2"]


def test_a_missing_object_is_named(storage: ObjectStorage) -> None:
    with pytest.raises(StoreError, match="the object a/1 is missing") as missing:
        storage.read("a/1", [(0, 1)])
    assert missing.value.condition == "STORE_ERROR.OBJECT_MISSING"


@pytest.mark.usefixtures("impatient")
def test_a_range_past_the_end_is_an_error(storage: ObjectStorage) -> None:
    storage.put("a/1", [b"0123"])
    for wanted in ((2, 3), (4, 1), (1 << 40, 1 << 40)):
        with pytest.raises(StoreError):
            storage.read("a/1", [wanted])


def test_the_check_leaves_nothing(storage: ObjectStorage) -> None:
    storage.check("a/check")
    assert storage.listed("a/") == []


def test_many_threads_write_and_read(storage: ObjectStorage) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(5):
            data = bytes([number, turn]) * 1000
            storage.put(f"a/{number}/{turn}", [data])
            if storage.read(f"a/{number}/{turn}", [(0, len(data))]) != [data]:
                wrong.append(number)
            storage.delete([f"a/{number}/{turn}"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert storage.listed("a/") == []


# A folder.


def test_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    LocalStorage(parse_location(shared)).put("a/b/rows", [b"1"])
    assert stat.S_IMODE((shared / "a/b/rows").stat().st_mode) == 0o640
    assert stat.S_IMODE((shared / "a/b").stat().st_mode) == 0o750
    LocalStorage(parse_location(tmp_path / "new")).put("a/rows", [b"1"])
    assert stat.S_IMODE((tmp_path / "new/a/rows").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_what_a_dead_writer_has_left_is_listed_and_no_object(tmp_path: Path) -> None:
    storage = LocalStorage(parse_location(tmp_path))
    storage.put("a/rows", [b"1"])
    (tmp_path / "a/rows.0123.part").write_bytes(b"half")
    names = {each.name for each in storage.listed("a/")}
    assert names == {"a/rows", "a/rows.0123.part"}
    storage.delete(names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreReadOnlyError, match="Permission denied"):
        LocalStorage(parse_location(tmp_path)).put("a/rows", [b"1"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: Any, flags: int, *rest: int, **more: Any) -> int:
        return (
            real("/dev/full", os.O_WRONLY)
            if str(path).endswith(".part")
            else real(path, flags, *rest, **more)
        )

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    with pytest.raises(StoreFullError):
        LocalStorage(parse_location(tmp_path)).put("a/rows", [b"1"])


# A bucket.


@pytest.mark.parametrize("fault", [object_proxy.unavailable, object_proxy.lost_reply, object_proxy.no_reply])
def test_a_write_that_seems_to_fail_is_repeated(
    s3: ObjectStorage, bucket: ObjectProxy, fault: object_proxy.Fault, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.fail("PUT", fault, fault, fault)
    with caplog.at_level(logging.WARNING):
        s3.put("a/rows", [b"0123"])
    assert bucket.pending == 0
    assert s3.read("a/rows", [(0, 4)]) == [b"0123"]
    assert any(getattr(record, "action", "") == "objects_retry" for record in caplog.records)


@pytest.mark.parametrize("fault", [object_proxy.unavailable, object_proxy.truncated, object_proxy.shortened])
def test_a_read_that_fails_is_repeated(
    s3: ObjectStorage, bucket: ObjectProxy, fault: object_proxy.Fault
) -> None:
    data = bytes(range(256)) * 100
    s3.put("a/rows", [data])
    bucket.fail("GET", fault, fault, fault)
    assert s3.read("a/rows", [(0, len(data))]) == [data]
    assert bucket.pending == 0


def test_near_ranges_are_read_in_one_request(s3: ObjectStorage, bucket: ObjectProxy) -> None:
    s3.put("a/rows", [bytes(100_000)])
    bucket.requests.clear()
    s3.read("a/rows", [(start, 10) for start in range(0, 100_000, 1000)])
    assert bucket.requests == ["GET"]


@pytest.mark.usefixtures("impatient")
def test_a_storage_that_stays_away_is_an_error_after_a_while(s3: ObjectStorage, bucket: ObjectProxy) -> None:
    bucket.fail("PUT", *[object_proxy.unavailable] * 50)
    try:
        with pytest.raises(StoreUnavailableError, match="503") as failed:
            s3.put("a/rows", [b"1"])
    finally:
        bucket._faults.clear()
    assert failed.value.condition == "STORE_UNAVAILABLE.OBJECTS"
    assert "\n" not in failed.value.message


def test_a_missing_bucket_and_wrong_credentials_are_told_apart_from_failures(
    bucket: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreReadOnlyError, match="bucket") as refused:
        OpenedStorages().at("s3://nowhere/a").check("b")
    assert refused.value.condition == "STORE_READ_ONLY.OBJECTS"

    def forbidden(exchange: object_proxy.Exchange) -> None:
        exchange.answer(403, [], b"<Error><Code>AccessDenied</Code></Error>")

    bucket.fail("PUT", forbidden)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-hidden-secret")
    with pytest.raises(StoreReadOnlyError, match="credentials") as denied:
        OpenedStorages().at("s3://rows/a").put("b", [b"1"])
    assert "hidden" not in str(denied.value)


@pytest.mark.usefixtures("bucket")
def test_missing_credentials_are_named_rather_than_the_metadata_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailableError, match="this process has no credentials") as caught:
        OpenedStorages().at("s3://rows/a").check("b")
    assert caught.value.condition == "STORE_UNAVAILABLE.OBJECT_CREDENTIALS"


def test_requests_without_tls_are_refused_at_once_unless_the_environment_allows_them(
    bucket: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    bucket.requests.clear()
    storage = OpenedStorages().at("s3://rows/a")
    for refused in (
        lambda: storage.check("b"),
        lambda: storage.put("b", [b"1"]),
        lambda: storage.read("b", [(0, 1)]),
        lambda: storage.listed("b/"),
    ):
        with pytest.raises(StoreError, match="AWS_ALLOW_HTTP=true") as caught:
            refused()
        assert caught.value.condition == "STORE_ERROR.OBJECT_SETTINGS"
    assert bucket.requests == []


def _use_in_child(storage: ObjectStorage, results: multiprocessing.Queue[str]) -> None:
    try:
        storage.read("a/rows", [(0, 4)])
    except StoreUnavailableError as error:
        results.put(error.message)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_SESSION_TOKEN", "token\n"), ("AWS_ENDPOINT_URL", "nothing"), ("AWS_ENDPOINT_URL", "http://[")],
)
def test_settings_that_no_request_can_be_made_with_are_refused_at_once(
    bucket: ObjectProxy, monkeypatch: pytest.MonkeyPatch, name: str, value: str, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="settings of this process") as caught:
        OpenedStorages().at(f"s3://rows/{tmp_path.name}").put("rows", [b"data"])
    assert caught.value.condition == "STORE_ERROR.OBJECT_SETTINGS"
    assert "token" not in str(caught.value)


def test_a_name_that_cannot_be_listed_is_named(
    s3: ObjectStorage, bucket: ObjectProxy, tmp_path: Path
) -> None:
    request = Request(f"{bucket.endpoint}/rows/{tmp_path.name}/a/..", b"x", method="PUT")
    with urlopen(request, timeout=30):
        pass
    with pytest.raises(StoreError, match="delete it") as caught:
        s3.listed("a/")
    assert caught.value.condition == "STORE_ERROR.OBJECT_NAME"


def test_distant_ranges_take_no_memory_for_what_is_between(s3: ObjectStorage, bucket: ObjectProxy) -> None:
    s3.put("rows", [bytes(16 << 20)])
    bucket.requests.clear()
    read = s3.read("rows", [(place << 20, 1) for place in range(16)])
    assert [bytes(each) for each in read] == [b"\0"] * 16
    assert bucket.requests.count("GET") == 16


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("below", [".", "not there yet"])
def test_a_folder_that_another_user_may_have_made_is_refused(tmp_path: Path, below: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    storage = OpenedStorages().at(parse_location(folder / below))
    # Only the owner of the folder above can have put it there.
    storage.check("check")
    tmp_path.chmod(0o1777)
    with pytest.raises(StoreUnsafeError, match="belongs to user 12345") as caught:
        storage.check("check")
    assert caught.value.condition == "STORE_UNSAFE.FOLDER_OWNER"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_made_again_is_durable_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may give it the number of the one that was removed."""
    storage = OpenedStorages().at(parse_location(tmp_path / "rows"))
    storage.put("a/b", [b"1"])
    storage.put("a/c", [b"2"])
    storage.delete(["a/b", "a/c"])
    synced = []
    fsync = os.fsync
    (tmp_path / "rows/a").mkdir()
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    storage.put("a/b", [b"1"])
    assert (tmp_path / "rows").stat().st_ino in synced


@pytest.mark.usefixtures("impatient")
def test_a_forked_child_does_not_use_its_parents_connections(s3: ObjectStorage) -> None:
    s3.put("a/rows", [b"0123"])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_use_in_child, args=(s3, results))
    child.start()
    assert "forked" in results.get(timeout=60)
    child.join()


def test_the_library_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"penstock-spark\[objects\]"):
        OpenedStorages().at("s3://rows/a")


def test_a_storage_is_opened_once(tmp_path: Path) -> None:
    opened = OpenedStorages()
    url = parse_location(tmp_path)
    assert opened.at(url) is opened.at(url)


@pytest.fixture(autouse=True)
def _no_faults_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server")._faults.clear()
