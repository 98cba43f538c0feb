"""A password that the URL names the place of: an environment variable or a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

import penstock
from penstock.errors import InvalidUrlError, StoreError
from penstock.feeds.postgres import settings
from penstock.store.url import parse_url
from penstock.testing import temporary_store_url

Place = tuple[str, Callable[[str], object]]
"""The option that names a place, and a function that puts a password there."""


def without_password(url: str, option: str) -> tuple[str, str]:
    """Return the URL with an option in the place of its password, and the password."""
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
    return f"password_file={quote(str(file))}", lambda password: file.write_text(f"{password}\n")


places = pytest.mark.parametrize("place", ["password_env", "password_file"], indirect=True)


@places
def test_a_store_is_opened_with_the_password_from_its_place(pg_url: str, place: Place) -> None:
    option, put = place
    with temporary_store_url(pg_url) as given:
        url, password = without_password(given, option)
        put(password)
        with penstock.connect(url) as store:
            assert store.queues() == []
            assert password not in f"{store.database.url} {store.database.url!r}"


@places
def test_a_place_without_a_password_is_named(pg_url: str, place: Place) -> None:
    url, _ = without_password(pg_url, place[0])
    with pytest.raises(StoreError, match="the driver and each executor need it") as caught:
        penstock.connect(url, timeout=0)
    assert caught.value.condition == "STORE_ERROR.NO_PASSWORD"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://u:secret@h/d?password_env=X", "in one place, not in password_env and password"),
        ("postgresql://u@h/d?password_env=X&password_file=f", "not in password_env and password_file"),
        ("postgresql://u@h/d?password_file=f&passfile=g", "not in password_file and passfile"),
        ("postgresql://u@h/d?password_env=", "password_env is empty"),
    ],
)
def test_a_password_has_one_place(url: str, says: str) -> None:
    with pytest.raises(InvalidUrlError, match=says) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_a_feed_keeps_the_place_of_its_password() -> None:
    feed = penstock.PostgresFeed(
        "postgresql://u@h/d?password_env=SHOP_PASSWORD&direct=db:5432", publication="p", slot="s"
    )
    server, _ = settings.split(feed.url)
    assert (server.options["password_env"], server.options["direct"]) == ("SHOP_PASSWORD", "db:5432")
