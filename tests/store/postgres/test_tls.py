"""TLS connections to PostgreSQL: libpq gets the URL's options, and a password sent over a network without TLS
causes a warning.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

import penstock
from penstock.errors import FeedUnavailableError, PenstockError
from penstock.feeds.postgres import PostgresFeed
from penstock.store.postgres import connection as connections
from tests.support.tls_proxy import certificate, tls_proxy

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the server seem to be on another machine."""
    monkeypatch.setattr(connections, "is_local", lambda connection: False)
    monkeypatch.setattr(connections, "warned_urls", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "not_encrypted"]


@pytest.mark.usefixtures("elsewhere")
def test_a_password_sent_in_clear_text_is_warned_about_once(
    pg_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{pg_url}?schema=in_clear"
    caplog.set_level(logging.WARNING, "penstock.store")
    try:
        for _ in range(2):
            penstock.connect(url).close()
        (warning,) = warnings(caplog)
        assert "sslmode=verify-full" in warning
        assert str(urlsplit(pg_url).password) not in caplog.text
    finally:
        with psycopg.connect(pg_url, autocommit=True) as connection:
            connection.execute("drop schema in_clear cascade")


@pytest.mark.usefixtures("elsewhere")
def test_a_feeds_password_sent_in_clear_text_is_warned_about_once(
    pg_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.store")
    with pytest.raises(PenstockError):
        PostgresFeed(pg_url, "no_such_publication").open().describe()
    assert len(warnings(caplog)) == 1


def test_servers_on_this_machine_need_no_tls(
    pg_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "warned_urls", set())
    with pytest.raises(PenstockError, match="there is no store"):
        penstock.connect(f"{pg_url}?schema=nowhere", create=False)
    assert warnings(caplog) == []


@pytest.mark.usefixtures("elsewhere")
def test_tls_options_are_passed_to_libpq(
    pg_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = urlsplit(pg_url)
    assert server.hostname
    assert server.port
    mine, other, wrong = (
        certificate(tmp_path, name) for name in ("localhost", "other.example", "localhost2")
    )

    def url(port: int, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        place = f"{server.username}:{server.password}@localhost:{port}"
        return server._replace(netloc=place, query=f"{query}&hostaddr=127.0.0.1").geturl()

    def at(port: int, **options: object) -> Callable[[], object]:
        return lambda: penstock.connect(url(port, schema="nowhere", **options), create=False, timeout=0)

    with tls_proxy(server.hostname, server.port, mine) as port:
        # A connection that reaches the store's schema was accepted by the server.
        for options in ({"sslmode": "verify-full", "sslrootcert": mine.file}, {"sslmode": "require"}):
            with pytest.raises(PenstockError, match="there is no store"):
                at(port, **options)()
        with pytest.raises(PenstockError, match="certificate verify failed"):
            at(port, sslmode="verify-full", sslrootcert=wrong.file)()
        with pytest.raises(PenstockError):
            at(port, sslmode="disable")()
        # A change feed connects as a store does.
        feed = PostgresFeed(url(port, sslmode="verify-full", sslrootcert=mine.file), "no_such_publication")
        with pytest.raises(FeedUnavailableError, match="no_such_publication"):
            feed.open().describe()
        feed = PostgresFeed(url(port, sslmode="verify-full", sslrootcert=wrong.file), "no_such_publication")
        with pytest.raises(PenstockError, match="certificate verify failed"):
            feed.open().describe()
    with (
        tls_proxy(server.hostname, server.port, other) as port,
        pytest.raises(PenstockError, match="does not match host name"),
    ):
        at(port, sslmode="verify-full", sslrootcert=other.file)()
    # A client that requires TLS sends no password to a server without it.
    with pytest.raises(PenstockError, match="does not support SSL"):
        at(server.port, sslmode="require")()
    assert warnings(caplog) == []


def test_a_password_is_taken_from_a_file(pg_url: str, tmp_path: Path) -> None:
    server = urlsplit(pg_url)
    file = tmp_path / "passwords"
    file.write_text(f"*:*:*:*:{server.password}\n")
    file.chmod(0o600)
    bare = server._replace(netloc=f"{server.username}@{server.hostname}:{server.port}").geturl()
    with pytest.raises(PenstockError, match="password"):
        penstock.connect(f"{bare}?schema=nowhere", create=False)
    with pytest.raises(PenstockError, match="there is no store"):
        penstock.connect(f"{bare}?schema=nowhere&passfile={file}", create=False)
