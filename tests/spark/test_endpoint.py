"""The driver's port: strangers who connect and send nothing, or the wrong thing, block nobody, and what is
encrypted is secret.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError

import pytest

from penstock.continuous.channel import READER, WRITER
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs
from penstock.errors import StoreUnavailableError
from penstock.spark import driver_certificate, driver_endpoint
from penstock.spark.driver_certificate import task_context
from penstock.spark.driver_connection import Connection
from penstock.spark.driver_endpoint import LOOPBACK, Address, AuthenticatedListener, DriverNetwork
from tests.support.waiting import wait_until

PATIENCE = 10.0
HONEST = 5.0
"""Seconds in which an answer has to be there: less than PATIENCE, which one stranger is given."""


def mirror(connection: Connection) -> None:
    with connection:
        connection.send_bytes(connection.recv_bytes()[::-1])


PLAIN, ENCRYPTED = DriverNetwork(LOOPBACK, LOOPBACK), DriverNetwork(LOOPBACK, LOOPBACK, encrypted=True)


@pytest.fixture(params=[PLAIN, ENCRYPTED], ids=["plain", "encrypted"])
def network(request: pytest.FixtureRequest) -> DriverNetwork:
    found: DriverNetwork = request.param
    return found


@pytest.fixture
def listening(network: DriverNetwork) -> Iterator[AuthenticatedListener]:
    with closing(AuthenticatedListener(network, mirror, "penstock-test")) as made:
        yield made


@pytest.fixture
def address(listening: AuthenticatedListener) -> Address:
    return listening.address


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give handshakes so much time that a busy machine does not end them."""
    monkeypatch.setattr(driver_endpoint, "HANDSHAKE_SECONDS", PATIENCE)


@contextmanager
def connected(network: DriverNetwork, serve: Callable[[Connection], None]) -> Iterator[Connection]:
    """Yield a task's end of a connection whose other end a driver serves."""
    with (
        closing(AuthenticatedListener(network, serve, "penstock-test")) as listening,
        listening.address.connect() as connection,
    ):
        yield connection


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def speaking(port: int) -> Connection:
    """A stranger who knows how messages are framed."""
    return Connection(stranger(port))


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


def test_small_messages_are_not_held_back_until_the_one_before_is_acknowledged(
    network: DriverNetwork,
) -> None:
    """An acknowledgement may take 40 ms, which an epoch of a continuous query has to wait for."""
    found: list[bool] = []

    def serve(connection: Connection) -> None:
        with connection:
            found.append(sends_at_once(connection))

    with connected(network, serve) as connection:
        found.append(sends_at_once(connection))
        wait_until(lambda: len(found) == 2, timeout=5)
    assert found == [True, True]


def sends_at_once(connection: Connection) -> bool:
    with socket.socket(fileno=socket.dup(connection.fileno())) as twin:
        return bool(twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


@pytest.mark.usefixtures("patience")
def test_silent_strangers_block_nobody(
    listening: AuthenticatedListener, address: Address, strangers: ExitStack
) -> None:
    for _ in range(5):
        strangers.enter_context(stranger(listening.address.port))
        assert seconds_to_ask(address) < HONEST


def test_a_silent_stranger_is_disconnected_after_a_second(
    listening: AuthenticatedListener, strangers: ExitStack
) -> None:
    silent = strangers.enter_context(stranger(listening.address.port))
    began = time.monotonic()
    wait_until(lambda: is_closed(silent), timeout=5)
    assert time.monotonic() - began < 3 * driver_endpoint.HANDSHAKE_SECONDS


def test_a_slow_stranger_is_disconnected(listening: AuthenticatedListener, strangers: ExitStack) -> None:
    slow = strangers.enter_context(stranger(listening.address.port))
    began = time.monotonic()
    # The head of a message of 200 bytes, and then one byte after the other.
    slow.sendall(b"\0\0\0\xc8")
    while time.monotonic() - began < 10 and not hung_up(slow):
        time.sleep(0.1)
    assert time.monotonic() - began < 3 * driver_endpoint.HANDSHAKE_SECONDS


@pytest.mark.usefixtures("patience")
def test_the_number_of_strangers_is_limited_and_they_block_nobody(
    listening: AuthenticatedListener,
    address: Address,
    strangers: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "penstock.spark")
    before = threading.active_count()
    many = [
        strangers.enter_context(stranger(listening.address.port))
        for _ in range(driver_endpoint.MAX_HANDSHAKES + 50)
    ]
    wait_until(lambda: sum(map(is_closed, many[:50])) == 50, timeout=5)
    assert threading.active_count() - before < driver_endpoint.MAX_HANDSHAKES + 20
    assert seconds_to_ask(address) < HONEST
    assert [getattr(record, "action", None) for record in caplog.records] == ["strangers"]
    strangers.close()
    wait_until(lambda: threading.active_count() <= before, timeout=5)


@pytest.mark.usefixtures("patience")
def test_strangers_who_reconnect_repeatedly_block_nobody(
    listening: AuthenticatedListener, address: Address
) -> None:
    done = threading.Event()

    def crowd() -> None:
        with ExitStack() as stack:
            while not done.is_set():
                stack.enter_context(stranger(listening.address.port))
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
    real, tries = driver_endpoint.connect_once, []

    def late(address: Address, deadline: float) -> Connection:
        tries.append(address)
        if len(tries) == 1:
            with stranger(address.port) as silent:
                wait_until(lambda: is_closed(silent), timeout=5)
            raise EOFError
        return real(address, deadline)

    monkeypatch.setattr(driver_endpoint, "connect_once", late)
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
    wrong = replace(address, secret=b"guess")
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
            ends.append(Connection(taken.accept()[0]))
        with first[0], second[0]:
            first[0].send_bytes(bytes(32))
            first[0].recv_bytes()
            first[0].send_bytes(b"accepted")
            asked = first[0].recv_bytes()
            second[0].send_bytes(asked)
            first[0].send_bytes(second[0].recv_bytes())
            assert first[0].recv_bytes() == b"refused"
        wait_until(lambda: refused, timeout=10)
    assert any(isinstance(error.__cause__, AuthenticationError) for error in refused)


@pytest.mark.parametrize("network", [PLAIN])
def test_handshakes_use_sha256(address: Address) -> None:
    with speaking(address.port) as connection:
        challenge = connection.recv_bytes()
        connection.send_bytes(hmac.digest(address.secret, b"penstock task" + challenge, "sha256"))
        assert connection.recv_bytes() == b"accepted"
    with speaking(address.port) as connection:
        challenge = connection.recv_bytes()
        connection.send_bytes(hmac.digest(address.secret, challenge, "md5"))
        assert connection.recv_bytes() == b"refused"


@pytest.mark.usefixtures("patience")
def test_closing_the_port_disconnects_waiting_clients(
    listening: AuthenticatedListener, address: Address, strangers: ExitStack
) -> None:
    silent = strangers.enter_context(stranger(listening.address.port))
    assert address.ask(b"abc") == b"cba"
    began = time.monotonic()
    listening.close()
    listening.close()
    assert time.monotonic() - began < HONEST
    wait_until(lambda: is_closed(silent), timeout=HONEST)
    with pytest.raises(StoreUnavailableError):
        address.ask(b"abc")


def test_strangers_do_not_block_the_connections_of_continuous_queries(
    network: DriverNetwork, strangers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_endpoint, "HANDSHAKE_SECONDS", 2.0)
    with closing(EpochCoordinator(network, Epochs(1, 0, 8))) as coordinator:
        for _ in range(5):
            strangers.enter_context(stranger(coordinator.address.port))
        began = time.monotonic()
        reader, writer = coordinator.address.open(READER, 0), coordinator.address.open(WRITER, 0)
        coordinator.await_tasks(1.5, lambda: True)
        assert time.monotonic() - began < 1.5
        coordinator.assign(0, [{0: 7}])
        assert reader.await_message()["positions"] == {"0": 7}
        # What has shown the secret has no deadline.
        time.sleep(1.5 * driver_endpoint.HANDSHAKE_SECONDS)
        coordinator.pause()
        assert reader.await_message()["kind"] == "pause"
        reader.close()
        writer.close()


class Wire:
    """What passes between a task and a driver, for whom it may stand in."""

    def __init__(self, port: int) -> None:
        self._port, self.seen = port, bytearray()
        self._server = socket.create_server((LOOPBACK, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        task, _ = self._server.accept()
        with task, socket.create_connection((LOOPBACK, self._port)) as driver:
            back = threading.Thread(target=self._copy, args=[driver, task], daemon=True)
            back.start()
            self._copy(task, driver)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(4096):
                self.seen += piece
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()


def test_what_is_encrypted_cannot_be_read_on_the_wire(network: DriverNetwork, address: Address) -> None:
    with closing(Wire(address.port)) as wire:
        assert replace(address, port=wire.port).ask(b"the offsets of partition 7") == (
            b"7 noititrap fo stesffo eht"
        )
        assert (b"the offsets" in wire.seen) is not network.encrypted


@pytest.mark.parametrize("network", [ENCRYPTED])
def test_a_task_trusts_its_own_driver_only(address: Address) -> None:
    """Not even one that knows the secret."""
    driver_certificate.driver_tls.cache_clear()
    with closing(AuthenticatedListener(ENCRYPTED, mirror, "penstock-impostor")) as impostor:
        posing = replace(address, port=impostor.address.port, secret=impostor.address.secret)
        with pytest.raises(StoreUnavailableError, match="is not the driver") as caught:
            posing.ask(b"abc")
    assert caught.value.condition == "STORE_UNAVAILABLE.OTHER_DRIVER"


@pytest.mark.parametrize("network", [ENCRYPTED])
def test_a_task_does_not_speak_to_a_driver_that_does_not_encrypt(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_endpoint, "_CONNECT_SECONDS", 0.5)
    with closing(AuthenticatedListener(PLAIN, mirror, "penstock-plain")) as plain:
        with pytest.raises(StoreUnavailableError, match="is not the driver"):
            replace(address, port=plain.address.port, secret=plain.address.secret).ask(b"abc")
        with pytest.raises(StoreUnavailableError):
            replace(address, certificate=None).ask(b"abc")


def test_messages_of_any_length_arrive_whole_while_others_are_sent(network: DriverNetwork) -> None:
    """Both ends send and receive at the same time, more than fits into the buffers between them."""
    sizes = [0, 1, 16_383, 16_384, 16_385, 1 << 20, 3, 1 << 22, 0]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]

    def exchange(connection: Connection) -> list[bytes]:
        sending = threading.Thread(target=lambda: [connection.send_bytes(each) for each in sent])
        sending.start()
        received = [connection.recv_bytes() for _ in sent]
        sending.join()
        return received

    found: list[bytes] = []

    def serve(connection: Connection) -> None:
        with connection:
            found.extend(exchange(connection))

    with connected(network, serve) as connection:
        assert exchange(connection) == sent
        wait_until(lambda: found == sent, timeout=10)


def test_a_connection_is_ready_exactly_when_a_message_has_come(network: DriverNetwork) -> None:
    turns = threading.Semaphore(0)

    def serve(connection: Connection) -> None:
        with connection:
            turns.acquire()
            connection.send_bytes(b"one")
            connection.send_bytes(b"two")
            turns.acquire()

    with connected(network, serve) as connection:
        assert not connection.poll(0.1)
        turns.release()
        for expected in (b"one", b"two"):
            assert connection.poll(5)
            assert select.select([connection.fileno()], [], [], 0)[0]
            assert connection.recv_bytes() == expected
        assert not connection.poll()
        turns.release()
        assert connection.poll(5)
        with pytest.raises(EOFError):
            connection.recv_bytes()


def test_a_message_that_is_too_long_is_refused(network: DriverNetwork) -> None:
    with (
        connected(network, lambda line: line.send_bytes(bytes(11))) as connection,
        pytest.raises(OSError, match="11 bytes"),
    ):
        connection.recv_bytes(10)


def test_a_task_tries_again_when_its_driver_was_paused_at_the_end_of_the_handshake(
    network: DriverNetwork, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task has proved that it knows the secret, and the driver has closed the connection since."""
    real, paused = driver_endpoint.prove, []

    def prove(connection: Connection, secret: bytes, side: bytes) -> None:
        real(connection, secret, side)
        if side == driver_endpoint.DRIVER and not paused:
            paused.append(connection)
            time.sleep(1.5 * driver_endpoint.HANDSHAKE_SECONDS)

    monkeypatch.setattr(driver_endpoint, "prove", prove)
    assert address.ask(b"abc") == b"cba"
    assert paused


@pytest.mark.parametrize("network", [ENCRYPTED])
def test_who_does_not_speak_the_version_of_tls_is_told_so(address: Address) -> None:
    assert address.certificate is not None
    old = task_context(address.certificate)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with Connection(stranger(address.port)) as connection, pytest.raises(ssl.SSLError, match=r"(?i)version"):
        connection.encrypt(old, server=False)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
def test_a_driver_may_have_an_address_of_ipv6() -> None:
    six = DriverNetwork("::1", "::1")
    with closing(AuthenticatedListener(six, mirror, "penstock-test")) as listening:
        assert listening.address.ask(b"abc") == b"cba"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, DriverNetwork("h", "h")),
        ({"spark.network.crypto.enabled": " TRUE "}, DriverNetwork("h", "h", encrypted=True)),
        ({"spark.ssl.rpc.enabled": "true"}, DriverNetwork("h", "h", encrypted=True)),
        ({"spark.driver.host": "[::1]", "spark.driver.bindAddress": "[::]"}, DriverNetwork("::1", "::")),
    ],
)
def test_the_network_follows_sparks_settings(settings: dict[str, str], expected: DriverNetwork) -> None:
    class Context:
        master = "yarn"

        def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
            return {"spark.driver.host": "h", **settings}

    class Session:
        sparkContext = Context()  # noqa: N815 - Spark's name

    assert driver_endpoint.driver_network(Session()) == expected  # type: ignore[arg-type]
