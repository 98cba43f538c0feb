"""Rows of a table that are read with a query instead of from the log, with the types of a feed."""

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


def lock_table(server: Server, connection: Connection, table: Table) -> None:
    """Lock a table in a transaction, and refuse an object that has replaced it, such as a view.

    The functions of a view would run with the privileges of its reader. An older snapshot of the catalog in
    the transaction does not show such a replacement.
    """
    # PREPARE locks the table without needing a privilege for LOCK, and runs nothing.
    connection.execute(f"PREPARE penstock_hold AS SELECT FROM {source_of(table)}".encode())
    connection.execute("DEALLOCATE penstock_hold")
    oid, partitioned = table.relation.oid, table.partitioned
    (current,) = run(connection, "is_table", name=qualified(table), oid=oid, partitioned=partitioned)
    if not current.same:
        raise server.unavailable(
            "TABLE_RECREATED",
            f"{table.relation.name} was dropped, replaced or rewritten while it was being read: start again",
            table=table.relation.name,
        )


def require_trusted_functions(server: Server, tables: Sequence[Table], trusted: Sequence[str]) -> None:
    """Refuse tables whose indexes, statistics or partition keys use objects of an untrusted role.

    Planning a query on such a table could run the functions of the role. The catalog is read in another
    session: in a transaction with an older snapshot, a query sees the catalog of that snapshot, but is
    planned with objects that were added since.
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
        f"{in_quotes(owner)}, which could run code with the privileges of the role {in_quotes(foreign.role)} "
        f"when {table} is copied. Read other tables with tables=[…]{drop}, or trust the role with "
        f"trusted_owners={[owner]}",
        table=table,
        function=foreign.used,
        owner=owner,
    )


def texts_of(parts: Iterable[bytes | memoryview], names: Sequence[str]) -> pa.Table:
    """Parse the output of a COPY with `TO_CSV` into a table of texts, without copying values."""
    data = b"".join(parts)
    schema = pa.schema([(name, pa.string()) for name in names])
    if not data:
        return schema.empty_table()
    numbers = [str(number) for number in range(len(names))]
    rows = pacsv.read_csv(
        pa.BufferReader(data),
        # Use a single block, because a row may have any size.
        pacsv.ReadOptions(column_names=numbers, block_size=len(data) + 1, use_threads=False),
        pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        pacsv.ConvertOptions(
            column_types=dict.fromkeys(numbers, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            # Empty text is quoted, and NULL is not.
            quoted_strings_can_be_null=False,
        ),
    )
    return rows.rename_columns(list(names))


def typed(server: Server, table: Table, texts: pa.Table, *, invalid_as_null: bool) -> pa.Table:
    """Convert rows from text to the types of a feed.

    With ``invalid_as_null``, values that a type cannot represent become NULL, as for ``invalid_values``.
    """
    fields = {field.name: field for field in table.fields()}
    arrays = []
    for name in texts.column_names:
        field, text = fields[name], _one_array(texts[name])
        try:
            arrays.append(from_text(text, field.type))
        except pa.ArrowInvalid:
            arrays.append(_without_invalid(server, table, field, text, invalid_as_null))
    return pa.table(arrays, schema=pa.schema([fields[name] for name in texts.column_names]))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
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
    """Return the error for values that the type of their column cannot represent."""
    value = invalid[0].as_py()[:100] if len(invalid) else "an unknown value"
    return server.unavailable(
        "VALUE",
        f"{table.name} has {field.name} = {value!r}, which {field.type} cannot represent. Read the column "
        f"as text with types={{{field.name!r}: 'text'}}; or replace the value with NULL with "
        "invalid_values='null'",
        table=table.name,
        column=field.name,
    )
