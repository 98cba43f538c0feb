"""Who may read the page: host names, tokens, cookies, and the pages of other sites."""

from __future__ import annotations

import httpx
import pytest

from penstock.ui.access import MAX_WRONG_TOKENS, WrongTokenCounter
from tests.support.spark_queues import one_store
from tests.ui.served import TOKEN, Serve, events


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
    for number in range(MAX_WRONG_TOKENS):
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
    for number in range(MAX_WRONG_TOKENS):
        headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": f"192.0.2.{number}"}
        assert served.get("/api/snapshot", headers=headers).status_code == 401
    headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": "198.51.100.1"}
    assert served.get("/api/snapshot", headers=headers).status_code == 429


@one_store
def test_requests_without_a_token_are_no_attempts(serve: Serve) -> None:
    served = serve(token=TOKEN)
    for _ in range(2 * MAX_WRONG_TOKENS):
        assert served.get("/api/snapshot", headers={"Cookie": "penstock_ui=old"}).status_code == 401
    assert served.get("/", params={"token": TOKEN}).status_code == 303


def test_wrong_tokens_are_forgotten_after_a_minute_and_take_bounded_memory() -> None:
    now = 0.0
    wrong = WrongTokenCounter(lambda: now)
    for _ in range(MAX_WRONG_TOKENS):
        assert not wrong.has_too_many("a")
        wrong.add("a")
    assert wrong.has_too_many("a")
    assert not wrong.has_too_many("b")
    now = 61.0
    assert not wrong.has_too_many("a")
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
    with httpx.stream("GET", served.url + "api/events", headers=cookie, timeout=30) as answer:
        assert answer.status_code == 200
        assert next(events(answer.iter_lines()))["store"]["error"] is None
    with httpx.stream("GET", served.url + "api/events", headers=named, timeout=30) as answer:
        assert answer.status_code == 401


@one_store
@pytest.mark.parametrize(
    ("sent", "kept"),
    [({"X-Forwarded-Proto": "https"}, True), ({"X-Forwarded-Proto": "http"}, False), ({}, False)],
)
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
