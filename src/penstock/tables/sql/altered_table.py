"""Clear errors for statements that fail because a table was altered while a query ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError, StoreError
from penstock.store.database import Database
from penstock.tables.columns import Layout
from penstock.tables.sql import ddl

_STATE_CLASSES = ("22", "23", "42")
"""Classes of SQL states: values that a column cannot hold, constraints, and missing tables and columns."""
_SQLITE_ERRORS = ("SQLITE_ERROR", "SQLITE_CONSTRAINT")


@contextmanager
def explaining_alterations(database: Database, layout: Layout) -> Iterator[None]:
    """If the block fails, and the table does not accept the rows any more, raise the error that says why."""
    try:
        yield
    except StoreError as error:
        if not _may_be_alteration(error.__cause__):
            raise
        difference = _difference(database, layout.stored_layout)
        if difference is None:
            raise
        raise difference from error


def _may_be_alteration(cause: BaseException | None) -> bool:
    state, name = getattr(cause, "sqlstate", None) or "", getattr(cause, "sqlite_errorname", None) or ""
    return state[:2] in _STATE_CLASSES or name.startswith(_SQLITE_ERRORS)


def _difference(database: Database, layout: Layout) -> PenstockError | None:
    try:
        database.run(lambda tx: ddl.require_compatible(tx, layout), write=False)
    except PenstockError as error:
        return error
    return None
