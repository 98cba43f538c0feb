"""Transactions that stay open on the server, for which a slot keeps log.

A slot keeps the log from the beginning of the oldest open transaction on, whatever has been read: the
transaction may still commit rows that were written then.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.feeds.postgres.server import Server
from penstock.redaction import sentence

log = logging.getLogger("penstock.feeds")
_LITERAL = re.compile(r"'(?:[^']|'')*'?|\$(\w*)\$.*?(?:\$\1\$|\Z)", re.DOTALL)
_MOST_TEXT = 120
_HIDDEN = "<insufficient privilege>"
_CHECK_EVERY = 5.0
"""The longest time between two checks, in seconds."""


@dataclass(frozen=True)
class OpenTransaction:
    """The oldest transaction on the server that has written, and neither committed nor rolled back."""

    pid: int | None
    """Its server process; None for a prepared one, which has none."""
    seconds: float
    """Its age; the time since this process first saw it if the role may not see its age."""
    state: str | None
    """The state of the process in ``pg_stat_activity``."""
    query: str
    """Its last statement without values; the name of a prepared transaction."""

    @property
    def name(self) -> str:
        """The transaction for messages."""
        return f"prepared transaction {self.query}" if self.pid is None else f"server process {self.pid}"

    def describe(self) -> str:
        """Describe the transaction and its age, for people."""
        if self.pid is None:
            return f"{self.name}, open for {_age(self.seconds)}"
        if self.state is None:
            shows = "grant pg_read_all_stats shows its statement"
            return f"{self.name}, open for at least {_age(self.seconds)} ({shows})"
        return f"{self.name}, open for {_age(self.seconds)}, {self.state}: {self.query}"

    def warning(self, slot: str, retained: int) -> str:
        """Return a warning that says how to end the transaction."""
        ends = (
            f"rollback prepared {self.query}"
            if self.pid is None
            else f"select pg_terminate_backend({self.pid})"
        )
        return (
            f"the slot {slot} keeps {retained / 2**20:.1f} MiB of log, and more until a transaction ends: "
            f"{self.describe()}. Commit it or roll it back, or {ends}"
        )


class OpenTransactions:
    """Checks for a transaction that has been open for too long, at most every few seconds.

    Parameters
    ----------
    longest
        Seconds that a transaction may be open; 0 for any time.
    """

    def __init__(self, server: Server, slot: str, longest: float) -> None:
        self._server, self._slot, self._longest = server, slot, longest
        self._first_seen: tuple[str, float] = "", 0.0
        self._warned: tuple[str, float] = "", 0.0
        self._current: str | None = None
        self._next_check = 0.0

    def oldest(self) -> OpenTransaction | None:
        """Return the oldest open transaction, whatever its age."""
        oldest = self._find()
        return None if oldest is None else oldest[1]

    def warning(self, retained: Callable[[], int]) -> str | None:
        """Return a warning of a transaction that is too old; log it once for each doubling of its age.

        Parameters
        ----------
        retained
            Returns the bytes of log that the slot keeps.
        """
        if self._longest and time.monotonic() >= self._next_check:
            oldest = self._find()
            too_old = oldest is not None and oldest[1].seconds >= self._longest
            self._current = self._warning(*oldest, retained()) if oldest is not None and too_old else None
            self._next_check = time.monotonic() + min(_CHECK_EVERY, self._longest / 2)
        return self._current

    def _warning(self, number: str, transaction: OpenTransaction, retained: int) -> str:
        warning = transaction.warning(self._slot, retained)
        last, seconds = self._warned
        if last != number or transaction.seconds >= 2 * seconds:
            self._warned = number, transaction.seconds
            log.warning(
                "a transaction has been open for too long: %s",
                warning,
                extra={
                    "action": "open_transaction",
                    "slot": self._slot,
                    "pid": transaction.pid,
                    "seconds": transaction.seconds,
                    "retained_bytes": retained,
                },
            )
        return warning

    def _find(self) -> tuple[str, OpenTransaction] | None:
        rows = self._server.fetch("oldest_transaction")
        if not rows:
            return None
        (row,) = rows
        if self._first_seen[0] != row.number:
            self._first_seen = row.number, time.monotonic()
        hidden = row.query == _HIDDEN
        seconds = time.monotonic() - self._first_seen[1] if row.seconds is None else max(0.0, row.seconds)
        # A prepared transaction is ended by its name.
        query = row.query if row.pid is None else _without_values(row.query or "")
        return row.number, OpenTransaction(row.pid, seconds, None if hidden else row.state, query)


def _without_values(query: str) -> str:
    return sentence(_LITERAL.sub("'…'", query), _MOST_TEXT)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
