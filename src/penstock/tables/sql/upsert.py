"""SQL statements that insert, upsert and replace rows from a staging table, and their key errors."""

from __future__ import annotations

from collections.abc import Callable

from penstock.arguments import brief
from penstock.errors import TableRefusedError
from penstock.store.database import Transaction
from penstock.store.staging import StagingLost
from penstock.tables.columns import Layout
from penstock.tables.row_checks import duplicate_keys_error
from penstock.tables.sql.staging import StagedRows

_CARDINALITY_VIOLATION = "21000"
_UNIQUE_VIOLATION = "23505"


def insert(tx: Transaction, layout: Layout, source: StagedRows) -> int:
    statement = f"insert into {layout.name.sql} ({layout.columns_sql}) {_select_rows(layout, source)}"
    outcome = _try_statement(tx, statement, _is_key_violation)
    if isinstance(outcome, int):
        return _require_count(outcome, source)
    raise _key_violation_error(tx, layout, source, outcome) from outcome


def insert_new(tx: Transaction, layout: Layout, source: StagedRows) -> None:
    """Insert the rows whose key does not exist."""
    tx.change(
        f"insert into {layout.name.sql} ({layout.columns_sql}) {_select_rows(layout, source)} on conflict "
        f"({layout.keys_sql}) do nothing"
    )


def upsert(tx: Transaction, layout: Layout, source: StagedRows) -> int:
    """Insert the rows, or replace rows with the same keys; identical staged rows count as one."""
    value_columns = [column for column in layout.columns if not column.key]
    statements = [_on_conflict_statement(layout, _select_rows(layout, source))]
    if tx.has_merge and value_columns:
        statements.insert(0, _merge_statement(layout, _select_rows(layout, source)))
    # With repeated keys, PostgreSQL fails with a cardinality violation, and SQLite does not.
    if tx.dialect == "postgres" or _first_repeated_key(tx, layout, source.relation) is None:
        for statement in statements:
            outcome = _try_statement(tx, statement, _is_repeated_or_concurrent_key)
            if isinstance(outcome, int):
                if value_columns:
                    return _require_count(outcome, source)
                require_all_staged(tx, source)
                return outcome
    require_all_staged(tx, source)
    ambiguous = _first_repeated_key(tx, layout, f"({_select_rows(layout, source, distinct=True)}) as rows")
    if ambiguous is not None:
        raise duplicate_keys_error(ambiguous, layout.name.sql)
    return tx.change(_on_conflict_statement(layout, _select_rows(layout, source, distinct=True)))


def replace(tx: Transaction, layout: Layout, source: StagedRows) -> int:
    tx.execute(f"delete from {layout.name.sql}")
    return insert(tx, layout, source)


def require_all_staged(tx: Transaction, source: StagedRows) -> None:
    """Count the staged rows, for statements whose own row count does not show missing ones."""
    if source.rows is not None:
        _require_count(tx.query(f"select count(*) from {source.relation} where {source.where}")[0][0], source)


def _select_rows(layout: Layout, source: StagedRows, *, distinct: bool = False) -> str:
    columns = ", ".join(f"c{n}" for n in range(len(layout.columns)))
    return f"select {'distinct ' if distinct else ''}{columns} from {source.relation} where {source.where}"


def _merge_statement(layout: Layout, rows: str) -> str:
    """Return a MERGE: a third faster than ON CONFLICT, but it fails if a key is inserted concurrently."""
    target, incoming = "present_rows", "incoming_rows"
    columns = list(enumerate(layout.columns))
    key_condition = " and ".join(
        f"{target}.{column.sql} = {incoming}.c{n}" for n, column in columns if column.key
    )
    assignments = ", ".join(f"{column.sql} = {incoming}.c{n}" for n, column in columns if not column.key)
    values = ", ".join(f"{incoming}.c{n}" for n, _ in columns)
    return (
        f"merge into {layout.name.sql} as {target} using ({rows}) as {incoming} on {key_condition} when "
        f"matched then update set {assignments} when not matched then insert ({layout.columns_sql}) values "
        f"({values})"
    )


def _on_conflict_statement(layout: Layout, rows: str) -> str:
    """Return an INSERT … ON CONFLICT, which both databases support and which tolerates concurrent writers."""
    assignments = ", ".join(
        f"{column.sql} = excluded.{column.sql}" for column in layout.columns if not column.key
    )
    action = f"do update set {assignments}" if assignments else "do nothing"
    insert_into = f"insert into {layout.name.sql} ({layout.columns_sql})"
    return f"{insert_into} {rows} on conflict ({layout.keys_sql}) {action}"


def _first_repeated_key(tx: Transaction, layout: Layout, rows: str) -> str | None:
    """Return a key that several rows have; None if all keys are distinct."""
    keys = ", ".join(layout.staged_keys)
    repeated = tx.query(f"select {keys} from {rows} group by {keys} having count(*) > 1 limit 1")
    return layout.shown_key(repeated[0]) if repeated else None


def _try_statement(tx: Transaction, statement: str, expected: Callable[[Exception], bool]) -> int | Exception:
    """Execute a statement in a savepoint; return the number of changed rows, or an expected error."""
    tx.execute("savepoint merging")
    try:
        changed_rows = tx.change(statement)
    except Exception as error:
        if not expected(error):
            raise
        tx.execute("rollback to savepoint merging")
        return error
    tx.execute("release savepoint merging")
    return changed_rows


def _is_repeated_or_concurrent_key(error: Exception) -> bool:
    """Whether keys are repeated, or a concurrent transaction inserted one of them."""
    return getattr(error, "sqlstate", None) in (_CARDINALITY_VIOLATION, _UNIQUE_VIOLATION)


def _require_count(written: int, source: StagedRows) -> int:
    """Refuse to write fewer rows than were staged: a server crash empties an unlogged table."""
    if source.rows is not None and written != source.rows:
        raise StagingLost(
            f"{source.rows} rows were staged and {written} are left: the server lost them in a crash, or "
            "they were cleaned up. Nothing of the batch is visible: restart the query, it repeats the "
            "micro-batch"
        )
    return written


def _is_key_violation(error: Exception) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION or name in (
        "SQLITE_CONSTRAINT_UNIQUE",
        "SQLITE_CONSTRAINT_PRIMARYKEY",
        "SQLITE_CONSTRAINT_ROWID",
    )


def _key_violation_error(
    tx: Transaction, layout: Layout, source: StagedRows, error: Exception
) -> TableRefusedError:
    rows = f"{source.relation} where {source.where}"
    repeated = _first_repeated_key(tx, layout, rows) if layout.keys else None
    if repeated is not None:
        return TableRefusedError(
            f"a micro-batch has several rows with the key {repeated} for {layout.name.sql}: use output mode "
            "update with one row for each key, or leave the keys out",
            condition="TABLE_REFUSED.DUPLICATE_KEYS",
            key=repeated,
        )
    detail = getattr(getattr(error, "diag", None), "message_detail", None) or str(error)
    return TableRefusedError(
        f"{layout.name.sql} already has a row with the key of a new one ({brief(detail)}), and output mode "
        "append only adds rows: use output mode update, or leave the keys out",
        condition="TABLE_REFUSED.KEY_EXISTS",
    )
