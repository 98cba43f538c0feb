"""The driver's port: strangers who connect and send nothing, or the wrong thing, block nobody."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from penstock.continuous.channel import READER, WRITER
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs
from penstock.errors import StoreUnavailableError
from penstock.spark import driver_endpoint
from penstock.spark.driver_endpoint import Address, AuthenticatedListener
from tests.support.waiting import wait_until

HONEST = 0.7
"""Seconds in which an answer has to be there: less than what one stranger is given."""


def mirror(connection: Connection) -> None:
    with connection:
        connection.send_bytes(connection.recv_bytes()[::-1])


@pytest.fixture
def listening() -> Iterator[AuthenticatedListener]:
    with closing(AuthenticatedListener("127.0.0.1", mirror, "penstock-test")) as made:
        yield made


@pytest.fixture
def address(listening: AuthenticatedListener) -> Address:
    return Address("127.0.0.1", listening.port, listening.secret)


@pytest.fixture
def strangers(listening: AuthenticatedListener) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def speaking(port: int) -> Connection:
    """A stranger who knows how messages are framed."""
    sock = stranger(port)
    sock.setblocking(True)
    return Connection(sock.detach())


def seconds_to_ask(address: Address) -> float:
    began = time.monotonic()
    assert address.ask(b"abc") == b"cba"
    return time.monotonic() - began


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def hung_up(connection: socket.socket) -> bool:
    """Whether sending one more byte fails."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_small_messages_are_not_held_back_until_the_one_before_is_acknowledged() -> None:
    """An acknowledgement may take 40 ms, which an epoch of a continuous query has to wait for."""
    found: list[bool] = []

    def serve(connection: Connection) -> None:
        with connection:
            found.append(sends_at_once(connection))

    with (
        closing(AuthenticatedListener("127.0.0.1", serve, "penstock-test")) as listening,
        Address("127.0.0.1", listening.port, listening.secret).connect() as connection,
    ):
        found.append(sends_at_once(connection))
        wait_until(lambda: len(found) == 2, timeout=5)
    assert found == [True, True]


def sends_at_once(connection: Connection) -> bool:
    with socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        return bool(twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def test_silent_strangers_block_nobody(
    listening: AuthenticatedListener, address: Address, strangers: ExitStack
) -> None:
    for _ in range(5):
        strangers.enter_context(stranger(listening.port))
        assert seconds_to_ask(address) < HONEST


def test_a_silent_stranger_is_disconnected_after_a_second(
    listening: AuthenticatedListener, strangers: ExitStack
) -> None:
    silent = strangers.enter_context(stranger(listening.port))
    began = time.monotonic()
    wait_until(lambda: is_closed(silent), timeout=5)
    assert time.monotonic() - began < 3 * driver_endpoint.HANDSHAKE_SECONDS


def test_a_slow_stranger_is_disconnected(listening: AuthenticatedListener, strangers: ExitStack) -> None:
    slow = strangers.enter_context(stranger(listening.port))
    began = time.monotonic()
    # The head of a message of 200 bytes, and then one byte after the other.
    slow.sendall(b"\0\0\0\xc8")
    while time.monotonic() - began < 10 and not hung_up(slow):
        time.sleep(0.1)
    assert time.monotonic() - began < 3 * driver_endpoint.HANDSHAKE_SECONDS


def test_the_number_of_strangers_is_limited_and_they_block_nobody(
    listening: AuthenticatedListener, address: Address, strangers: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.spark")
    before = threading.active_count()
    many = [
        strangers.enter_context(stranger(listening.port)) for _ in range(driver_endpoint.MAX_HANDSHAKES + 50)
    ]
    wait_until(lambda: sum(map(is_closed, many[:50])) == 50, timeout=5)
    assert threading.active_count() - before < driver_endpoint.MAX_HANDSHAKES + 20
    assert seconds_to_ask(address) < HONEST
    assert [getattr(record, "action", None) for record in caplog.records] == ["strangers"]
    wait_until(lambda: all(map(is_closed, many)), timeout=5)
    wait_until(lambda: threading.active_count() <= before, timeout=5)


def test_strangers_who_reconnect_repeatedly_block_nobody(
    listening: AuthenticatedListener, address: Address
) -> None:
    done = threading.Event()

    def crowd() -> None:
        with ExitStack() as stack:
            while not done.is_set():
                stack.enter_context(stranger(listening.port))
                time.sleep(0.002)

    crowding = threading.Thread(target=crowd)
    crowding.start()
    try:
        time.sleep(0.5)
        for _ in range(5):
            assert seconds_to_ask(address) < HONEST
    finally:
        done.set()
        crowding.join()


def test_a_task_retries_when_the_driver_is_busy(monkeypatch: pytest.MonkeyPatch, address: Address) -> None:
    real, tries = driver_endpoint._connect_once, []

    def late(where: tuple[str, int], authkey: bytes, deadline: float) -> Connection:
        tries.append(where)
        if len(tries) == 1:
            with stranger(where[1]) as silent:
                wait_until(lambda: is_closed(silent), timeout=5)
            raise EOFError
        return real(where, authkey, deadline)

    monkeypatch.setattr(driver_endpoint, "_connect_once", late)
    assert address.ask(b"abc") == b"cba"
    assert len(tries) == 2


@pytest.mark.timeout(30)
@pytest.mark.parametrize("said", [b"", b"\0", b"\0\0\0\x40#CHALL"])
def test_a_task_gives_up_on_a_driver_that_stops_answering(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(driver_endpoint, "_CONNECT_SECONDS", 0.5)

    def speak() -> None:
        other, _ = silent.accept()
        other.sendall(said)
        with other:
            while other.recv(100):
                pass

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=speak, daemon=True).start()
        lost = Address("127.0.0.1", silent.getsockname()[1], b"secret")
        with pytest.raises(StoreUnavailableError, match=r"spark\.driver\.host") as caught:
            lost.ask(b"abc")
    assert caught.value.condition == "STORE_UNAVAILABLE.DRIVER"


def test_a_wrong_secret_is_reported_as_another_driver(address: Address) -> None:
    wrong = Address(address.host, address.port, b"guess")
    with pytest.raises(StoreUnavailableError, match="is not the driver") as caught:
        wrong.ask(b"abc")
    assert caught.value.condition == "STORE_UNAVAILABLE.OTHER_DRIVER"
    assert address.ask(b"abc") == b"cba"


def test_a_stranger_cannot_pass_a_proof_of_one_task_off_as_that_of_the_driver() -> None:
    """A stranger at the driver's port lets a second task answer what the first one asks."""
    secret = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1], secret)
        refused: list[BaseException] = []

        def task() -> None:
            try:
                address.connect().close()
            except BaseException as error:
                refused.append(error)

        tasks = [threading.Thread(target=task, daemon=True) for _ in range(2)]
        first, second = [], []
        for thread, ends in zip(tasks, (first, second), strict=True):
            thread.start()
            ends.append(Connection(taken.accept()[0].detach()))
        with first[0], second[0]:
            first[0].send_bytes(bytes(32))
            first[0].recv_bytes()
            first[0].send_bytes(b"accepted")
            asked = first[0].recv_bytes()
            second[0].send_bytes(asked)
            first[0].send_bytes(second[0].recv_bytes())
            assert first[0].recv_bytes() == b"refused"
        for thread in tasks:
            thread.join(10)
    assert any(isinstance(error.__cause__, AuthenticationError) for error in refused)


def test_handshakes_use_sha256(listening: AuthenticatedListener) -> None:
    with speaking(listening.port) as connection:
        challenge = connection.recv_bytes()
        connection.send_bytes(hmac.digest(listening.secret, b"penstock task" + challenge, "sha256"))
        assert connection.recv_bytes() == b"accepted"
    with speaking(listening.port) as connection:
        challenge = connection.recv_bytes()
        connection.send_bytes(hmac.digest(listening.secret, challenge, "md5"))
        assert connection.recv_bytes() == b"refused"


def test_closing_the_port_disconnects_waiting_clients(
    listening: AuthenticatedListener, address: Address, strangers: ExitStack
) -> None:
    silent = strangers.enter_context(stranger(listening.port))
    assert address.ask(b"abc") == b"cba"
    began = time.monotonic()
    listening.close()
    listening.close()
    assert time.monotonic() - began < HONEST
    wait_until(lambda: is_closed(silent), timeout=HONEST)
    with pytest.raises(StoreUnavailableError):
        address.ask(b"abc")


def test_strangers_do_not_block_the_connections_of_continuous_queries(strangers: ExitStack) -> None:
    with closing(EpochCoordinator("127.0.0.1", "127.0.0.1", Epochs(1, 0, 8))) as coordinator:
        for _ in range(5):
            strangers.enter_context(stranger(coordinator.address.port))
        began = time.monotonic()
        reader, writer = coordinator.address.open(READER, 0), coordinator.address.open(WRITER, 0)
        coordinator.await_tasks(HONEST, lambda: True)
        assert time.monotonic() - began < HONEST
        coordinator.assign(0, [{0: 7}])
        assert reader.await_message()["positions"] == {"0": 7}
        # What has shown the secret has no deadline.
        time.sleep(1.5 * driver_endpoint.HANDSHAKE_SECONDS)
        coordinator.pause()
        assert reader.await_message()["kind"] == "pause"
        reader.close()
        writer.close()
