"""The page's server: who may access it, what it answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.store.url import parse_url
from penstock.ui import server, snapshots
from penstock.ui.access import MOST_WRONG_TOKENS, WrongTokens
from penstock.ui.snapshots import Collector
from tests.support.commands import run_penstock
from tests.support.postgres_proxy import proxied
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until
from tests.ui.conftest import Served

SCHEMA = pa.schema([("id", pa.int64())])
ODD = 'it\'s "<script>alert(1)</script>" ž'
TOKEN = "öffne-dich & 100%"
Serve = Callable[..., Served]


def _fill(store: penstock.Store) -> None:
    store.create_queue(ODD, SCHEMA).append([{"id": 1}])
    store.create_consumer(ODD).register(ODD)
    run = QueryRun("id", "run", ODD, "continuous", 5, spark_ui="http://127.0.0.1:4040")
    store.database.run(lambda tx: queries.begin(tx, run))
    progress = QueryProgress(
        3, 10, 9, {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}, 20.0, {"a": 20.0}, 7, 8, 9
    )
    store.database.run(lambda tx: queries.report(tx, run, progress))
    store.database.run(lambda tx: queries.end(tx, run, QueryError("BAD", ODD)))


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The snapshots of an event stream."""
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            assert name == "snapshot"
            yield json.loads(line.removeprefix("data: "))


def test_a_snapshot_is_json_with_unchanged_names(serve: Serve, store: penstock.Store) -> None:
    _fill(store)
    answer = serve().get("/api/snapshot")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert (
        found["queues"][0]["name"] == found["consumers"][0]["consumer"] == found["queries"][0]["name"] == ODD
    )
    assert found["queries"][0]["last_error"]["message"] == ODD
    assert found["every_seconds"] == 0.2


def test_no_answer_contains_a_password(serve: Serve, store: penstock.Store, store_url: str) -> None:
    _fill(store)
    served = serve()
    secrets = parse_url(store_url).secrets
    assert secrets or store_url.startswith("sqlite")
    for path in ("/api/snapshot", "/metrics", "/", "/nothing"):
        answer = served.get(path)
        response = answer.text + str(answer.headers)
        assert not [secret for secret in secrets if secret in response]


@one_store
def test_headers_restrict_what_a_browser_may_do(serve: Serve) -> None:
    served = serve()
    for path in ("/api/snapshot", "/metrics", "/", "/nothing"):
        headers = served.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert served.get("/api/snapshot").headers["cache-control"] == "no-store"


@one_store
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(serve: Serve, method: str) -> None:
    served = serve()
    for path in ("api/snapshot", "api/events", "metrics", ""):
        assert httpx.request(method, served.url + path, timeout=30).status_code == 405


@one_store
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "",
        "[fe80::1]",
        "[::1].evil.example",
        "[::1]evil.example:80",
        "localhost:8571@evil.example",
        "localhost@evil.example",
        "localhost:80:evil.example",
        "localhost:x",
        "localhost/evil.example",
        "::1",
        "[127.0.0.1]",
        "[localhost]",
    ],
)
def test_other_host_names_are_refused_on_loopback(serve: Serve, host: str) -> None:
    answer = serve().get("/api/snapshot", headers={"Host": host})
    assert answer.status_code == 421
    assert "localhost" in answer.text


@one_store
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8080", "[::1]", "127.0.0.2"]
)
def test_names_of_this_machine_are_accepted(serve: Serve, host: str) -> None:
    assert serve().get("/api/snapshot", headers={"Host": host}).status_code == 200


@one_store
def test_a_server_with_a_token_refuses_requests_without_it(serve: Serve) -> None:
    served = serve(token=TOKEN)
    for path in (
        "/",
        "/api/snapshot",
        "/api/events",
        "/metrics",
        "/assets/x.js",
        "/nothing",
        "/?token=wrong",
        "/?token=",
    ):
        answer = served.get(path)
        assert (answer.status_code, "token" in answer.text) == (401, True)
        assert TOKEN not in answer.text
        assert "set-cookie" not in answer.headers
    assert served.get("/api/snapshot", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert served.get("/api/snapshot", cookies={"penstock_ui": "wrong"}).status_code == 401
    odd = {"Cookie": b"penstock_ui=" + "ž".encode()}
    assert served.get("/api/snapshot", headers=odd).status_code == 401


@one_store
def test_a_token_is_accepted_as_a_header_or_once_in_the_address(serve: Serve) -> None:
    served = serve(token=TOKEN)
    header = {"Authorization": b"Bearer " + TOKEN.encode()}
    assert served.get("/metrics", headers={"Authorization": "Bearer plain"}).status_code == 401
    assert served.get("/metrics", headers=header).status_code == 200
    answer = served.get("/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    with httpx.Client(cookies=answer.cookies) as browser:
        assert browser.get(served.url + "api/snapshot").status_code == 200
        assert browser.get(served.url).status_code == 200
    assert served.get("/api/snapshot", params={"token": TOKEN}).status_code == 401


@one_store
def test_wrong_tokens_are_limited_and_right_ones_are_not(serve: Serve) -> None:
    served = serve(token=TOKEN)
    cookie = served.get("/", params={"token": TOKEN}).headers["set-cookie"].partition(";")[0]
    right = {"Authorization": b"Bearer " + TOKEN.encode()}
    for number in range(MOST_WRONG_TOKENS):
        wrong = {"headers": {"Authorization": f"Bearer {number}"}}
        answer = served.get("/", **({"params": {"token": "wrong"}} if number % 2 else wrong))
        assert answer.status_code == 401
    for path, headers in (("/?token=wrong", {}), ("/api/snapshot", {"Authorization": "Bearer wrong"})):
        answer = served.get(path, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
    assert served.get("/api/snapshot", headers=right).status_code == 200
    assert served.get("/", params={"token": TOKEN}).status_code == 303
    assert served.get("/api/snapshot", headers={"Cookie": cookie}).status_code == 200
    # The right token does not reset the count.
    assert served.get("/?token=wrong").status_code == 429
    # A page without a token is no attempt.
    assert served.get("/api/snapshot").status_code == 401


@one_store
def test_a_claimed_address_does_not_get_round_the_limit(serve: Serve) -> None:
    served = serve(token=TOKEN)
    for number in range(MOST_WRONG_TOKENS):
        headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": f"192.0.2.{number}"}
        assert served.get("/api/snapshot", headers=headers).status_code == 401
    headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": "198.51.100.1"}
    assert served.get("/api/snapshot", headers=headers).status_code == 429


@one_store
def test_the_cookie_is_for_encrypted_connections_if_a_proxy_here_encrypts(serve: Serve) -> None:
    served = serve(token=TOKEN)
    for scheme, secure in (("https", True), ("http", False)):
        answer = served.get("/", params={"token": TOKEN}, headers={"X-Forwarded-Proto": scheme})
        assert ("secure" in answer.headers["set-cookie"].lower()) is secure


@one_store
def test_requests_without_a_token_are_no_attempts(serve: Serve) -> None:
    served = serve(token=TOKEN)
    for _ in range(2 * MOST_WRONG_TOKENS):
        assert served.get("/api/snapshot", headers={"Cookie": "penstock_ui=old"}).status_code == 401
    assert served.get("/", params={"token": TOKEN}).status_code == 303


def test_wrong_tokens_are_forgotten_after_a_minute_and_take_bounded_memory() -> None:
    now = 0.0
    wrong = WrongTokens(lambda: now)
    for _ in range(MOST_WRONG_TOKENS):
        assert not wrong.too_many_from("a")
        wrong.add("a")
    assert wrong.too_many_from("a")
    assert not wrong.too_many_from("b")
    now = 61.0
    assert not wrong.too_many_from("a")
    for number in range(5000):
        wrong.add(str(number))
    assert len(wrong.by_address) == 1000


@one_store
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_a_server_with_a_token_accepts_any_host_name(serve: Serve, bound: str) -> None:
    """A proxy in front of it forwards the host name of the original request."""
    served = serve(token=TOKEN, host=bound)
    named = {"Host": "penstock.example.com"}
    bearer = {**named, "Authorization": b"Bearer " + TOKEN.encode()}
    for path in ("/", "/api/snapshot", "/metrics"):
        assert served.get(path, headers=bearer).status_code == 200
        for wrong in (
            named,
            {**named, "Authorization": "Bearer wrong"},
            {**named, "Cookie": "penstock_ui=wrong"},
        ):
            answer = served.get(path, headers=wrong)
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
            assert answer.text.startswith("This page needs its token")
    assert served.get("/?token=wrong", headers=named).status_code == 401
    answer = served.get("/", params={"token": TOKEN}, headers=named)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = {**named, "Cookie": answer.headers["set-cookie"].partition(";")[0]}
    with httpx.stream("GET", served.url + "api/events", headers=cookie, timeout=30) as events:
        assert events.status_code == 200
        assert next(_events(events.iter_lines()))["store"]["error"] is None
    with httpx.stream("GET", served.url + "api/events", headers=named, timeout=30) as events:
        assert events.status_code == 401


@one_store
@pytest.mark.parametrize(("sent", "kept"), [({"X-Forwarded-Proto": "https"}, True), ({}, False)])
def test_the_cookie_is_secure_only_behind_a_tls_proxy(serve: Serve, sent: dict[str, str], kept: bool) -> None:
    answer = serve(token=TOKEN).get("/", params={"token": TOKEN}, headers=sent)
    attributes = [each.strip().lower() for each in answer.headers["set-cookie"].split(";")]
    assert ("secure" in attributes) == kept
    assert {"httponly", "samesite=strict"} <= {*attributes}


@one_store
def test_pages_of_other_sites_may_not_read_an_answer(serve: Serve) -> None:
    served = serve(token=TOKEN)
    sent = {"Authorization": b"Bearer " + TOKEN.encode(), "Origin": "https://evil.example"}
    for path in ("/api/snapshot", "/metrics"):
        answer = served.get(path, headers=sent)
        assert answer.status_code == 403
        headers = answer.headers
        assert [name for name in headers if name.startswith("access-control-")] == []
        assert headers["cross-origin-resource-policy"] == "same-origin"


@one_store
def test_events_start_immediately_and_continue(serve: Serve, store: penstock.Store) -> None:
    _fill(store)
    served = serve()
    with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = _events(answer.iter_lines())
        first = next(found)
        store.queue(ODD).append([{"id": 2}])
        later = next(each for each in found if each["queues"][0]["rows"] == 2)
    assert first["queues"][0]["rows"] == 1
    assert later["taken_at"] > first["taken_at"]


@one_store
def test_a_disconnected_viewer_is_forgotten_and_nothing_is_collected_without_viewers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self: looks.append(1) or real(self))
    served = serve(every=0.1)
    assert looks == []
    counts = []

    def view() -> None:
        with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
            found = _events(answer.iter_lines())
            counts.append(sum(1 for _, _ in zip(range(6), found, strict=False)))

    viewers = [threading.Thread(target=view) for _ in range(3)]
    for each in viewers:
        each.start()
    for each in viewers:
        each.join(30)
    assert counts == [6, 6, 6]
    wait_until(lambda: served.server.stream.viewers == 0, message="all viewers are gone")
    before = len(looks)
    threading.Event().wait(0.4)
    assert len(looks) == before


@one_store
def test_concurrent_requests_share_one_snapshot(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self: looks.append(1) or real(self))

    async def ask() -> set[bytes]:
        shared = snapshots.SnapshotStream(collector, every=3600)
        at_once = await asyncio.gather(*(shared.newest() for _ in range(5)))
        return {taken.text for taken in [*at_once, await shared.newest()]}

    assert len(asyncio.run(ask())) == 1
    assert looks == [1]


@one_store
def test_the_number_of_viewers_is_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MOST_VIEWERS", 1)
    served = serve()
    with httpx.stream("GET", served.url + "api/events", timeout=10) as answer:
        found = _events(answer.iter_lines())
        next(found)
        assert served.get("/api/events").status_code == 503


@one_store
def test_the_server_stops_while_viewers_are_connected(serve: Serve) -> None:
    served = serve(every=30)
    with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
        found = _events(answer.iter_lines())
        next(found)
        served.end()
        assert list(found) == []


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


def test_the_last_snapshot_stays_while_the_database_is_unavailable(
    pg_url: str, store_url: str, store: penstock.Store
) -> None:
    if store_url.startswith("sqlite"):
        path = Path(parse_url(store_url).target)
        _fill(store)
        collector = Collector(store_url)
        known = collector.collect()
        away = path.with_suffix(".away")
        path.rename(away)
        found = collector.collect()
        assert found["store"]["error"]
        assert found["queues"] == known["queues"]
        away.rename(path)
        assert collector.collect()["store"]["error"] is None
        collector.close()
        return
    _fill(store)
    with proxied(store_url) as proxy:
        collector = Collector(proxy.url)
        known = collector.collect()
        proxy.lose(b"penstock", deliver=False, times=10**6)
        proxy.lose(b"", deliver=False, times=10**6)
        found = collector.collect()
        assert found["store"]["error"]
        assert [secret for secret in parse_url(store_url).secrets if secret in str(found)] == []
        assert found["queues"] == known["queues"]
        proxy.failures = 0
        assert collector.collect()["store"]["error"] is None
        collector.close()


def test_metrics_are_in_prometheus_format(serve: Serve, store: penstock.Store) -> None:
    _fill(store)
    answer = serve().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    queue, consumer = ("queue", ODD), ("consumer", ODD)
    query = (("id", "id"), ("query", ODD))
    assert values["penstock_store_up",] == 1
    assert values["penstock_queue_rows", queue] == 1
    assert values["penstock_queue_appended_rows_total", queue] == 1
    assert values["penstock_consumer_lag_rows", consumer, queue] == 1
    assert values["penstock_consumer_lag_seconds", consumer, queue] >= 0
    assert values["penstock_consumer_stuck", consumer, queue] == 0
    states = {
        state: values["penstock_query_state", *query, ("state", state)] for state in ("running", "failed")
    }
    assert states == {"running": 0, "failed": 1}
    latency = ("penstock_query_latency_seconds", *sorted([*query, ("quantile", "0.99")]))
    assert values[latency] == pytest.approx(0.003)
    assert values["penstock_query_duration_seconds", *query] == 0.02
    assert (families["penstock_queue_rows"].type, families["penstock_queue_appended_rows"].type) == (
        "gauge",
        "counter",
    )
    assert all(family.documentation for family in families.values())


def test_metrics_contain_the_duration_of_micro_batches_but_not_as_latency(
    serve: Serve, store: penstock.Store
) -> None:
    run = QueryRun("id", "run", "large", "micro-batch", 5)
    store.database.run(lambda tx: queries.begin(tx, run))
    for batch, duration in enumerate((200.0, 400.0)):
        progress = QueryProgress(batch, 10, duration=duration, durations={"triggerExecution": duration})
        store.database.run(lambda tx, progress=progress: queries.report(tx, run, progress))
    families = {
        family.name: family for family in text_string_to_metric_families(serve().get("/metrics").text)
    }
    assert families["penstock_query_latency_seconds"].samples == []
    response = families["penstock_query_micro_batch_duration_seconds"]
    assert "not the latency of rows" in response.documentation
    assert {sample.labels["quantile"]: sample.value for sample in response.samples} == {
        "0.5": 0.2,
        "0.9": 0.4,
        "0.99": 0.4,
        "1": 0.4,
    }
    states = {sample.labels["state"] for sample in families["penstock_query_state"].samples}
    assert states == {"failed", "silent", "running", "files only", "stopped"}


def test_metrics_of_a_store_that_does_not_respond_contain_only_that(
    store: penstock.Store, store_url: str
) -> None:
    from penstock.ui.metrics import exposition

    _fill(store)
    collector = Collector(store_url)
    collector.collect()
    text = exposition(collector.without_answer("gone")).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["penstock_store_up 0.0"]
    collector.close()


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


# The command.

PROGRAM = [sys.executable, "-m", "penstock", "ui"]


def _failing(*words: object) -> str:
    return run_penstock("ui", *words, code=1).err


@one_store
def test_errors_say_what_to_do(store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in _failing("--url", store_url, "--port", port)
    tokenless = _failing("--url", store_url, "--host", "0.0.0.0")
    assert "[INVALID_OPTION.MISSING]" in tokenless
    assert "needs a token" in tokenless
    too_short = _failing("--url", store_url, "--token", "short")
    assert "[INVALID_OPTION.VALUE]" in too_short
    assert "at least 16 characters" in too_short
    assert "not an address of this machine" in _failing(
        "--url", store_url, "--host", "192.0.2.1", "--token", "x" * 16
    )
    assert "penstock store init" in _failing("--url", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


@one_store
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_and_stops_on_a_signal(
    store: penstock.Store, store_url: str, number: signal.Signals
) -> None:
    command = [*PROGRAM, "--url", store_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        address = program.stdout.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        with httpx.stream("GET", address + "api/events", timeout=30) as answer:
            found = _events(answer.iter_lines())
            next(found)
            program.send_signal(number)
            for _ in found:
                pass
        assert program.wait(20) in (130, -signal.SIGTERM)
        assert program.stderr.read() == ""


@one_store
def test_neither_spark_nor_pandas_is_imported(store: penstock.Store, store_url: str) -> None:
    program = (
        "import sys; from penstock.ui.server import prepared\n"
        f"with prepared({store_url!r}, port=0) as server: server.stream._collector.collect()\n"
        "print([m for m in ('pyspark', 'py4j', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_error_for_a_missing_extra_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from penstock.cli import main; sys.exit(main(['ui', '--url', 'sqlite:////tmp/nothing.db']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the page needs fastapi: pip install 'penstock-spark[ui]'" in done.stderr
