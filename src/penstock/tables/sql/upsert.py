"""Staged rows into a table: SQL that both databases understand, but for their ways to say that keys clash."""

from __future__ import annotations

from penstock.arguments import brief, in_quotes
from penstock.errors import CommitRefused, TableRefused
from penstock.store.database import Transaction
from penstock.tables.columns import Column, Layout
from penstock.tables.sql import existing
from penstock.tables.sql.stage import Source

_TWICE = "21000"
_UNIQUE = "23505"
_MISSING = ("42P01", "42703")


def insert(tx: Transaction, layout: Layout, source: Source) -> int:
    """Add the rows.

    Raises
    ------
    TableRefused
        When a key is there already, or twice among the rows.
    """
    statement = f"insert into {layout.name.sql} ({_names(layout)}) {_rows(layout, source)}"
    return _change(tx, layout, source, statement)


def insert_new(tx: Transaction, layout: Layout, source: Source) -> None:
    """Add the rows whose key is not there."""
    keys = ", ".join(column.sql for column in layout.keys)
    tx.change(
        f"insert into {layout.name.sql} ({_names(layout)}) {_rows(layout, source)} on conflict ({keys}) do nothing"
    )


def upsert(tx: Transaction, layout: Layout, source: Source) -> int:
    """Add the rows, each in the place of the one with its key; rows that are equal in every column count as one.

    Raises
    ------
    TableRefused
        When rows have equal keys and differ: none of them is the last one.
    """
    others = [column for column in layout.columns if not column.key]
    statements = [_conflicting(layout, _rows(layout, source))]
    if tx.merges and others:
        statements.insert(0, _merging(layout, _rows(layout, source)))
    if not _keys_repeat(tx, layout, source):
        for statement in statements:
            touched = _try(tx, statement)
            if touched is not None:
                if others:
                    return _all(touched, source)
                require_all(tx, source)
                return touched
    require_all(tx, source)
    repeated = _repeated(tx, layout, source)
    if repeated is not None:
        raise TableRefused(
            f"a micro-batch has several rows with the key {repeated} for {layout.name.sql}, and nothing says which of them is "
            "the last one: aggregate by the key, or keep one row of each (max_by, dropDuplicates)",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=repeated,
        )
    return tx.change(_conflicting(layout, _rows(layout, source, distinct=True)))


def replace(tx: Transaction, layout: Layout, source: Source) -> int:
    """Put the rows in the place of all that is there."""
    tx.execute(f"delete from {layout.name.sql}")
    return insert(tx, layout, source)


def require_all(tx: Transaction, source: Source) -> None:
    """Refuse staged rows that are not all there any more, for statements that do not tell how many there were.

    Raises
    ------
    CommitRefused
    """
    if source.rows is not None:
        _all(tx.query(f"select count(*) from {source.relation} where {source.where}")[0][0], source)


def _names(layout: Layout) -> str:
    return ", ".join(column.sql for column in layout.columns)


def _rows(layout: Layout, source: Source, *, distinct: bool = False) -> str:
    columns = ", ".join(f"c{n}" for n in range(len(layout.columns)))
    return f"select {'distinct ' if distinct else ''}{columns} from {source.relation} where {source.where}"


def _merging(layout: Layout, rows: str) -> str:
    """A join, and then updates and inserts, is a third faster than rows that try to go in one by one.

    It fails where another transaction inserts one of its keys at the same time.
    """
    own, coming = "present_rows", "incoming_rows"
    numbered = list(enumerate(layout.columns))
    same = " and ".join(f"{own}.{column.sql} = {coming}.c{n}" for n, column in numbered if column.key)
    changes = ", ".join(f"{column.sql} = {coming}.c{n}" for n, column in numbered if not column.key)
    values = ", ".join(f"{coming}.c{n}" for n, _ in numbered)
    return (
        f"merge into {layout.name.sql} as {own} using ({rows}) as {coming} on {same} "
        f"when matched then update set {changes} when not matched then insert ({_names(layout)}) values ({values})"
    )


def _conflicting(layout: Layout, rows: str) -> str:
    """What every database has, and what holds its own against others that write the same keys."""
    keys = ", ".join(column.sql for column in layout.keys)
    changes = ", ".join(
        f"{column.sql} = excluded.{column.sql}" for column in layout.columns if not column.key
    )
    what = f"do update set {changes}" if changes else "do nothing"
    return f"insert into {layout.name.sql} ({_names(layout)}) {rows} on conflict ({keys}) {what}"


def _keys_repeat(tx: Transaction, layout: Layout, source: Source) -> bool:
    """Whether it has to be looked at more closely; PostgreSQL itself says so in the statement."""
    if tx.dialect == "postgres":
        return False
    keys = ", ".join(layout.staged_keys)
    return bool(tx.query(f"select 1 from {source.relation} group by {keys} having count(*) > 1 limit 1"))


def _repeated(tx: Transaction, layout: Layout, source: Source) -> str | None:
    """A key that rows which differ have; None when there is none."""
    keys = ", ".join(layout.staged_keys)
    found = tx.query(
        f"select {keys} from ({_rows(layout, source, distinct=True)}) as rows group by {keys} having count(*) > 1 limit 1"
    )
    return shown_key(layout.keys, found[0]) if found else None


def shown_key(keys: tuple[Column, ...], values: tuple[object, ...]) -> str:
    """A key as messages show it."""
    return brief(
        ", ".join(f"{in_quotes(key.name)} = {value!r}" for key, value in zip(keys, values, strict=True))
    )


def _try(tx: Transaction, statement: str) -> int | None:
    """The rows that a statement touched; None when a key came twice, or another has just inserted it."""
    tx.execute("savepoint merging")
    try:
        touched = tx.change(statement)
    except Exception as error:
        if getattr(error, "sqlstate", None) not in (_TWICE, _UNIQUE):
            raise
        tx.execute("rollback to savepoint merging")
        return None
    tx.execute("release savepoint merging")
    return touched


def _change(tx: Transaction, layout: Layout, source: Source, statement: str) -> int:
    tx.execute("savepoint merging")
    try:
        touched = tx.change(statement)
    except Exception as error:
        if not _is_clash(error) and not _is_amiss(error):
            raise
        tx.execute("rollback to savepoint merging")
        if _is_clash(error):
            raise _clash(tx, layout, source, error) from error
        # It says what is wrong with the table, where that is it.
        existing.require(tx, layout)
        raise
    tx.execute("release savepoint merging")
    return _all(touched, source)


def _all(touched: int, source: Source) -> int:
    """An unlogged relation is empty after a crash of the server."""
    if source.rows is not None and touched != source.rows:
        raise CommitRefused(
            f"{source.rows} rows were staged and {touched} are left: the server lost them in a crash, or they were swept; "
            "nothing of the batch is visible. Restart the query, it repeats the micro-batch"
        )
    return touched


def _is_clash(error: Exception) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return getattr(error, "sqlstate", None) == _UNIQUE or name in (
        "SQLITE_CONSTRAINT_UNIQUE",
        "SQLITE_CONSTRAINT_PRIMARYKEY",
        "SQLITE_CONSTRAINT_ROWID",
    )


def _is_amiss(error: Exception) -> bool:
    """Whether a table or a column may be missing."""
    return (
        getattr(error, "sqlstate", None) in _MISSING
        or getattr(error, "sqlite_errorname", "") == "SQLITE_ERROR"
    )


def _clash(tx: Transaction, layout: Layout, source: Source, error: Exception) -> TableRefused:
    keys = ", ".join(layout.staged_keys)
    found = (
        tx.query(
            f"select {keys} from {source.relation} where {source.where} group by {keys} having count(*) > 1 limit 1"
        )
        if keys
        else []
    )
    if found:
        shown = shown_key(layout.keys, found[0])
        return TableRefused(
            f"a micro-batch has several rows with the key {shown} for {layout.name.sql}: use output mode update with one row "
            "for each key, or leave the keys out",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=shown,
        )
    detail = getattr(getattr(error, "diag", None), "message_detail", None) or str(error)
    return TableRefused(
        f"{layout.name.sql} already has a row with a key that comes in ({brief(detail)}): output mode append only adds rows. Use "
        "output mode update, or leave the keys out",
        condition="TABLE_REFUSED.KEY_EXISTS",
    )
