"""A connection between a task and its driver: whole messages, authenticated, encrypted if Spark's own are.

Both sides prove that they know the driver's secret. If they encrypt, they use TLS 1.3, and the task accepts
only the certificate of its driver, which it gets together with the secret.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError

_HEAD = struct.Struct("!i")
_MOST_BYTES = 0x7FFFFFFF
_RECORD_HEAD_BYTES = 5
"""The head of a TLS record: kind, version, and the length of the rest in two bytes (RFC 8446, 5.1)."""
_RECORD_KINDS = range(20, 25)


class Connection:
    """Messages over a socket, each with its length before it; one thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._tls: _Tls | None = None
        self._sending = threading.Lock()

    def encrypt(self, context: ssl.SSLContext, *, server: bool) -> None:
        """Encrypt from now on; raise an ``ssl.SSLError`` if the peer does not, or cannot be trusted."""
        tls = _Tls(context, server=server)
        try:
            while not tls.handshake_done():
                self._socket.sendall(tls.to_send())
                tls.received(self._record())
        except ssl.SSLError:
            # An alert says why to the peer.
            with suppress(OSError):
                self._socket.sendall(tls.to_send())
            raise
        self._socket.sendall(tls.to_send())
        self._tls = tls

    def fileno(self) -> int:
        """Return the descriptor for ``select``, which is readable when a message has arrived."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Let operations that wait for the peer fail with a TimeoutError after ``seconds``."""
        self._socket.settimeout(seconds)

    def poll(self, timeout: float = 0.0) -> bool:
        """Return whether a message has arrived or the peer has hung up, within ``timeout`` seconds."""
        if self._socket.fileno() < 0:
            raise OSError("the connection is closed")
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(timeout * 1000))

    def send_bytes(self, message: bytes) -> None:
        if len(message) > _MOST_BYTES:
            raise OSError(f"a message of {len(message)} bytes is too long")
        framed = _HEAD.pack(len(message)) + message
        with self._sending:
            self._socket.sendall(framed if self._tls is None else self._tls.encrypted(framed))

    def recv_bytes(self, most: int = _MOST_BYTES) -> bytes:
        """Return the next message; raise an OSError if it is longer than ``most`` bytes."""
        (length,) = _HEAD.unpack(self._receive(_HEAD.size))
        if not 0 <= length <= most:
            raise OSError(f"a message of {length} bytes has arrived, but only {most} are allowed")
        return self._receive(length)

    def shut_down(self) -> None:
        """Wake the thread that receives; closing the socket would not wake it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, count: int) -> bytes:
        if self._tls is None:
            return self._exactly(count)
        while (found := self._tls.decrypted(count)) is None:
            self._tls.received(self._record())
        return found

    def _record(self) -> bytes:
        """Return the next TLS record.

        Read no further, so that bytes that have arrived are either in the socket, where ``select`` sees them,
        or have been processed.
        """
        head = self._exactly(_RECORD_HEAD_BYTES)
        if head[0] not in _RECORD_KINDS:
            raise ssl.SSLError("the peer does not encrypt")
        return head + self._exactly(int.from_bytes(head[3:]))

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = self._socket.recv(count - len(found))
            if not piece:
                raise EOFError("the peer has hung up")
            found += piece
        return bytes(found)


class _Tls:
    """TLS without its socket.

    With an ``ssl.SSLSocket``, one thread could not send while another one waits for a message.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._received, self._to_send, server_side=server)
        self._lock = threading.Lock()
        self._decrypted = bytearray()

    def handshake_done(self) -> bool:
        """Take the next step of the handshake; return whether it needs no more data from the peer."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def to_send(self) -> bytes:
        return self._to_send.read()

    def received(self, record: bytes) -> None:
        with self._lock:
            self._received.write(record)

    def encrypted(self, what: bytes) -> bytes:
        with self._lock:
            self._object.write(what)
            return self._to_send.read()

    def decrypted(self, count: int) -> bytes | None:
        """Return ``count`` of the received bytes; None while there are fewer."""
        with self._lock, suppress(ssl.SSLWantReadError):
            while len(self._decrypted) < count:
                piece = self._object.read(count - len(self._decrypted))
                if not piece:
                    raise EOFError("the peer has hung up")
                self._decrypted += piece
        if len(self._decrypted) < count:
            return None
        found = bytes(self._decrypted[:count])
        del self._decrypted[:count]
        return found


TASK, DRIVER = b"penstock task", b"penstock driver"
"""The side that a proof is for, so that a proof of one side cannot be used as one of the other."""
_CHALLENGE_BYTES = 32
_ACCEPTED, _REFUSED = b"accepted", b"refused"


def require_proof(connection: Connection, secret: bytes, side: bytes) -> None:
    """Make the peer prove that it is one side and knows the secret, without revealing it (HMAC-SHA-256).

    The handshake of ``multiprocessing`` uses MD5 before Python 3.12, and does not distinguish the sides.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.send_bytes(challenge)
    accepted = hmac.compare_digest(connection.recv_bytes(256), _proof(secret, side, challenge))
    connection.send_bytes(_ACCEPTED if accepted else _REFUSED)
    if not accepted:
        raise AuthenticationError("the peer does not know the secret")


def prove(connection: Connection, secret: bytes, side: bytes) -> None:
    challenge = connection.recv_bytes(256)
    if len(challenge) != _CHALLENGE_BYTES:
        raise AuthenticationError("the peer speaks another protocol")
    connection.send_bytes(_proof(secret, side, challenge))
    if connection.recv_bytes(256) != _ACCEPTED:
        raise AuthenticationError("the peer has another secret")


def _proof(secret: bytes, side: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, side + challenge, "sha256")


def send_at_once(connection: socket.socket) -> None:
    """Send small messages immediately.

    Otherwise each would wait until the peer has acknowledged the previous one, which may take 40 ms (Nagle's
    algorithm and delayed acknowledgements, RFC 896 and RFC 1122).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
