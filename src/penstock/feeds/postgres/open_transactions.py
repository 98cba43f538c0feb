"""Transactions that stay open on the server, and with them the log that a slot keeps.

A slot keeps the log from the beginning of the oldest open transaction on, whatever has been read: the transaction may still commit
rows that were written then.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.feeds.postgres.server import Server
from penstock.redaction import sentence

log = logging.getLogger("penstock.changes")
_LITERAL = re.compile(r"'(?:[^']|'')*'?|\$(\w*)\$.*?(?:\$\1\$|\Z)", re.DOTALL)
_MOST_TEXT = 120
_HIDDEN = "<insufficient privilege>"
_EVERY = 5.0
"""Seconds between two looks, where so long is not too long to notice one."""


@dataclass(frozen=True)
class OpenTransaction:
    """The oldest transaction of the server's that has written, and neither committed nor rolled back."""

    pid: int | None
    """Its server process; None for a prepared one, which has none."""
    seconds: float
    """Its age, or since when this process has known it where the role may not see its age."""
    state: str | None
    """What the process does, as ``pg_stat_activity`` has it."""
    query: str
    """Its last statement without values; the name of a prepared transaction."""

    @property
    def name(self) -> str:
        """What to call it."""
        return f"prepared transaction {self.query}" if self.pid is None else f"server process {self.pid}"

    def told(self) -> str:
        """Who it is, and since when it is open, for people."""
        if self.pid is None:
            return f"{self.name}, open for {_age(self.seconds)}"
        if self.state is None:
            return f"{self.name}, open for at least {_age(self.seconds)} (grant pg_read_all_stats shows its statement)"
        return f"{self.name}, open for {_age(self.seconds)}, {self.state}: {self.query}"

    def warning(self, slot: str, retained: int) -> str:
        """What is wrong, and what ends it."""
        ends = (
            f"rollback prepared {self.query}"
            if self.pid is None
            else f"select pg_terminate_backend({self.pid})"
        )
        return (
            f"the slot {slot} keeps {retained / 2**20:.1f} MiB of log, and all that comes, until a transaction ends: {self.told()}. "
            f"Have it end, or {ends}"
        )


class OpenTransactions:
    """Looks for a transaction that has been open for too long, at most every few seconds.

    Parameters
    ----------
    server, slot
        Where, and the name of what keeps the log.
    longest
        Seconds that one may be open; 0 for any time.
    """

    def __init__(self, server: Server, slot: str, longest: float) -> None:
        self._server, self._slot, self._longest = server, slot, longest
        self._first_seen: tuple[str, float] = "", 0.0
        self._warned: tuple[str, float] = "", 0.0
        self._told: str | None = None
        self._told_until = 0.0

    def oldest(self) -> OpenTransaction | None:
        """The oldest one, however young."""
        found = self._find()
        return None if found is None else found[1]

    def warning(self, retained: Callable[[], int]) -> str | None:
        """What to say of one that is too old; it is logged too, once for each doubling of its age.

        Parameters
        ----------
        retained
            Gives the bytes of log that the slot keeps.
        """
        if self._longest and time.monotonic() >= self._told_until:
            found = self._find()
            old = found is not None and found[1].seconds >= self._longest
            self._told = self._warning(*found, retained()) if found is not None and old else None
            self._told_until = time.monotonic() + min(_EVERY, self._longest / 2)
        return self._told

    def _warning(self, number: str, transaction: OpenTransaction, retained: int) -> str:
        told = transaction.warning(self._slot, retained)
        last, seconds = self._warned
        if last != number or transaction.seconds >= 2 * seconds:
            self._warned = number, transaction.seconds
            log.warning(
                "a transaction has been open for too long: %s",
                told,
                extra={
                    "action": "open_transaction",
                    "slot": self._slot,
                    "pid": transaction.pid,
                    "seconds": transaction.seconds,
                    "retained_bytes": retained,
                },
            )
        return told

    def _find(self) -> tuple[str, OpenTransaction] | None:
        rows = self._server.all("oldest_transaction")
        if not rows:
            return None
        (row,) = rows
        if self._first_seen[0] != row.number:
            self._first_seen = row.number, time.monotonic()
        hidden = row.query == _HIDDEN
        seconds = time.monotonic() - self._first_seen[1] if row.seconds is None else max(0.0, row.seconds)
        # The name of a prepared transaction is what ends it.
        query = row.query if row.pid is None else _without_values(row.query or "")
        return row.number, OpenTransaction(row.pid, seconds, None if hidden else row.state, query)


def _without_values(query: str) -> str:
    return sentence(_LITERAL.sub("'…'", query), _MOST_TEXT)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
