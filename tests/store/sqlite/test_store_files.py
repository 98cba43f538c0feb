"""The files of a SQLite store belong to one user. Other users can neither replace them nor hold their
locks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

import penstock
from penstock.errors import InvalidUrlError, StoreError, StoreNotFoundError, StoreUnsafeError
from penstock.pipeline.publisher import without_waits
from penstock.store.sqlite import files, wakeups
from penstock.store.url import parse_url
from tests.store.programs import SCHEMA

STRANGER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Return the modes of all files and folders below a folder, by their names without numbers."""
    return {
        str(path.relative_to(folder)).partition("/")[0].rstrip("0123456789")
        + (
            "/" if path.is_dir() else "" if path.parent == folder else "/lock"
        ): f"{stat.S_IMODE(path.lstat().st_mode):04o}"
        for path in folder.rglob("*")
    }


def used(url: str) -> dict[str, str]:
    """Create every kind of file that an open store has, and return the files by name."""
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        with closing(queue.watch()), closing(closing_lock(store)):
            queue.append([{"n": 1}])
            return modes(Path(parse_url(url).target).parent)


class closing_lock:  # noqa: N801 - used like a function
    """Wrap an owner lock for ``closing``."""

    def __init__(self, store: penstock.Store) -> None:
        self._lock = store.database.owner_lock("somebody")
        assert self._lock.acquire()

    def close(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277])
@pytest.mark.parametrize(
    ("option", "file", "folder"),
    [
        ("", "0600", "0700"),
        ("?mode=0640", "0640", "0750"),
        ("?mode=660", "0660", "0770"),
        ("?mode=0644", "0644", "0755"),
    ],
)
def test_files_and_folders_get_the_mode_of_the_url_whatever_the_umask(
    tmp_path: Path, mask: int, option: str, file: str, folder: str
) -> None:
    with umask(mask):
        found = used(f"sqlite:///{tmp_path}/x.db{option}")
    beside = {f"x.db{suffix}": file for suffix in ("", "-wal", "-shm", "-lock", "-wakeup-")}
    assert found == beside | {"x.db-owners/": folder, "x.db-owners/lock": file}


def test_the_files_next_to_a_store_file_get_its_mode(tmp_path: Path) -> None:
    """For example, a user has restricted the mode since, or an earlier version left the other files readable
    for everyone.
    """
    url = f"sqlite:///{tmp_path}/x.db"
    with umask(0o022):
        used(f"{url}?mode=0644")
    (tmp_path / "x.db").chmod(0o600)
    with penstock.connect(url) as store, closing(store.queue("q").watch()), closing(closing_lock(store)):
        store.queue("q").append([{"n": 2}])
        assert set(modes(tmp_path).values()) == {"0600", "0700"}


def test_a_store_open_to_others_keeps_its_mode_and_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.db"
    sqlite3.connect(file).execute("create table mine (n)").connection.close()
    file.chmod(0o664)
    for _ in range(2):
        with penstock.connect(f"sqlite:///{file}"):
            assert modes(tmp_path)["x.db"] == "0664"
    (record,) = [each for each in caplog.records if getattr(each, "action", "") == "store_open_to_others"]
    assert record.levelno == logging.WARNING
    assert (
        f"run `chmod 0600 {file}`, or, if that is intended, put mode=0664 in its URL" in record.getMessage()
    )
    assert "others can write" in record.getMessage()


def test_a_folder_in_place_of_a_store_file_causes_no_warning_about_its_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError):
        penstock.connect(f"sqlite:///{tmp_path}")
    assert not caplog.records


def test_no_warning_when_the_url_sets_the_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with penstock.connect(f"sqlite:///{tmp_path}/x.db?mode=0644"):
            pass
    assert not caplog.records


@pytest.mark.parametrize("mode", ["0400", "0060", "0755", "0611", "66", "0o600", "rw", "", "00600", "10600"])
def test_an_invalid_mode_is_refused(mode: str) -> None:
    with pytest.raises(InvalidUrlError, match=r"URL.VALUE\].*such as 0600 or 0640"):
        parse_url(f"sqlite:///x.db?mode={mode}")


def test_an_invalid_trust_is_refused() -> None:
    with pytest.raises(InvalidUrlError, match=r"URL.VALUE\].*trust is own or folder, not 'all'"):
        parse_url("sqlite:///x.db?trust=all")


def test_derived_urls_keep_mode_and_trust(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db?mode=0640&trust=folder"
    hurried = parse_url(without_waits(url))
    assert hurried.options == {
        "mode": "0640",
        "trust": "folder",
        "synchronous": "normal",
        "busy_timeout": "5000",
    }
    with pytest.raises(StoreNotFoundError, match=r"x\.db\?mode=0640&trust=folder"):
        penstock.connect(url, create=False)


def test_creating_an_existing_file_does_not_release_its_locks(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    with penstock.connect(url) as store:
        queue = store.create_queue("q", SCHEMA)
        with store.database.transaction():
            files.StoreFiles(f"{tmp_path}/x.db").create_if_missing()
            other = sqlite3.connect(tmp_path / "x.db", timeout=0)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("begin immediate")
            other.close()
        queue.append([{"n": 1}])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def refused(url: str, condition: str) -> StoreUnsafeError:
    found = []
    for create in (True, False):
        with pytest.raises(StoreUnsafeError) as caught:
            penstock.connect(url, create=create)
        found.append(caught.value)
        assert caught.value.condition == f"STORE_UNSAFE.{condition}"
    return found[0]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Create a store and return its file."""
    folder = tmp_path / "mine"
    folder.mkdir(0o700)
    used(f"sqlite:///{folder}/x.db")
    return folder / "x.db"


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_a_folder_writable_by_others_is_refused(made: Path, mode: int) -> None:
    made.parent.chmod(mode)
    error = refused(f"sqlite:///{made}", "FOLDER_WRITABLE")
    assert f"run `chmod go-w {made.parent}`" in str(error)
    assert error.parameters == {"folder": str(made.parent), "mode": f"{mode:04o}"}
    with penstock.connect(f"sqlite:///{made}?trust=folder", create=False) as store:
        assert store.queue("q").read(0, 0).num_rows == 1
    made.parent.chmod(0o1777)
    with penstock.connect(f"sqlite:///{made}", create=False) as store:
        assert store.queue("q").read(0, 0).num_rows == 1


def test_nothing_is_created_in_a_folder_writable_by_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StoreUnsafeError):
        penstock.connect(f"sqlite:///{folder}/x.db")
    assert list(folder.iterdir()) == []


@as_root
def test_a_group_writable_folder_is_refused_unless_the_group_is_private_to_the_user(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(made.parent, -1, STRANGER)
    made.parent.chmod(0o770)
    refused(f"sqlite:///{made}", "FOLDER_WRITABLE")
    monkeypatch.setattr(files, "is_own_group", lambda gid: gid == STRANGER)
    penstock.connect(f"sqlite:///{made}", create=False).close()
    monkeypatch.undo()
    os.chown(made.parent, -1, 0)
    penstock.connect(f"sqlite:///{made}", create=False).close()


def test_a_group_without_members_is_not_private_to_the_user() -> None:
    assert files.is_own_group(0)
    assert not files.is_own_group(2**31 - 7)


@as_root
def test_another_users_folder_is_refused(made: Path) -> None:
    os.chown(made.parent, STRANGER, -1)
    error = refused(f"sqlite:///{made}", "FOLDER_OWNER")
    assert f"belongs to user {STRANGER}" in str(error)
    penstock.connect(f"sqlite:///{made}?trust=folder", create=False).close()


@as_root
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal", "-lock", "-owners"])
def test_a_file_created_by_another_user_is_refused(made: Path, suffix: str) -> None:
    made.parent.chmod(0o1777)
    file = Path(f"{made}{suffix}")
    if not file.exists():
        file.touch()
    os.chown(file, STRANGER, -1)
    error = refused(f"sqlite:///{made}", "FILE_OWNER")
    assert error.parameters == {"file": str(file), "owner": f"user {STRANGER}"}


@as_root
@pytest.mark.parametrize("where", ["file", "folder", "chain"])
def test_a_store_behind_another_users_symlink_is_refused(made: Path, tmp_path: Path, where: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(made if where == "file" else made.parent)
    way = link if where == "file" else link / "x.db"
    if where == "chain":
        own = tmp_path / "own"
        own.symlink_to("link/../link")
        way = own / "x.db"
    # The current user may be a member.
    penstock.connect(f"sqlite:///{way}", create=False).close()
    os.lchown(link, STRANGER, -1)
    error = refused(f"sqlite:///{way}", "SYMLINK")
    assert f"symbolic link {link} of user {STRANGER}" in str(error)
    penstock.connect(f"sqlite:///{way}?trust=folder", create=False).close()
    penstock.connect(f"sqlite:///{made}", create=False).close()


def test_a_symlink_in_place_of_a_file_next_to_the_store_is_refused(made: Path, tmp_path: Path) -> None:
    for suffix in ("-lock", "-wal", "-owners"):
        file, elsewhere = Path(f"{made}{suffix}"), tmp_path / "elsewhere"
        moved = file.rename(tmp_path / "moved") if file.exists() else None
        file.symlink_to(elsewhere)
        refused(f"sqlite:///{made}", "SYMLINK")
        assert not elsewhere.exists()
        file.unlink()
        if moved is not None:
            moved.rename(file)


def test_a_symlink_created_later_is_not_followed(made: Path, tmp_path: Path) -> None:
    with penstock.connect(f"sqlite:///{made}") as store:
        lock = Path(f"{made}-lock")
        lock.unlink()
        lock.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreUnsafeError), closing(sqlite3.connect(made)) as own:
            store.queue("q").append([{"n": 2}], connection=own)
        assert not (tmp_path / "elsewhere").exists()


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_wakeup_file_does_not_block_appends(made: Path) -> None:
    with penstock.connect(f"sqlite:///{made}") as store:
        queue = store.queue("q")
        file = Path(wakeups.wakeup_file(str(made), queue.record.queue_id))
        file.unlink()
        os.mkfifo(file)
        queue.append([{"n": 2}])


@as_root
def test_another_users_wakeup_file_is_ignored(made: Path) -> None:
    with penstock.connect(f"sqlite:///{made}") as store:
        queue = store.queue("q")
        os.chown(wakeups.wakeup_file(str(made), queue.record.queue_id), STRANGER, -1)
        assert wakeups.listen(str(made), queue.record.queue_id, files.StoreFiles(str(made))) is None
        with closing(queue.watch()) as watch:
            assert watch.wait({0: 0}, 5)


def as_a_stranger(paths: list[str]) -> int:
    """Return how many of the files another user can open and lock."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    held = 0
    try:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        for path in paths:
            with suppress(PermissionError):
                fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
                held += 1
    except BaseException:
        held = 255
    os._exit(held)


@as_root
@pytest.mark.parametrize(("option", "held"), [("", 0), ("?mode=0644", 3)])
def test_another_user_can_neither_read_the_rows_nor_take_a_lock(option: str, held: int) -> None:
    # Use a folder that all users can access, which pytest's own folders are not.
    with tempfile.TemporaryDirectory() as folder, umask(0o022):
        os.chmod(folder, 0o755)
        with penstock.connect(f"sqlite:///{folder}/x.db{option}") as store:
            queue = store.create_queue("q", SCHEMA)
            with closing(queue.watch()):
                queue.append([{"n": 1}])
            names = ["x.db", "x.db-lock", wakeups.wakeup_file("x.db", queue.record.queue_id)]
            with closing(closing_lock(store)):
                (owner,) = os.listdir(f"{folder}/x.db-owners")
            names += [] if held else [f"x.db-owners/{owner}"]
            assert as_a_stranger([f"{folder}/{name}" for name in names]) == held


@as_root
def test_files_that_root_creates_next_to_a_users_store_belong_to_that_user(made: Path) -> None:
    for path in (made.parent, *made.parent.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    Path(f"{made}-lock").unlink()
    with penstock.connect(f"sqlite:///{made}?trust=folder") as store, closing(closing_lock(store)):
        store.queue("q").append([{"n": 2}])
        owners = {(path.stat().st_uid, path.stat().st_gid) for path in made.parent.rglob("*")}
    assert owners == {(STRANGER, STRANGER)}


@as_root
def test_a_file_that_another_user_creates_in_a_race_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    file = tmp_path / "x.db"

    def faster(self: files.StoreFiles) -> None:
        sqlite3.connect(file).execute("create table theirs (n)").connection.close()
        os.chown(file, STRANGER, -1)

    monkeypatch.setattr(files.StoreFiles, "create_if_missing", faster)
    with pytest.raises(StoreUnsafeError) as caught:
        penstock.connect(f"sqlite:///{file}")
    assert caught.value.condition == "STORE_UNSAFE.FILE_OWNER"


@pytest.mark.parametrize("suffix", ["-lock", "-shm"])
def test_a_link_that_takes_a_files_place_while_it_is_checked_is_not_followed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    victim, beside = tmp_path / "victim", Path(f"{made}{suffix}")
    victim.write_text("private")
    victim.chmod(0o600)
    beside.touch()
    made.chmod(0o660)
    check = files.StoreFiles._require_trusted_owner

    def exchanged(self: files.StoreFiles, path: str, status: os.stat_result) -> None:
        check(self, path, status)
        if path == str(beside):
            beside.unlink()
            beside.symlink_to(victim)

    monkeypatch.setattr(files.StoreFiles, "_require_trusted_owner", exchanged)
    files.StoreFiles(str(made), 0o660, trusts_folder=True)._check_file(str(beside))
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert beside.is_symlink()


def test_a_link_that_takes_a_folders_place_while_it_is_checked_is_not_followed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, folder = tmp_path / "victim", Path(f"{made}-owners")
    victim.mkdir(0o700)
    made.chmod(0o660)
    check = files.StoreFiles._require_trusted_owner

    def exchanged(self: files.StoreFiles, path: str, status: os.stat_result) -> None:
        check(self, path, status)
        folder.rmdir()
        folder.symlink_to(victim)

    monkeypatch.setattr(files.StoreFiles, "_require_trusted_owner", exchanged)
    for found in folder.glob("*"):
        found.unlink()
    files.StoreFiles(str(made), 0o660, trusts_folder=True).make_folder(str(folder))
    assert stat.S_IMODE(victim.stat().st_mode) == 0o700


def test_the_mode_of_a_file_with_another_name_is_not_changed(made: Path, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", Path(f"{made}-lock")
    victim.write_text("private")
    victim.chmod(0o600)
    lock.unlink(missing_ok=True)
    os.link(victim, lock)
    made.chmod(0o660)
    with penstock.connect(f"sqlite:///{made}?mode=0660&trust=folder", create=False) as store:
        store.queue("q").append([{"n": 1}])
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


@pytest.mark.parametrize("suffix", ["-lock", "-shm", "-journal"])
def test_the_mode_of_a_file_that_others_have_renamed_is_not_changed(
    made: Path, tmp_path: Path, suffix: str
) -> None:
    private = Path(f"{made}{suffix}")
    private.write_text("private")
    private.chmod(0o600)
    made.chmod(0o660)
    store_files = files.StoreFiles(str(made), 0o660, trusts_folder=True)
    store_files.check(str(made))
    os.close(store_files.open_side_file(str(private)))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_the_mode_of_a_folder_that_others_have_renamed_is_not_changed(made: Path) -> None:
    private = Path(f"{made}-owners")
    for found in private.glob("*"):
        found.unlink()
    private.rmdir()
    private.mkdir(0o700)
    made.chmod(0o660)
    files.StoreFiles(str(made), 0o660, trusts_folder=True).make_folder(str(private))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_checking_a_file_does_not_release_its_locks(made: Path) -> None:
    with penstock.connect(f"sqlite:///{made}") as store:
        queue = store.queue("q")
        with store.database.transaction():
            files.StoreFiles(str(made)).check(str(made))
            other = sqlite3.connect(made, timeout=0)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("begin immediate")
            other.close()
        queue.append([{"n": 1}])
