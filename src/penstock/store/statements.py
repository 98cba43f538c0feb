"""The store's named SQL statements: `sql/common.sql`, and a file per database for those that differ."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
_BINARY_PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)(?=::bytea\[\])")
_CREATED_RELATION = re.compile(r"create (?:table|sequence|index) (?:penstock\.)?(\w+)")
_SCHEMA = re.compile(r"('?)\bpenstock\.(sqlite_)?")


def parse(text: str) -> dict[str, str]:
    """Split a file of ``-- name:`` sections into statements without their comments."""
    parts = _NAME.split(text)[1:]
    return {
        name: _COMMENT.sub("", body).strip().rstrip(";")
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read_resource(folder: str, file: str) -> str:
    return resources.files("penstock.store").joinpath(folder, file).read_text(encoding="utf-8")


@cache
def statements(dialect: str, schema: str) -> dict[str, str]:
    """Return all statements of a dialect by name; ``schema`` is the quoted name of the store's schema."""
    quoted = schema if dialect == "sqlite" else schema.replace("%", "%%")
    return {name: qualify(text, dialect, quoted) for name, text in _dialect_statements(dialect).items()}


@cache
def _dialect_statements(dialect: str) -> dict[str, str]:
    texts = parse(read_resource("sql", "common.sql")) | parse(read_resource("sql", f"{dialect}.sql"))
    return {name: bind(text, dialect) for name, text in texts.items()}


def qualify(text: str, dialect: str, schema: str) -> str:
    """Replace ``penstock`` with the schema.

    A SQLite store may share its file with other tables, and SQLite has no schemas to separate them, so the
    names of the store's tables begin with ``penstock_``.
    """
    if dialect == "sqlite":
        return _SCHEMA.sub(lambda match: f"{schema}.{match[2] or 'penstock_'}", text)
    in_literal = schema.replace("'", "''")
    return _SCHEMA.sub(lambda match: f"'{in_literal}." if match[1] else f"{schema}.", text)


def bind(text: str, dialect: str) -> str:
    if dialect == "sqlite":
        return text
    # As text, a binary value would take twice as many bytes.
    text = _BINARY_PARAMETER.sub(r"%(\1)b", text.replace("%", "%%"))
    return _PARAMETER.sub(r"%(\1)s", text)


def create_statements(dialect: str, schema: str) -> list[str]:
    """Return the statements that create a store's tables. For PostgreSQL they are one text, sent in one round
    trip.
    """
    script = qualify(_COMMENT.sub("", read_resource("sql", f"{dialect}_schema.sql")), dialect, schema)
    return [part for part in script.split(";") if part.strip()] if dialect == "sqlite" else [script]


@cache
def store_relations() -> frozenset[str]:
    """Return the names of a PostgreSQL store's tables, sequences and indexes."""
    return frozenset(_CREATED_RELATION.findall(read_resource("sql", "postgres_schema.sql")))
