"""Malicious operators and functions in a schema that other users may write to.

They match the types of arguments better than PostgreSQL's own. PostgreSQL selects an operator or a function
by the types of its arguments, and by the order of the search path only among equal types. So a statement that
searches such a schema calls them.
"""

from __future__ import annotations

from itertools import product

import psycopg

_TYPES = (
    "smallint", "integer", "bigint", "numeric", "real", "double precision", "text", "varchar", "name", "oid",
    "regclass", "regtype", "bytea", "boolean", "timestamptz", "interval", '"char"', "pg_lsn",
)  # fmt: skip
_COMPARISONS = "=", "<>", "<", "<=", ">", ">=", "~~", "!~~"
_ARITHMETIC = "+", "-", "*", "/", "||", "&", ">>"
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
    """Create them in some schemas. Each one raises an error that names it."""
    with psycopg.connect(url, autocommit=True) as connection:
        known = set(connection.execute(_KNOWN).fetchall())
        oids = [connection.execute(f"select '{kind}'::regtype::oid".encode()).fetchone() for kind in _TYPES]
        numbered = [(kind, row[0]) for kind, row in zip(_TYPES, oids, strict=True) if row]
        new = [
            (operator, left, right)
            for operator in (*_COMPARISONS, *_ARITHMETIC)
            for (left, left_oid), (right, right_oid) in product(numbered, numbered)
            if (operator, left_oid, right_oid) not in known
        ]
        for schema in schemas:
            connection.execute(f"create schema if not exists {schema}".encode())
            statements = [_operator(schema, *signature) for signature in new]
            statements += [
                _function(schema, function_signature, result_type)
                for function_signature, result_type in _FUNCTIONS.items()
            ]
            statements.append(
                f"create aggregate {schema}.array_agg (name) "
                "(sfunc = array_append, stype = name[], initcond = '{planted}')"
            )
            connection.execute(";".join(statements).encode())


def _operator(schema: str, operator: str, left: str, right: str) -> str:
    result_type = "boolean" if operator in _COMPARISONS else left
    function = f'{schema}."trap {operator}"'
    return (
        f"create function {function}({left}, {right}) returns {result_type} language plpgsql as "
        f"$trap$ begin raise exception 'the planted operator {left} {operator} {right} was called'; "
        "end $trap$; "
        f"create operator {schema}.{operator} (leftarg = {left}, rightarg = {right}, function = {function})"
    )


def _function(schema: str, signature: str, result_type: str) -> str:
    return (
        f"create function {schema}.{signature} returns {result_type} language plpgsql as "
        f"$trap$ begin raise exception 'the planted function {signature} was called'; end $trap$"
    )
