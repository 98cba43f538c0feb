"""The messages of a slot as the server sends them: PostgreSQL's streaming replication protocol.

The format is described in the PostgreSQL manual, "Streaming Replication Protocol". Only one reader can stream
from a slot at a time, and SQL functions cannot read or advance it meanwhile.
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
"""Of a data message: its start, the end of the log on the server, and the server's time."""
_KEEPALIVE_BODY = struct.Struct(">QqB")
"""The position up to which everything was sent, the server's time, and whether it wants a reply."""
_STATUS = struct.Struct(">cQQQqB")
_EPOCH = 946_684_800
"""Seconds from 1970 to 2000, the epoch of PostgreSQL."""
_REPLY_SECONDS = 5.0
"""The longest time between two replies: a server that gets none for wal_sender_timeout (by default a minute)
closes the connection.
"""
_MOST_BYTES = 4 << 20


@dataclass
class Received:
    """Messages of the log."""

    messages: list[bytes]
    whole: int
    """How many of the messages belong to transactions that are complete."""
    complete: int | None
    """Everything before this position was sent; None if the server has not said."""
    bytes: int = 0
    """The size of the messages."""


class ReplicationStream:
    """A connection that receives a slot's transactions, in the order of their commits; not thread-safe.

    ``start`` is the position from which on commits are sent; the server begins later if the slot has been
    advanced further. ``application`` is what the server shows as the name of the application.
    """

    def __init__(self, server: Server, slot: str, publication: str, start: int, application: str) -> None:
        self._server = server
        self._confirmed = start
        self._connection = server.with_retries(
            lambda: _started(server, slot, publication, start, application)
        )
        self._pgconn: PGconn = self._connection.pgconn
        self._replied_at = time.monotonic()

    def close(self) -> None:
        with suppress(Exception):
            self._connection.close()

    def read(self, wait: float) -> Received:
        """Return the messages that have arrived, waiting at most that many seconds for the first one.

        Raises
        ------
        ServerGone
            When the connection is closed.
        """
        received = Received([], 0, None)
        with self._server.translating():
            self._take(received)
            if not received.bytes and received.complete is None:
                # Rows may be decrypted already, so that the socket has none.
                self._pgconn.consume_input()
                self._take(received)
            if not received.bytes and received.complete is None:
                self._await(wait)
                self._take(received)
            if time.monotonic() - self._replied_at >= _REPLY_SECONDS:
                self._reply()
        return received

    def confirm(self, position: int) -> None:
        """Let the server remove the log before a position; what was committed before it is safe elsewhere."""
        if position > self._confirmed:
            self._confirmed = position
            with self._server.translating():
                self._reply()

    def _await(self, wait: float) -> None:
        due = max(0.0, self._replied_at + _REPLY_SECONDS - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._pgconn.socket, selectors.EVENT_READ)
            if selector.select(min(wait, due)):
                self._pgconn.consume_input()

    def _take(self, received: Received) -> None:
        """Take what has arrived, up to a few megabytes."""
        pgconn, size, wanted = self._pgconn, 0, False
        take, messages = pgconn.get_copy_data, received.messages
        while size < _MOST_BYTES:
            length, data = take(1)
            if length > 0:
                kind = data[0]
                if kind == _DATA:
                    message = bytes(data[25:])
                    messages.append(message)
                    size += length
                    if message[0] == COMMIT:
                        received.whole = len(messages)
                elif kind == _KEEPALIVE:
                    received.complete, _, reply = _KEEPALIVE_BODY.unpack_from(data, 1)
                    wanted |= bool(reply)
            elif length == 0:
                break
            else:
                self._end()
        if wanted:
            self._reply()
        received.bytes += size

    def _end(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.error_message:
            raise self._server.psycopg.errors.error_from_result(result)
        raise ServerGone(f"{self._server.name}: the server has ended the replication")

    def _reply(self) -> None:
        now = int((time.time() - _EPOCH) * 1_000_000)
        at = self._confirmed
        self._pgconn.put_copy_data(_STATUS.pack(b"r", at, at, at, now, 0))
        self._pgconn.flush()
        self._replied_at = time.monotonic()


def _started(server: Server, slot: str, publication: str, start: int, application: str) -> Connection:
    """Return a connection on which the server sends the slot's transactions."""
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
