"""The named SQL of the store: `sql/common.sql` plus one file for what a database says differently."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
_BINARY = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)(?=::bytea\[\])")
_CREATED = re.compile(r"create (?:table|sequence|index) (?:penstock\.)?(\w+)")
_SCHEMA = re.compile(r"('?)\bpenstock\.(sqlite_)?")


def parse(text: str) -> dict[str, str]:
    """Split a file of ``-- name:`` sections into statements without their comments."""
    parts = _NAME.split(text)[1:]
    return {
        name: _COMMENT.sub("", body).strip().rstrip(";")
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read(folder: str, file: str) -> str:
    return resources.files("penstock.store").joinpath(folder, file).read_text(encoding="utf-8")


@cache
def statements(dialect: str, schema: str) -> dict[str, str]:
    """All statements of a dialect, by name; ``schema`` is the quoted name of the schema of the store's
    tables.
    """
    quoted = schema if dialect == "sqlite" else schema.replace("%", "%%")
    return {name: qualify(text, dialect, quoted) for name, text in _bound(dialect).items()}


@cache
def _bound(dialect: str) -> dict[str, str]:
    found = parse(read("sql", "common.sql")) | parse(read("sql", f"{dialect}.sql"))
    return {name: bind(text, dialect) for name, text in found.items()}


def qualify(text: str, dialect: str, schema: str) -> str:
    """Put the schema in the place of ``penstock``.

    A SQLite store may share its file with other tables, where there are no schemas to keep them apart: its
    own have names that begin with ``penstock_``.
    """
    if dialect == "sqlite":
        return _SCHEMA.sub(lambda found: f"{schema}.{found[2] or 'penstock_'}", text)
    in_literal = schema.replace("'", "''")
    return _SCHEMA.sub(lambda found: f"'{in_literal}." if found[1] else f"{schema}.", text)


def bind(text: str, dialect: str) -> str:
    if dialect == "sqlite":
        return text
    # As text a binary value would be twice as long.
    text = _BINARY.sub(r"%(\1)b", text.replace("%", "%%"))
    return _PARAMETER.sub(r"%(\1)s", text)


def create_statements(dialect: str, schema: str) -> list[str]:
    """The statements that create a store's tables; for PostgreSQL as one text, in one round trip."""
    script = qualify(_COMMENT.sub("", read("sql", f"{dialect}_schema.sql")), dialect, schema)
    return [part for part in script.split(";") if part.strip()] if dialect == "sqlite" else [script]


@cache
def own_relations() -> frozenset[str]:
    """The names of a PostgreSQL store's tables, sequences and indexes."""
    return frozenset(_CREATED.findall(read("sql", "postgres_schema.sql")))
