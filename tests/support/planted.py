"""What a stranger can make in a schema that others may write to.

They are operators and functions that fit better than PostgreSQL's own. PostgreSQL picks an operator or a
function by the types of its arguments first, and by the schema's place on the search path only where the
types are the same. So whoever looks names up in such a schema calls these.
"""

from __future__ import annotations

from itertools import product

import psycopg

_TYPES = (
    "smallint", "integer", "bigint", "numeric", "real", "double precision", "text", "varchar", "name", "oid",
    "regclass", "regtype", "bytea", "boolean", "timestamptz", "interval", '"char"', "pg_lsn",
)  # fmt: skip
_COMPARING = "=", "<>", "<", "<=", ">", ">=", "~~", "!~~"
_COMPUTING = "+", "-", "*", "/", "||", "&", ">>"
_FUNCTIONS = {
    "unnest(bigint[])": "setof bigint",
    "unnest(integer[])": "setof integer",
    "unnest(text[])": "setof text",
    "cardinality(integer[])": "integer",
    "starts_with(name, text)": "boolean",
    "concat(text)": "text",
    "concat(integer)": "text",
    "concat(bigint)": "text",
    "to_jsonb(pg_catalog.pg_publication_tables)": "jsonb",
    "to_jsonb(pg_catalog.pg_replication_slots)": "jsonb",
}
_KNOWN = (
    "select oprname, oprleft::regtype::oid, oprright::regtype::oid from pg_operator "
    "where oprnamespace = 'pg_catalog'::regnamespace"
)


def plant(url: str, *schemas: str) -> None:
    """Make them in some schemas; each raises an error that says that it was called."""
    with psycopg.connect(url, autocommit=True) as connection:
        known = set(connection.execute(_KNOWN).fetchall())
        oids = [connection.execute(f"select '{kind}'::regtype::oid".encode()).fetchone() for kind in _TYPES]
        numbered = [(kind, row[0]) for kind, row in zip(_TYPES, oids, strict=True) if row]
        new = [
            (operator, left, right)
            for operator in (*_COMPARING, *_COMPUTING)
            for (left, left_oid), (right, right_oid) in product(numbered, numbered)
            if (operator, left_oid, right_oid) not in known
        ]
        for schema in schemas:
            connection.execute(f"create schema if not exists {schema}".encode())
            made = [_operator(schema, *each) for each in new]
            made += [_function(schema, called, given) for called, given in _FUNCTIONS.items()]
            made.append(
                f"create aggregate {schema}.array_agg (name) "
                "(sfunc = array_append, stype = name[], initcond = '{planted}')"
            )
            connection.execute(";".join(made).encode())


def _operator(schema: str, operator: str, left: str, right: str) -> str:
    given = "boolean" if operator in _COMPARING else left
    function = f'{schema}."trap {operator}"'
    return (
        f"create function {function}({left}, {right}) returns {given} language plpgsql as "
        f"$trap$ begin raise exception 'the planted operator {left} {operator} {right} was called'; "
        "end $trap$; "
        f"create operator {schema}.{operator} (leftarg = {left}, rightarg = {right}, function = {function})"
    )


def _function(schema: str, called: str, given: str) -> str:
    return (
        f"create function {schema}.{called} returns {given} language plpgsql as "
        f"$trap$ begin raise exception 'the planted function {called} was called'; end $trap$"
    )
