"""The schema's version."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.errors import StoreNotFound, StoreTooNew
from penstock.store import statements, store_schema
from penstock.store.database import Database
from penstock.store.postgres.database import PostgresDatabase
from penstock.store.statements import qualify
from penstock.store.url import parse_url
from tests.store.support import described, run_sql

NEXT = {
    "sqlite": "alter table penstock.consumer add column remark text;\n-- why\ncreate table penstock.later (n integer) strict;",
    "postgres": "alter table penstock.consumer add column remark text;\n-- why\ncreate table penstock.later (n bigint);",
}


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> int:
    """As if there were one more migration."""
    version = store_schema.VERSION + 1
    real = statements.migrations

    def with_one_more(dialect: str) -> dict[int, str]:
        return real(dialect) | {version: NEXT[dialect]}

    monkeypatch.setattr(store_schema, "migrations", with_one_more)
    monkeypatch.setattr(store_schema, "VERSION", version)
    return version


def test_the_version_is_that_of_the_last_migration_and_both_databases_have_the_same_ones() -> None:
    found = [list(statements.migrations(dialect)) for dialect in ("sqlite", "postgres")]
    assert found[0] == found[1] == list(range(1, store_schema.VERSION + 1))


def test_a_script_is_cut_where_a_statement_ends_and_not_inside_one() -> None:
    script = (
        "-- why; and what for\ncreate table a (n int);\ninsert into a values ('x;y');\n"
        "create trigger t before insert on a when new.n > 1\nbegin\n    select raise(abort, 'no; never');\nend;\n"
        "alter table a add column m int;\n"
    )
    found = [" ".join(statement.split()) for statement in store_schema._statements(script)]
    assert found == [
        "create table a (n int);",
        "insert into a values ('x;y');",
        "create trigger t before insert on a when new.n > 1 begin select raise(abort, 'no; never'); end;",
        "alter table a add column m int;",
    ]


def test_a_migrated_store_equals_a_fresh_one(
    store_url: str, tmp_path, request: pytest.FixtureRequest
) -> None:
    with penstock.connect(store_url) as old:
        old.create_queue("kept", _schema()).append([{"n": 1}])
        uuid = old.uuid
    request.getfixturevalue("next_version")
    with penstock.connect(store_url) as migrated:
        assert migrated.info().version == store_schema.VERSION
        assert migrated.uuid == uuid
        assert migrated.queue("kept").read(0, 0).to_pylist() == [{"n": 1}]
        ours = described(migrated.database)
    other = store_url.replace("penstock.db", "fresh.db").replace("schema=t_", "schema=f_")
    with penstock.connect(other) as fresh:
        assert described(fresh.database) == ours
        if fresh.database.dialect == "postgres":
            run_sql(fresh.database, f"drop schema {fresh.database.url.schema} cascade")


def test_a_store_of_a_newer_version_is_refused_and_left_alone(store_url: str) -> None:
    with penstock.connect(store_url) as store:
        _set_version(store.database, store_schema.VERSION + 1)
        before = described(store.database)
        for create in (True, False):
            with pytest.raises(StoreTooNew, match="upgrade Penstock") as caught:
                penstock.connect(store_url, create=create)
            assert caught.value.parameters == {
                "found": store_schema.VERSION + 1,
                "known": store_schema.VERSION,
            }
        assert described(store.database) == before
        assert _versions(store.database) == [store_schema.VERSION + 1]


def test_a_migration_that_fails_leaves_nothing_half_done(
    store_url: str, next_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_schema, "VERSION", next_version - 1)
    with penstock.connect(store_url) as store:
        before = described(store.database)
        _set_version(store.database, next_version - 1)
    monkeypatch.setattr(store_schema, "VERSION", next_version)
    broken = statements.migrations(store.database.dialect) | {
        next_version: "create table penstock.half (n int);\nselect nonsense;"
    }
    monkeypatch.setattr(store_schema, "migrations", lambda dialect: broken)
    with pytest.raises(penstock.PenstockError):
        penstock.connect(store_url)
    monkeypatch.undo()
    with penstock.connect(store_url) as store:
        assert "half" not in str(described(store.database))
        assert "half" not in str(before)


def test_a_store_is_not_made_where_that_is_not_wanted(store_url: str, tmp_path) -> None:
    with pytest.raises(StoreNotFound, match="penstock store init"):
        penstock.connect(store_url, create=False)
    assert list(tmp_path.iterdir()) == []


def test_the_advice_where_no_store_is_has_no_password() -> None:
    url = parse_url("postgresql://app:hunter22@db/shop?schema=a&sslmode=prefer")
    assert str(store_schema._missing(PostgresDatabase(url))) == (
        "[STORE_NOT_FOUND] there is no store at postgresql://app@db/shop?schema=a&sslmode=prefer: make one with "
        "`penstock store init --url 'postgresql://app@db/shop?schema=a&sslmode=prefer'`, with its password in the URL"
    )


def test_a_database_of_something_else_is_no_store_and_stays_as_it_is(tmp_path) -> None:
    import sqlite3

    path = tmp_path / "app.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table store (n integer)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreNotFound):
        penstock.connect(f"sqlite:///{path}", create=False)
    assert path.read_bytes() == before
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreNotFound):
        penstock.connect(f"sqlite:///{tmp_path}/empty.db", create=False)


def test_a_store_lives_beside_the_tables_of_an_application(tmp_path) -> None:
    import sqlite3

    connection = sqlite3.connect(tmp_path / "app.db")
    for table in ("store", "queue", "partition", "segment", "consumer", "position", "ledger"):
        connection.execute(f"create table {table} (n integer)")
    connection.close()
    with penstock.connect(f"sqlite:///{tmp_path}/app.db") as store:
        queue = store.create_queue("q", _schema())
        queue.append([{"n": 5}])
        assert queue.read(0, 0).to_pylist() == [{"n": 5}]


def test_a_copy_of_a_store_that_lost_the_write_ahead_log_gets_it_back(tmp_path) -> None:
    with penstock.connect(f"sqlite:///{tmp_path}/a.db") as store:
        store.create_queue("q", _schema()).append([{"n": 5}])
        run_sql(store.database, f"vacuum into '{tmp_path}/b.db'", transaction=False)
    with penstock.connect(f"sqlite:///{tmp_path}/b.db", create=False) as copy:
        assert run_sql(copy.database, "pragma journal_mode") == [("wal",)]
        assert copy.queue("q").read(0, 0).to_pylist() == [{"n": 5}]


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("n", pa.int64())])


def _set_version(database: Database, version: int) -> None:
    database.run(lambda tx: tx.run("set_version", version=version))


def _versions(database: Database) -> list[int]:
    text = qualify("select version from penstock.store", database.dialect, database.url.schema)
    return [row[0] for row in run_sql(database, text)]
