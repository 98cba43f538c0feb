"""Client for PostgreSQL's streaming replication protocol: receives the messages of a slot.

The format is described in the PostgreSQL manual, "Streaming Replication Protocol". Only one reader can stream
from a slot at a time, and meanwhile SQL functions cannot read or advance the slot.
"""

from __future__ import annotations

import selectors
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.feeds.postgres.pgoutput import COMMIT
from penstock.feeds.postgres.server import Connection, Server, ServerGone, lsn, quoted

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

_DATA, _KEEPALIVE = b"wk"
_DATA_HEAD = struct.Struct(">QQq")
"""Header of a data message: its start, the end of the server's log, and the server's time."""
_KEEPALIVE_BODY = struct.Struct(">QqB")
"""The position up to which all messages were sent, the server's time, and whether a reply is requested."""
_STATUS = struct.Struct(">cQQQqB")
_EPOCH = 946_684_800
"""Seconds from 1970 to 2000, the epoch of PostgreSQL."""
_REPLY_SECONDS = 5.0
"""Maximum time between two replies. A server without a reply for wal_sender_timeout (one minute by default)
closes the connection.
"""
_MAX_BYTES = 4 << 20


@dataclass
class Received:
    """Messages that have been received."""

    messages: list[bytes]
    complete_messages: int
    """The number of messages that belong to complete transactions."""
    complete: int | None
    """All messages before this position have been received; None if the server has not reported it."""
    bytes: int = 0
    """The total size of the messages."""


class ReplicationStream:
    """A connection that receives the transactions of a slot, in commit order; not thread-safe.

    The server sends commits from the position ``start`` on, or from a later one if the slot has been advanced
    further. ``application`` is the application name of the connection.
    """

    def __init__(self, server: Server, slot: str, publication: str, start: int, application: str) -> None:
        self._server = server
        self._confirmed = start
        self._connection = server.with_retries(
            lambda: _start_streaming(server, slot, publication, start, application)
        )
        self._pgconn: PGconn = self._connection.pgconn
        self._replied_at = time.monotonic()

    def close(self) -> None:
        with suppress(Exception):
            self._connection.close()

    def read(self, wait: float) -> Received:
        """Return the messages that have arrived, waiting at most ``wait`` seconds for the first one.

        Raises
        ------
        ServerGone
            When the connection is closed.
        """
        received = Received([], 0, None)
        with self._server.translating():
            self._take_messages(received)
            if not received.bytes and received.complete is None:
                # With TLS, data may already be decrypted, so that the socket has none to read.
                self._pgconn.consume_input()
                self._take_messages(received)
            if not received.bytes and received.complete is None:
                self._wait_for_data(wait)
                self._take_messages(received)
            if time.monotonic() - self._replied_at >= _REPLY_SECONDS:
                self._reply()
        return received

    def confirm(self, position: int) -> None:
        """Confirm that all commits before a position are stored, so that the server may remove the log."""
        if position > self._confirmed:
            self._confirmed = position
            with self._server.translating():
                self._reply()

    def _wait_for_data(self, wait: float) -> None:
        due = max(0.0, self._replied_at + _REPLY_SECONDS - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._pgconn.socket, selectors.EVENT_READ)
            if selector.select(min(wait, due)):
                self._pgconn.consume_input()

    def _take_messages(self, received: Received) -> None:
        """Take the messages that have arrived, up to a few megabytes."""
        pgconn, size, reply_requested = self._pgconn, 0, False
        get_data, messages = pgconn.get_copy_data, received.messages
        while size < _MAX_BYTES:
            length, data = get_data(1)
            if length > 0:
                kind = data[0]
                if kind == _DATA:
                    message = bytes(data[25:])
                    messages.append(message)
                    size += length
                    if message[0] == COMMIT:
                        received.complete_messages = len(messages)
                elif kind == _KEEPALIVE:
                    received.complete, _, reply = _KEEPALIVE_BODY.unpack_from(data, 1)
                    reply_requested |= bool(reply)
            elif length == 0:
                break
            else:
                self._end()
        if reply_requested:
            self._reply()
        received.bytes += size

    def _end(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.error_message:
            raise self._server.psycopg.errors.error_from_result(result)
        raise ServerGone(f"{self._server.name}: the server has ended the replication stream")

    def _reply(self) -> None:
        now = int((time.time() - _EPOCH) * 1_000_000)
        at = self._confirmed
        self._pgconn.put_copy_data(_STATUS.pack(b"r", at, at, at, now, 0))
        self._pgconn.flush()
        self._replied_at = time.monotonic()


def _start_streaming(server: Server, slot: str, publication: str, start: int, application: str) -> Connection:
    """Return a connection on which the server streams the slot's transactions."""
    names = quoted(publication).replace("'", "''")
    command = (
        f"START_REPLICATION SLOT {quoted(slot)} LOGICAL {lsn(start)} "
        f"(proto_version '1', publication_names '{names}')"
    )
    connection = server.connect(replication="database", application_name=application)
    try:
        result = connection.pgconn.exec_(command.encode())
        if result.status != server.psycopg.pq.ExecStatus.COPY_BOTH:
            raise server.psycopg.errors.error_from_result(result)
    except BaseException:
        connection.close()
        raise
    return connection
