"""Tables that another role has prepared: its triggers would run with the rights of the query's role."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import penstock
from penstock.errors import SchemaMismatchError, StoreUnsafeError, TableRefusedError
from penstock.store.postgres import staging_relations
from penstock.tables.names import TableName, digest
from penstock.tables.row_encoding import database_schema
from penstock.tables.sql import upsert
from penstock.tables.sql.staging import PostgresStage
from penstock.tables.sql.write_task import insert_chunk
from tests.support.strangers import SharedDatabase, shared_database, trap_statements
from tests.support.waiting import wait_until
from tests.tables.change_tables import ChangeTable
from tests.tables.targets import SHAPED, Table

ROWS = StructType().add("k", "string").add("v", "long")
CHANGES = StructType().add("k", "string").add("v", "long").add("_change_type", "string").add(
    "_commit_version", "long"
)  # fmt: skip
MODES = ("append", "update", "complete", "changes")
APPLIED = "key_k text not null, sequence bigint not null, present integer not null, primary key (key_k)"


@pytest.fixture(scope="module")
def database(pg_url: str) -> Iterator[SharedDatabase]:
    with shared_database(pg_url, "app", "other", "stranger") as made:
        yield made


@pytest.fixture
def schema(database: SharedDatabase) -> Iterator[str]:
    """The schema of the app's store, in which the stranger may create relations too."""
    name = f"s_{uuid.uuid4().hex[:8]}"
    database.run(
        f"create schema {name} authorization {database.role('app')}",
        f"grant usage, create on schema {name} to {database.role('stranger')}",
        "drop table if exists public.ran",
    )
    yield name
    database.run(f"drop schema {name} cascade")


@pytest.fixture
def url(database: SharedDatabase, schema: str) -> str:
    return database.as_role("app", f"schema={schema}")


@pytest.fixture
def store(url: str) -> Iterator[penstock.Store]:
    with penstock.connect(url) as made:
        yield made


def prepare(url: str, name: str, mode: str) -> None:
    """Create or check a table as a query does when it starts."""
    applies = mode == "changes"
    sink = penstock.TableSink(name, keys=["k"], url=url, apply_changes=applies)
    sink.prepared(url, CHANGES if applies else ROWS, "append" if applies else mode, ["k"])


def beside_in(schema: str) -> str:
    """The relation beside the table t."""
    return f"{schema}.applied_{digest(TableName(schema, 't').ledger_name)}"


def refused(
    database: SharedDatabase, work: Callable[[], object], what: str, condition: str = "TABLE_OWNER"
) -> None:
    with pytest.raises(StoreUnsafeError) as caught:
        work()
    stranger, app = database.role("stranger"), database.role("app")
    assert caught.value.condition == f"STORE_UNSAFE.{condition}"
    assert f"{what} belongs to the role '{stranger}'" in caught.value.message
    assert f"the rights of the role '{app}'" in caught.value.message
    assert f"owner={stranger}" in caught.value.message
    assert caught.value.parameters["owner"] == stranger
    assert database.trapped() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_a_stranger_has_prepared_is_refused(
    database: SharedDatabase, url: str, schema: str, mode: str
) -> None:
    table = f"{schema}.t"
    database.run(f"create table {table} (k text primary key, v bigint)", role="stranger")
    database.trap("stranger", table)
    refused(database, lambda: prepare(url, table, mode), table)
    prepare(f"{url}&owner=somebody&owner={database.role('stranger')}", table, mode)


@pytest.mark.parametrize("mode", ["append", "update", "changes"])
def test_a_table_of_a_role_that_the_url_names_is_written(
    database: SharedDatabase, url: str, schema: str, mode: str
) -> None:
    """As a table is that another role has created for a query."""
    privileges = "select, insert, update, delete"
    database.run(
        f"create table {schema}.t (k text primary key, v bigint)",
        f"grant {privileges} on {schema}.t to {database.role('app')}",
        role="stranger",
    )
    trusting = f"{url}&owner={database.role('stranger')}"
    with penstock.connect(trusting) as store:
        table = (ChangeTable if mode == "changes" else Table)(store, trusting)
        stage = table.stage()
        row = ("a", 1, 1, 1) if mode == "changes" else ("a", 1)
        table.write(stage, mode, table.put(stage, row))
    assert database.run(f"select * from {schema}.t") == [("a", 1)]


def test_tables_of_roles_that_are_trusted_anyway_are_used(
    database: SharedDatabase, url: str, schema: str
) -> None:
    """The app's own, and an administrator's; not those of a role that the app is a member of."""
    app, stranger = database.role("app"), database.role("stranger")
    for number, owner in enumerate((None, app, stranger)):
        database.run(f"create table {schema}.t{number} (k text primary key, v bigint)")
        if owner is not None:
            database.run(f"alter table {schema}.t{number} owner to {owner}")
    database.run(f"grant {stranger} to {app}")
    try:
        for number in range(2):
            prepare(url, f"{schema}.t{number}", "update")
        refused(database, lambda: prepare(url, f"{schema}.t2", "update"), f"{schema}.t2")
        database.run(f"alter role {stranger} nologin")
        refused(database, lambda: prepare(url, f"{schema}.t2", "update"), f"{schema}.t2")
    finally:
        database.run(f"alter role {stranger} login; revoke {stranger} from {app}")


@pytest.mark.parametrize("new", [True, False], ids=["new table", "old table"])
def test_a_relation_beside_the_table_that_a_stranger_has_prepared_is_refused(
    database: SharedDatabase, store: penstock.Store, url: str, schema: str, new: bool
) -> None:
    table, beside = f"{schema}.t", beside_in(schema)
    if not new:
        database.run(f"create table {table} (k text primary key, v bigint)", role="app")
    database.run(f"create table {beside} ({APPLIED})", role="stranger")
    database.trap("stranger", beside)
    refused(database, lambda: prepare(url, table, "changes"), beside)
    prepare(f"{url}&owner={database.role('stranger')}", table, "changes")


@pytest.mark.parametrize("kind", ["table", "beside"])
def test_changes_are_not_applied_to_relations_that_have_become_a_strangers(
    database: SharedDatabase, store: penstock.Store, url: str, schema: str, kind: str
) -> None:
    table = ChangeTable(store, url)
    stage = table.stage()
    staged = table.put(stage, ("a", 1, 1, 1))
    relation = f"{schema}.t" if kind == "table" else beside_in(schema)
    database.run(
        f"grant all on {relation} to {database.role('app')}",
        f"alter table {relation} owner to {database.role('stranger')}",
    )
    database.trap("stranger", relation)
    refused(database, lambda: table.write(stage, "changes", staged), relation)


@pytest.mark.parametrize("mode", ["append", "update", "complete", "idempotent"])
def test_a_table_that_is_replaced_while_a_query_writes_is_refused(
    database: SharedDatabase, store: penstock.Store, url: str, schema: str, mode: str
) -> None:
    """Whoever owns the schema can do it, in a transaction that the writer waits for."""
    table, relation, stranger = Table(store, url), f"{schema}.t", database.role("stranger")
    stage = table.stage()
    staged = table.put(stage, ("a", 1))
    database.run("create table public.ran (who text)", "grant all on public.ran to public")
    caught: list[BaseException] = []

    def write() -> None:
        try:
            refused(database, lambda: _write(table, stage, staged, mode), relation)
        except BaseException as error:
            caught.append(error)

    with psycopg.connect(database.url) as other:
        for statement in (
            f"drop table {relation}",
            f"create table {relation} (k text primary key, v bigint)",
            f"alter table {relation} owner to {stranger}",
            *trap_statements(relation),
        ):
            other.execute(statement.encode())
        writing = threading.Thread(target=write)
        writing.start()
        waiting = (
            "select count(*) from pg_stat_activity "
            f"where wait_event_type = 'Lock' and usename = '{database.role('app')}'"
        )
        wait_until(lambda: database.run(waiting) == [(1,)], 30, "the writer waits")
        other.commit()
    writing.join()
    assert caught == []
    assert database.run(f"select * from {relation}") == []


def _write(table: Table, stage: Any, staged: dict[str, int], mode: str) -> None:
    if mode != "idempotent":
        table.write(stage, mode, staged)
        return
    columns = database_schema(SHAPED, "postgres")
    chunk = pa.RecordBatch.from_pylist([{"c0": "a", "c1": 1}], schema=columns)
    insert_chunk(table.database, table.layout, chunk, upsert.insert_new)


def test_a_staged_relation_that_was_replaced_is_neither_filled_nor_read(
    database: SharedDatabase, store: penstock.Store, url: str, schema: str
) -> None:
    """A later try of the micro-batch drops it, and a stranger takes its name."""
    table = Table(store, url)
    stage = table.stage()
    assert isinstance(stage, PostgresStage)
    staged = table.put(stage, ("a", 1))
    relation = f"{schema}.{stage.relation}"
    with store.database.transaction() as tx:
        staging_relations.drop(tx, stage.relation)
    database.run(f"create unlogged table {relation} (piece bigint, c0 text, c1 bigint)", role="stranger")
    database.run(
        f"""comment on table {relation} is '{{"sink": "t", "app_id": "a", "used_at": 0}}'""", role="stranger"
    )
    database.trap("stranger", relation)
    refused(database, lambda: table.put(stage, ("b", 1)), relation)
    refused(database, lambda: table.write(stage, "append", staged), relation)


def test_staged_relations_that_only_other_roles_may_drop_are_left_to_them(
    database: SharedDatabase, url: str, schema: str
) -> None:
    """A stranger's, and those that a dead query of another role has left, do not stop a query."""
    penstock.connect(url).close()
    relation, app = f"{schema}.staged_rows_x", database.role("app")
    what = "all tables", "all sequences"
    database.run(
        f"grant all on schema {schema} to public",
        *(f"grant all on {each} in schema {schema} to public" for each in what),
    )
    comment = '{"sink": "t", "app_id": "a", "used_at": 0}'
    for owner in ("stranger", "other"):
        database.run(
            f"create unlogged table {relation}_{owner} (c0 text)",
            f"comment on table {relation}_{owner} is '{comment}'",
            role=owner,
        )
    prepare(database.as_role("other", f"schema={schema}&owner={app}"), f"{schema}.t", "update")
    left = (
        f"select relname from pg_class where relnamespace = '{schema}'::regnamespace "
        "and relname like 'staged\\_rows\\_x%'"
    )
    assert database.run(left) == [("staged_rows_x_stranger",)]
    with penstock.connect(url) as store:
        assert store.clean_up() == 1, "the schema's owner may drop them all"
    assert database.run(left) == []


@pytest.mark.parametrize("mode", ["append", "update"])
def test_a_table_that_is_gone_is_named(store: penstock.Store, url: str, schema: str, mode: str) -> None:
    table = Table(store, url)
    stage = table.stage()
    staged = table.put(stage, ("a", 1))
    with store.database.transaction() as tx:
        tx.execute(f"drop table {schema}.t")
    with pytest.raises(TableRefusedError) as caught:
        table.write(stage, mode, staged)
    assert caught.value.condition == "TABLE_REFUSED.TABLE_GONE"


def test_the_columns_of_a_table_are_compared_once_its_owner_is_trusted(
    database: SharedDatabase, url: str, schema: str
) -> None:
    database.run(f"create table {schema}.t (k text primary key)", role="stranger")
    refused(database, lambda: prepare(url, f"{schema}.t", "update"), f"{schema}.t")
    with pytest.raises(SchemaMismatchError):
        prepare(f"{url}&owner={database.role('stranger')}", f"{schema}.t", "update")
