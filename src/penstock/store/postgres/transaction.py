"""Transaction of a PostgreSQL store: runs the store's statements, and SQL on users' tables."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import StoreUnsafeError
from penstock.store.database import Columns, Row, Transaction, row_constructor
from penstock.store.postgres.connection import copy_rows
from penstock.store.postgres.locks import advisory_halves
from penstock.store.postgres.session import ALLOW_ALL_PLANS, FORCE_INDEX_PLANS_LOCALLY, SEARCH_PATH
from penstock.store.postgres.trusted_owners import ForeignOwner, find_foreign_owner
from penstock.store.statements import bind

if TYPE_CHECKING:
    from psycopg import Cursor

    from penstock.store.postgres.connection import PgConnection

# Sets the search path for the caller's transaction only.
_SET_SEARCH_PATH = b"select pg_catalog.set_config('search_path', %s, true)"
_SET_SAFE_SEARCH_PATH = (
    b"select pg_catalog.current_setting('search_path'), pg_catalog.set_config('search_path', %s, true)"
)
_FIRST_VERSION_WITH_MERGE = 150000


class PostgresTransaction(Transaction):
    dialect = "postgres"

    def __init__(
        self,
        connection: PgConnection,
        schema: str,
        *,
        write: bool = True,
        plans_forced: bool = False,
        trusted: Sequence[str] = (),
    ) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        from penstock.store.postgres.arrays import Int8ArrayDumper

        super().__init__(schema, write=write)
        # Do not use connection.cursor(): a caller's connection may have another kind of cursor.
        self._cursor: Cursor[Any] = Cursor(connection, row_factory=_row_factory)
        self._tuple_cursor: Cursor[Any] = Cursor(connection, row_factory=tuple_row)
        if not plans_forced:
            # A caller's connection has no dumper for arrays.
            self._cursor.adapters.register_dumper(array, Int8ArrayDumper)
        self._plans_forced = plans_forced
        self._trusted_roles = trusted
        """Roles that the user trusts to own the tables."""
        self.has_merge = connection.info.server_version >= _FIRST_VERSION_WITH_MERGE

    def begin(self, text: bytes) -> None:
        self._cursor.execute(text, prepare=False)

    def run(self, name: str, /, **parameters: object) -> int:
        return self._cursor.execute(self._statements[name], parameters).rowcount

    def all(self, name: str, /, **parameters: object) -> list[Row]:
        return self._cursor.execute(self._statements[name], parameters, binary=True).fetchall()

    def tuples(self, name: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        return self._tuple_cursor.execute(self._statements[name], parameters, binary=True).fetchall()

    def page(self, *, max_bytes: int, **parameters: object) -> list[Row]:
        return self.all("read_page", max_bytes=max_bytes, **parameters)

    def run_many(self, name: str, rows: Columns, /, **common: object) -> int:
        prepared = _with_parameters(name, rows)
        return 0 if prepared is None else self.run(prepared[0], **prepared[1], **common)

    def all_for_many(self, name: str, rows: Columns, /, **common: object) -> list[Row]:
        prepared = _with_parameters(name, rows)
        return [] if prepared is None else self.all(prepared[0], **prepared[1], **common)

    def execute(self, text: str) -> None:
        self._cursor.execute(text.encode())

    def change(self, text: str) -> int:
        if not self._plans_forced:
            return self._cursor.execute(text.encode()).rowcount
        # Statements on users' tables may read whole tables and join them.
        self._cursor.execute(ALLOW_ALL_PLANS.encode())
        row_count = self._cursor.execute(text.encode()).rowcount
        self._cursor.execute(FORCE_INDEX_PLANS_LOCALLY.encode())
        return row_count

    def query(self, text: str, /, **parameters: object) -> list[tuple[Any, ...]]:
        if parameters:
            return self._tuple_cursor.execute(bind(text, self.dialect).encode(), parameters).fetchall()
        return self._tuple_cursor.execute(text.encode()).fetchall()

    def foreign_owner(
        self, schema: str, relations: Sequence[str], *, with_schema: bool
    ) -> ForeignOwner | None:
        """Return an owner of a schema, or of a relation in it, that the session's role does not trust; None
        if there is none.
        """
        return find_foreign_owner(
            self._first_row, schema, relations, trusted=self._trusted_roles, with_schema=with_schema
        )

    def _first_row(self, text: str, **parameters: object) -> tuple[Any, ...] | None:
        return next(iter(self.query(text, **parameters)), None)

    def require_trusted_owner(self, schema: str, relation: str) -> None:
        foreign = self.foreign_owner(schema, [relation], with_schema=False)
        if foreign is not None:
            raise StoreUnsafeError(
                f"the table {foreign}. Drop it, use another one, or add {foreign.option} to the store's URL "
                "to trust that role",
                condition="STORE_UNSAFE.TABLE_OWNER",
                table=foreign.what,
                owner=foreign.owner,
                role=foreign.role,
            )

    def lock_table(self, schema: str, table: str) -> None:
        # Lock before checking: the schema's owner could replace the table while a statement waits for the
        # lock.
        name = ".".join('"' + part.replace('"', '""') + '"' for part in (schema, table))
        self.execute(f"lock table only {name} in row exclusive mode")
        self.require_trusted_owner(schema, table)

    def default_schema(self) -> str | None:
        # The search path of the role, the database or the URL determines the schema.
        self._tuple_cursor.execute("set local search_path to default")
        row = self._tuple_cursor.execute("select pg_catalog.current_schema()").fetchone()
        self._tuple_cursor.execute(f"set local search_path to {SEARCH_PATH}".encode())
        return row[0] if row else None

    def set_safe_search_path(self) -> str:
        """Set the search path that the store's sessions use; return the previous one."""
        row = self._tuple_cursor.execute(_SET_SAFE_SEARCH_PATH, (SEARCH_PATH,)).fetchone()
        assert row is not None
        return str(row[0])

    def set_search_path(self, path: str) -> None:
        """Set the search path."""
        self._tuple_cursor.execute(_SET_SEARCH_PATH, (path,))

    def load(self, text: str, data: Iterable[Any]) -> None:
        with self._cursor.copy(text.encode()) as copy:
            for buffer in data:
                copy.write(buffer)

    def copy_out(self, text: str) -> Iterator[bytes | memoryview]:
        """Yield the data that a ``copy … to stdout`` sends. The caller must read all of it."""
        return copy_rows(self._cursor.connection, text)

    def now(self) -> int:
        return int(self.one("clock").now)

    def instance(self) -> str:
        # The value differs in each copy that was made by a dump, by logical replication or from a template. A
        # copy of the server's files has the same value. Some roles may not read the server's identifier.
        system = self.one("identify_system").system if self.one("may_identify_system").may else ""
        table = self.one("identify_table")
        return f"{system}/{table.number}/{table.database}"

    def write_time(self) -> None:
        return None

    def owner_alive(self, name: str) -> bool:
        return bool(self.owners_alive([name]))

    def owners_alive(self, names: Iterable[str]) -> set[str]:
        return self.owners_held_by_others(names, None)

    def owners_held_by_others(self, names: Iterable[str], pid: int | None) -> set[str]:
        """Return the owner locks among ``names`` that a session other than ``pid`` holds."""
        halves = {name: advisory_halves(name) for name in names}
        if not halves:
            return set()
        high, low = ([half[position] for half in halves.values()] for position in (0, 1))
        rows = self.all(
            "advisory_holders", high=_array_parameter(high), low=_array_parameter(low), but_for=pid
        )
        held = {(row.high, row.low) for row in rows}
        return {name for name, half in halves.items() if half in held}


def _row_factory(cursor: Any) -> Callable[[Sequence[Any]], Row]:
    """Return a function that converts the tuples of a cursor's result, if it has one, to rows."""
    columns = cursor.description or ()
    return row_constructor(tuple(column.name for column in columns))


def _with_parameters(name: str, rows: Columns) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the statement for one row or for many, and its parameters; None if there are no
    rows.
    """
    count = len(next(iter(rows.values())))
    if count == 1:
        return name, {column: values[0] for column, values in rows.items()}
    return (
        (f"{name}_all", {column: _array_parameter(values) for column, values in rows.items()})
        if count
        else None
    )


def _array_parameter(values: Sequence[Any]) -> Any:
    """Convert values to an array parameter. Otherwise the driver would choose the type by the largest
    number.
    """
    if not isinstance(values[0], int):
        return values
    try:
        return array("q", values)
    except OverflowError as error:
        from psycopg.errors import NumericValueOutOfRange

        raise NumericValueOutOfRange("bigint out of range") from error
