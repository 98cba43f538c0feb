"""Passwords in an environment variable or a file that the URL names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

import penstock
from penstock.errors import InvalidUrlError, StoreError, StoreUnsafeError
from penstock.feeds.postgres import settings
from penstock.store.url import parse_url
from penstock.testing import temporary_store_url

Place = tuple[str, Callable[[str], object]]
"""The option that names a place, and a function that puts a password there."""


def without_password(url: str, option: str) -> tuple[str, str]:
    """Return the URL with an option in place of its password, and the password."""
    parts = urlsplit(url)
    netloc = f"{parts.username}@{parts.hostname}:{parts.port}"
    query = "&".join(filter(None, [parts.query, option]))
    return parts._replace(netloc=netloc, query=query).geturl(), parts.password or ""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    if request.param == "password_env":
        return "password_env=SHOP_PASSWORD", lambda password: monkeypatch.setenv("SHOP_PASSWORD", password)
    file = tmp_path / "the password"

    def put(password: str) -> None:
        file.write_text(f"{password}\n")
        file.chmod(0o600)

    return f"password_file={quote(str(file))}", put


places = pytest.mark.parametrize("place", ["password_env", "password_file"], indirect=True)


@places
def test_a_store_is_opened_with_the_password_from_a_variable_or_file(pg_url: str, place: Place) -> None:
    option, put = place
    with temporary_store_url(pg_url) as given:
        url, password = without_password(given, option)
        put(password)
        with penstock.connect(url) as store:
            assert store.queues() == []
            assert password not in f"{store.database.url} {store.database.url!r}"


@places
def test_the_error_names_a_variable_or_file_without_a_password(pg_url: str, place: Place) -> None:
    url, _ = without_password(pg_url, place[0])
    with pytest.raises(StoreError, match="the driver and each executor need it") as caught:
        penstock.connect(url, timeout=0)
    assert caught.value.condition == "STORE_ERROR.NO_PASSWORD"


@pytest.mark.parametrize(
    ("mode", "can"),
    [
        (0o604, "read"),
        (0o644, "read"),
        (0o602, "write"),
        (0o620, "write"),
        (0o660, "write"),
        (0o777, "write"),
    ],
)
def test_a_password_file_that_others_can_read_or_write_is_refused(
    pg_url: str, tmp_path: Path, mode: int, can: str
) -> None:
    file = tmp_path / "the password"
    url, password = without_password(pg_url, f"password_file={quote(str(file))}")
    file.write_text(password)
    file.chmod(mode)
    feed = penstock.PostgresFeed(url, publication="p", slot="s")
    for connect in (lambda: penstock.connect(url, create=False), lambda: feed.open().describe()):
        with pytest.raises(StoreUnsafeError, match=f"others can {can} .*run chmod 0600 '{file}'") as caught:
            connect()
        assert caught.value.condition == "STORE_UNSAFE.PASSWORD_FILE"
        assert caught.value.parameters["mode"] == f"{mode:04o}"
        assert password not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_named_pipe_is_refused_without_waiting(pg_url: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    url, _ = without_password(pg_url, f"password_file={tmp_path}/pipe")
    with pytest.raises(StoreError, match=f"the file '{tmp_path}/pipe' is not a regular file"):
        penstock.connect(url, create=False)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_password_file_that_its_group_can_read_is_accepted(pg_url: str, tmp_path: Path, mode: int) -> None:
    """Kubernetes mounts secrets in this way for users other than root, behind a symbolic link."""
    file = tmp_path / "password"
    with temporary_store_url(pg_url) as given:
        url, password = without_password(given, f"password_file={tmp_path}/mounted")
        file.write_text(password)
        file.chmod(mode)
        (tmp_path / "mounted").symlink_to(file)
        penstock.connect(url).close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://u:secret@h/d?password_env=X", "only one source of its password, not password_env and"),
        ("postgresql://u@h/d?password_env=X&password_file=f", "not password_env and password_file"),
        ("postgresql://u@h/d?password_file=f&passfile=g", "not password_file and passfile"),
        ("postgresql://u@h/d?password_env=", "password_env is empty"),
    ],
)
def test_a_url_with_several_sources_of_its_password_is_refused(url: str, says: str) -> None:
    with pytest.raises(InvalidUrlError, match=says) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_a_feed_keeps_the_option_that_names_its_password() -> None:
    feed = penstock.PostgresFeed(
        "postgresql://u@h/d?password_env=SHOP_PASSWORD&direct=db:5432", publication="p", slot="s"
    )
    server, _ = settings.split(feed.url)
    assert (server.options["password_env"], server.options["direct"]) == ("SHOP_PASSWORD", "db:5432")
