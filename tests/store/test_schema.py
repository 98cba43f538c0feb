"""The store's tables are created completely or not at all, and stores of any other version are refused."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

import penstock
from penstock.errors import StoreError, StoreNotFoundError, StoreTooNewError
from penstock.store import store_schema
from penstock.store.database import Database
from penstock.store.postgres.database import PostgresDatabase
from penstock.store.statements import create_statements, qualify, read_resource
from penstock.store.store_schema import VERSION, open_database
from penstock.store.url import parse_url
from tests.support.raw_sql import describe_schema, run_sql

SCHEMA = pa.schema([("n", pa.int64())])


def test_both_databases_have_the_same_columns_and_keys() -> None:
    sqlite, postgres = _tables("sqlite"), _tables("postgres")
    sqlite["store"].remove("next_block")
    assert sqlite == postgres
    assert len(sqlite) == 24


def _tables(dialect: str) -> dict[str, list[str]]:
    """Return the columns of each table, and the columns of its keys."""
    found = {}
    for table, body in re.findall(
        r"create table penstock\.(\w+) \(\n(.*?)\n\)",
        read_resource("sql", f"{dialect}_schema.sql"),
        re.DOTALL,
    ):
        lines = [line.strip().rstrip(",") for line in body.splitlines()]
        found[table] = [line if "key (" in line else line.split()[0] for line in lines]
        found[table] = [re.sub(r"penstock[._]", "", line) for line in found[table]]
    return found


def test_comments_do_not_end_statements() -> None:
    for dialect in ("sqlite", "postgres"):
        statements = create_statements(dialect, "s")
        assert all(statement.split()[0] in ("create", "alter") for statement in statements)
        assert "--" not in "".join(statements)


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_a_store_of_another_version_is_refused_and_left_unchanged(store_url: str, other: int) -> None:
    with penstock.connect(store_url) as store:
        _set_version(store.database, other)
        before = describe_schema(store.database)
        for open_store in (
            lambda: penstock.connect(store_url),
            lambda: penstock.connect(store_url, create=False),
            lambda: open_database(store_url, create=False, keep_journal_mode=True),
        ):
            with pytest.raises(StoreError, match=f"has schema version {other}, and this") as caught:
                open_store()
            assert caught.value.parameters == {"found": other, "known": VERSION}
            if other > VERSION:
                assert isinstance(caught.value, StoreTooNewError)
                assert "upgrade Penstock" in str(caught.value)
            else:
                assert caught.value.condition == "STORE_TOO_OLD"
                assert "use the Penstock that created the store" in str(caught.value)
        assert describe_schema(store.database) == before
        assert _versions(store.database) == [other]


def test_a_failed_creation_leaves_nothing_behind(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        store_schema, "create_statements", lambda *named: [*create_statements(*named), "select nonsense"]
    )
    with pytest.raises(penstock.PenstockError):
        penstock.connect(store_url)
    with pytest.raises(StoreNotFoundError):
        penstock.connect(store_url, create=False)
    monkeypatch.undo()
    with penstock.connect(store_url) as store:
        assert store.create_queue("q", SCHEMA).append([{"n": 1}]).rows == 1


def test_no_store_is_created_with_create_false(store_url: str, tmp_path) -> None:
    with pytest.raises(StoreNotFoundError, match="penstock store init"):
        penstock.connect(store_url, create=False)
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_a_missing_store_has_no_password() -> None:
    url = parse_url("postgresql://app:hunter22@db/shop?schema=a&sslmode=prefer")
    assert str(store_schema.store_not_found(PostgresDatabase(url))) == (
        "[STORE_NOT_FOUND] there is no store at postgresql://app@db/shop?schema=a&sslmode=prefer: create "
        "one with `penstock store init --url 'postgresql://app@db/shop?schema=a&sslmode=prefer'`, with its "
        "password in the URL"
    )


def test_a_database_of_another_program_is_not_a_store_and_stays_unchanged(tmp_path) -> None:
    import sqlite3

    path = tmp_path / "app.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table store (n integer)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreNotFoundError):
        penstock.connect(f"sqlite:///{path}", create=False)
    assert path.read_bytes() == before
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreNotFoundError):
        penstock.connect(f"sqlite:///{tmp_path}/empty.db", create=False)


def test_a_store_can_share_a_database_with_an_application(tmp_path) -> None:
    import sqlite3

    connection = sqlite3.connect(tmp_path / "app.db")
    for table in ("store", "queue", "partition", "segment", "consumer", "position", "ledger"):
        connection.execute(f"create table {table} (n integer)")
    connection.close()
    with penstock.connect(f"sqlite:///{tmp_path}/app.db") as store:
        queue = store.create_queue("q", SCHEMA)
        queue.append([{"n": 5}])
        assert queue.read(0, 0).to_pylist() == [{"n": 5}]


def test_a_store_file_that_lost_wal_mode_is_switched_back(tmp_path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/a.db") as store:
        store.create_queue("q", SCHEMA).append([{"n": 5}])
        run_sql(store.database, f"vacuum into '{tmp_path}/b.db'", transaction=False)
    with penstock.connect(f"sqlite:///{tmp_path}/b.db", create=False) as copy:
        assert run_sql(copy.database, "pragma journal_mode") == [("wal",)]
        assert copy.queue("q").read(0, 0).to_pylist() == [{"n": 5}]


def _set_version(database: Database, version: int) -> None:
    run_sql(
        database,
        qualify(f"update penstock.store set version = {version}", database.dialect, database.url.schema),
    )


def _versions(database: Database) -> list[int]:
    text = qualify("select version from penstock.store", database.dialect, database.url.schema)
    return [row[0] for row in run_sql(database, text)]
