"""Errors for statements and transactions that the server ended because they took too long."""

from __future__ import annotations

from penstock.errors import StoreUnavailableError

_IDLE, _TRANSACTION, _STATEMENT = "25P03", "25P04", "57014"
SESSION_END_STATES = (_IDLE, _TRANSACTION)
"""The SQLSTATEs with which the server ends the session, perhaps while no statement runs."""
_RAISE = "`alter role … set {} = 0`, or use a role without that limit"


class TookTooLong(StoreUnavailableError):
    """The server has rolled the transaction back, even if the client was about to commit it."""


def time_limit_error(url: str, state: str, text: str) -> TookTooLong | None:
    """Return the error for a SQLSTATE; None if it is not about a time limit.

    ``url`` and ``text``, the server's message, must not contain a password.
    """
    if state == _IDLE:
        return TookTooLong(
            f"{url}: this process was idle in a transaction for longer than the server's "
            "idle_in_transaction_session_timeout, so the server rolled it back: run it again",
            condition="STORE_UNAVAILABLE.IDLE_IN_TRANSACTION",
        )
    if state == _TRANSACTION:
        return TookTooLong(
            f"{url}: a transaction took longer than the transaction_timeout of the role, the database or the "
            f"URL, so the server rolled it back: {_RAISE.format('transaction_timeout')}",
            condition="STORE_UNAVAILABLE.TRANSACTION_TIMEOUT",
        )
    if state == _STATEMENT:
        return TookTooLong(
            f"{url}: the server rolled a transaction back ({text}). If the role, the database or the URL has "
            f"a statement_timeout: {_RAISE.format('statement_timeout')}",
            condition="STORE_UNAVAILABLE.STATEMENT_CANCELED",
        )
    return None
