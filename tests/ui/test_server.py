"""The page's server: what it answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.store.url import parse_url
from penstock.ui import server, snapshots
from penstock.ui.snapshots import Collector
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until
from tests.ui.filled import ODD, fill
from tests.ui.served import Serve


def test_a_snapshot_is_json_with_unchanged_names(serve: Serve, store: penstock.Store) -> None:
    fill(store)
    answer = serve().get("/api/snapshot")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert (
        found["queues"][0]["name"] == found["consumers"][0]["consumer"] == found["queries"][0]["name"] == ODD
    )
    assert found["queries"][0]["last_error"]["message"] == ODD
    assert found["every_seconds"] == 0.2


def test_no_answer_contains_a_password(serve: Serve, store: penstock.Store, store_url: str) -> None:
    fill(store)
    served = serve()
    secrets = parse_url(store_url).secrets
    assert secrets or store_url.startswith("sqlite")
    for path in ("/api/snapshot", "/metrics", "/", "/nothing"):
        answer = served.get(path)
        response = answer.text + str(answer.headers)
        assert not [secret for secret in secrets if secret in response]


@one_store
def test_a_store_that_does_not_respond_is_reported(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(every=0.1)
    assert served.get("/api/snapshot").json()["store"]["error"] is None
    monkeypatch.setattr(snapshots, "TIMEOUT_SECONDS", 0.2)
    release = threading.Event()
    real = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self: release.wait(30) and real(self))
    wait_until(lambda: served.get("/api/snapshot").json()["store"]["error"], message="the error is shown")
    assert "has not answered" in served.get("/api/snapshot").json()["store"]["error"]
    release.set()
    wait_until(lambda: served.get("/api/snapshot").json()["store"]["error"] is None, message="it is back")


@one_store
def test_the_page_is_served_from_its_folder(
    store: penstock.Store, serve: Serve, monkeypatch: Any, tmp_path: Path
) -> None:
    # Penstock may be installed below a folder of any name.
    page = tmp_path / "assets/page"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html><title>x</title>")
    (page / "assets/app-1.js").write_text("1")
    (page.parent / "secret.txt").write_text("secret")
    monkeypatch.setattr(server.make_app, "__defaults__", (page,))
    served = serve()
    answer = served.get("/")
    assert (answer.text, answer.headers["content-type"]) == (
        "<!doctype html><title>x</title>",
        "text/html; charset=utf-8",
    )
    assert answer.headers["cache-control"] == "no-cache"
    answer = served.get("/assets/app-1.js")
    assert answer.text == "1"
    assert "immutable" in answer.headers["cache-control"]
    assert "javascript" in answer.headers["content-type"]
    for path in ("/nothing", "/../secret.txt", "/%2e%2e/secret.txt", "/assets/..%2f..%2fsecret.txt"):
        assert served.get(path).status_code == 404


@one_store
def test_an_explanation_is_served_if_the_page_is_missing(
    serve: Serve, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(server.make_app, "__defaults__", (tmp_path / "nothing",))
    answer = serve().get("/")
    assert answer.status_code == 200
    assert "does not include the page" in answer.text
