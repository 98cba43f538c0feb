"""Rows of a table, read with a query rather than from the log, with the types that a feed gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from penstock.arguments import in_quotes
from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres.catalog import Table
from penstock.feeds.postgres.row_messages import qualified, source_of
from penstock.feeds.postgres.server import Connection, Server, run
from penstock.feeds.postgres.values import fits_type, from_text
from penstock.store.postgres.trusted_owners import ALWAYS_TRUSTED

TO_CSV = "(FORMAT csv, ENCODING 'UTF8')"
"""The options of a COPY for `texts_of`."""


def hold(server: Server, connection: Connection, table: Table) -> None:
    """Lock a table in a transaction, and refuse what has taken its place: a view's functions run with its
    reader's rights.

    A transaction with an older snapshot of the catalog does not show it yet.
    """
    # Analysing a query locks its table, for which no privilege is needed, and runs nothing.
    connection.execute(f"PREPARE penstock_hold AS SELECT FROM {source_of(table)}".encode())
    connection.execute("DEALLOCATE penstock_hold")
    oid, partitioned = table.relation.oid, table.partitioned
    (held,) = run(connection, "is_table", name=qualified(table), oid=oid, partitioned=partitioned)
    if not held.same:
        raise server.unavailable(
            "TABLE_RECREATED",
            f"{table.relation.name} was dropped, replaced or rewritten while it was read: start again",
            table=table.relation.name,
        )


def require_trusted_functions(server: Server, tables: Sequence[Table], trusted: Sequence[str]) -> None:
    """Refuse tables whose indexes, statistics or partition keys use what an untrusted role owns.

    Planning a query on them would run it. The catalog is read in another session: a query in a transaction
    with an older snapshot sees it as it was then, but is planned with what was added since.
    """
    names = {table.relation.oid: table.relation.name for table in tables}
    all_trusted = [*ALWAYS_TRUSTED, *trusted]
    foreign = next(iter(server.fetch("foreign_functions", oids=list(names), trusted=all_trusted)), None)
    if foreign is None:
        return
    table, kind, owner = names[foreign.oid], foreign.object_type, foreign.owner
    drop = "" if kind == "table" else f", drop the {kind}"
    raise server.unavailable(
        "FUNCTION_OWNER",
        f"the {kind} {foreign.object} uses the {foreign.used_type} {foreign.used} of the role "
        f"{in_quotes(owner)}, which could run code with the rights of the role {in_quotes(foreign.role)} "
        f"when {table} is copied. Read other tables with tables=[…]{drop}, or trust the role with "
        f"trusted_owners={[owner]}",
        table=table,
        function=foreign.used,
        owner=owner,
    )


def texts_of(parts: Iterable[bytes | memoryview], names: Sequence[str]) -> pa.Table:
    """Return the output of a COPY with `TO_CSV`: each value as PostgreSQL's text, without copies of it."""
    data = b"".join(parts)
    schema = pa.schema([(name, pa.string()) for name in names])
    if not data:
        return schema.empty_table()
    numbers = [str(number) for number in range(len(names))]
    rows = pacsv.read_csv(
        pa.BufferReader(data),
        # In one block, since a row may have any size.
        pacsv.ReadOptions(column_names=numbers, block_size=len(data) + 1, use_threads=False),
        pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        pacsv.ConvertOptions(
            column_types=dict.fromkeys(numbers, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            # An empty text is in quotes, and NULL is not.
            quoted_strings_can_be_null=False,
        ),
    )
    return rows.rename_columns(list(names))


def typed(server: Server, table: Table, texts: pa.Table, *, invalid_as_null: bool) -> pa.Table:
    """Convert rows from their text form to the types that a feed gives them.

    ``invalid_as_null`` says whether values that a type cannot hold become NULL, as for ``invalid_values``.
    """
    fields = {field.name: field for field in table.fields()}
    arrays = []
    for name in texts.column_names:
        field, text = fields[name], _whole(texts[name])
        try:
            arrays.append(from_text(text, field.type))
        except pa.ArrowInvalid:
            arrays.append(_without_invalid(server, table, field, text, invalid_as_null))
    return pa.table(arrays, schema=pa.schema([fields[name] for name in texts.column_names]))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _without_invalid(
    server: Server, table: Table, field: pa.Field, text: pa.StringArray, invalid_as_null: bool
) -> pa.Array:
    valid = pc.fill_null(fits_type(text, field.type), True)
    if not invalid_as_null or not field.nullable or pc.all(valid).as_py():
        raise invalid_value(server, table, field, text.filter(pc.invert(valid)))
    return from_text(pc.if_else(valid, text, pa.scalar(None, pa.string())), field.type)


def invalid_value(
    server: Server, table: Table, field: pa.Field, invalid: pa.StringArray
) -> FeedUnavailableError:
    """Return the error for values that the type of their column cannot hold."""
    value = invalid[0].as_py()[:100] if len(invalid) else "an unknown value"
    return server.unavailable(
        "VALUE",
        f"{table.name} has {field.name} = {value!r}, which {field.type} cannot hold. Read the column as "
        f"text, types={{{field.name!r}: 'text'}}; or replace the value with NULL, invalid_values='null'",
        table=table.name,
        column=field.name,
    )
