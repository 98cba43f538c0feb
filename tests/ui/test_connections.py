"""The page's server and bad clients: silent ones, ones that read nothing, crowds, and pages of other
sites block nobody.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pytest

import penstock
from penstock.store.statements import qualify
from penstock.ui import server, snapshots
from tests.support.raw_sql import run_sql
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until
from tests.ui.served import Serve, Served

pytestmark = one_store
TOKEN = "a token for tests"


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    assert parts.hostname
    assert parts.port
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def open_connections(served: Served) -> int:
    return len(served.server.server_state.connections)


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HT", b"GET /api/snapshot HTTP/1.1\r\nHost: localhost\r\n", b"\x16\x03\x01"],
    ids=["nothing", "some", "most", "tls"],
)
def test_a_client_that_sends_no_request_is_disconnected(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    served = serve()
    silent = strangers.enter_context(connected(served))
    silent.sendall(said)
    wait_until(lambda: is_closed(silent), timeout=5)
    wait_until(lambda: open_connections(served) == 0, timeout=5)


def test_a_client_that_sends_its_request_slowly_is_disconnected(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    slow = strangers.enter_context(connected(serve()))
    began = time.monotonic()
    slow.sendall(b"GET / HTTP/1.1\r\n")
    with suppress(ConnectionError):
        while time.monotonic() - began < 10:
            slow.sendall(b"X: y\r\n")
            time.sleep(0.05)
    assert time.monotonic() - began < 5


def test_a_client_that_stalls_in_its_second_request_is_disconnected(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    again = strangers.enter_context(connected(serve()))
    again.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert again.recv(1 << 16)
    # It keeps uvicorn's own clock from running, which any byte stops.
    again.sendall(b"G")
    wait_until(lambda: is_closed(again), timeout=5)


def test_the_number_of_connections_is_bounded_and_viewers_still_connect(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)
    served = serve()
    many = [strangers.enter_context(connected(served)) for _ in range(60)]
    wait_until(lambda: sum(map(is_closed, many)) >= 40, timeout=4)
    assert open_connections(served) <= 20
    began = time.monotonic()
    assert served.get("/api/snapshot").status_code == 200
    assert time.monotonic() - began < 2


def test_new_connections_are_refused_if_all_others_are_viewers(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    served = serve()
    for _ in range(3):
        viewer = strangers.enter_context(connected(served))
        viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert viewer.recv(10)
    with pytest.raises(httpx.TransportError):
        served.get("/api/snapshot")
    assert served.server.stream.viewers == 3


def test_viewers_that_come_at_once_are_counted_before_they_are_sent_anything(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_VIEWERS", 5)
    served = serve()
    viewers = [strangers.enter_context(connected(served)) for _ in range(20)]
    for viewer in viewers:
        viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answers = [viewer.recv(12) for viewer in viewers]
    assert answers.count(b"HTTP/1.1 200") == 5
    assert answers.count(b"HTTP/1.1 503") == 15
    for viewer in viewers:
        viewer.close()
    wait_until(lambda: served.server.stream.viewers == 0, timeout=10)


def test_bad_clients_do_not_fill_the_log(
    serve: Serve, strangers: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    for number in range(300):
        stranger = strangers.enter_context(connected(served))
        stranger.sendall(
            (
                b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
                b"GET / HT",
                b"\0\xff" * 200,
                b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZZZ\r\n",
            )[number % 4]
        )
        if number % 3:
            # Closes it with a reset.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
    assert served.get("/api/snapshot").status_code == 200
    assert [record.getMessage() for record in caplog.records] == []


def test_one_machine_leaves_connections_for_others(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remote_address(transport: asyncio.Transport) -> str:
        return str(transport.get_extra_info("peername")[0])

    monkeypatch.setattr(server, "remote_address", remote_address)
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_ADDRESS", 3)
    served = serve()
    port = urlsplit(served.url).port
    for _ in range(3):
        there = ("127.0.0.1", port)
        viewer = strangers.enter_context(
            socket.create_connection(there, timeout=10, source_address=("127.0.0.9", 0))
        )
        viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert viewer.recv(10)
    # A fourth one of that machine is refused, and other machines are not.
    more = strangers.enter_context(
        socket.create_connection(("127.0.0.1", port), timeout=10, source_address=("127.0.0.9", 0))
    )
    wait_until(lambda: is_closed(more), timeout=5)
    assert served.get("/api/snapshot").status_code == 200
    assert served.server.stream.viewers == 3


def pad_snapshots(served: Served, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every snapshot longer by some bytes."""
    real = type(served.server.stream).newest

    async def padded(self: object) -> object:
        taken = await real(self)  # type: ignore[arg-type]
        return type(taken)(taken.snapshot, taken.text + b" " * size, taken.at)

    monkeypatch.setattr(type(served.server.stream), "newest", padded)


def test_a_viewer_that_reads_nothing_is_disconnected(
    serve: Serve, strangers: ExitStack, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.5)
    served = serve(every=0.1)
    # Large snapshots, so that the buffers on the way are full soon.
    pad_snapshots(served, 4 << 20, monkeypatch)
    idle = strangers.enter_context(connected(served))
    idle.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: served.server.stream.viewers == 1, timeout=5)
    wait_until(lambda: served.server.stream.viewers == 0, timeout=10)
    wait_until(lambda: open_connections(served) == 0, timeout=5)


def viewer_with_small_buffer(served: Served, size: int = 4096) -> socket.socket:
    """Return a connection that has requested the events, and whose system buffers few of them."""
    parts = urlsplit(served.url)
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    viewer.settimeout(10)
    viewer.connect((parts.hostname, parts.port))
    viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return viewer


@pytest.mark.parametrize("system", ["linux", "other"])
def test_viewers_that_do_not_read_small_snapshots_make_room_for_others(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Small snapshots fit into a large send buffer for minutes."""
    if system == "other":
        # It does not report what has been acknowledged, so only the small buffers help.
        monkeypatch.setattr(server, "unacknowledged", lambda connection: None)
    monkeypatch.setattr(server, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(snapshots, "MAX_VIEWERS", 5)
    served = serve(every=0.1)
    pad_snapshots(served, 3000, monkeypatch)
    for _ in range(5):
        strangers.enter_context(viewer_with_small_buffer(served))
    wait_until(lambda: served.server.stream.viewers == 5, timeout=10)
    wait_until(lambda: served.server.stream.viewers == 0, timeout=20)
    wait_until(lambda: open_connections(served) == 0, timeout=5)
    with httpx.stream("GET", f"{served.url}api/events", timeout=10) as answer:
        assert answer.status_code == 200


def test_a_viewer_that_reads_slowly_stays_connected(
    serve: Serve, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some bytes are always on their way to it, but never the same ones."""
    monkeypatch.setattr(server, "WRITE_SECONDS", 2.0)
    served = serve(every=0.1)
    pad_snapshots(served, 60_000, monkeypatch)
    # With a buffer of a few kilobytes, the system's own timers decide how fast it reads.
    viewer = strangers.enter_context(viewer_with_small_buffer(served, 65_536))
    began, received = time.monotonic(), 0
    while time.monotonic() - began < 5:
        part = viewer.recv(4096)
        assert part
        received += len(part)
        time.sleep(0.02)
    assert received > 100_000
    assert served.server.stream.viewers == 1


def test_a_viewer_that_reads_stays_connected(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    served = serve(every=0.1)
    began, events = time.monotonic(), 0
    with httpx.stream("GET", f"{served.url}api/events", timeout=10) as answer:
        for line in answer.iter_lines():
            events += line.startswith("data:")
            if events > 5 and time.monotonic() - began > 1.2:
                break
    assert events > 5, "the server ended the answer"


ELSEWHERE = [
    {
        "Origin": "https://evil.example",
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "cors",
        "Sec-Fetch-Dest": "empty",
    },
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:9"},
    {"Origin": "null"},
]


def test_pages_of_other_sites_get_nothing_and_occupy_no_connection(serve: Serve) -> None:
    served, known = serve(), serve(token=TOKEN)
    for headers in ELSEWHERE:
        for path in ("/", "/api/snapshot", "/api/events", "/metrics"):
            assert served.get(path, headers=headers).status_code == 403
        knowing = headers | {"Authorization": f"Bearer {TOKEN}"}
        assert known.get("/api/snapshot", headers=knowing).status_code == 403
    assert served.server.stream.viewers == 0


def test_other_sites_may_link_to_the_page_but_not_to_its_parts(serve: Serve) -> None:
    served = serve()
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert served.get("/", headers=link).status_code == 200
    assert served.get("/api/events", headers=link).status_code == 403


def test_the_page_itself_gets_what_it_requests(serve: Serve) -> None:
    served = serve()
    for site in ("same-origin", "none"):
        assert served.get("/api/snapshot", headers={"Sec-Fetch-Site": site}).status_code == 200
    own = served.url.rstrip("/")
    assert served.get("/api/snapshot", headers={"Origin": own}).status_code == 200


def test_the_page_copes_with_any_values_written_into_the_store(serve: Serve, store: penstock.Store) -> None:
    served = serve(every=0.1)
    store.create_queue("q", pa.schema([("id", pa.int64())]))
    text = qualify(
        "update penstock.queue set key_columns = '[[[['", store.database.dialect, store.database.url.schema
    )
    run_sql(store.database, text)
    wait_until(
        lambda: "a queue cannot be shown" in str(served.get("/api/snapshot").json()["notes"]), timeout=5
    )
    assert served.get("/").status_code == served.get("/metrics").status_code == 200
    run_sql(store.database, text.replace("[[[[", "[]"))
    wait_until(lambda: served.get("/api/snapshot").json()["notes"] == [], timeout=5)
