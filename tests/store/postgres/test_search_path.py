"""Penstock never calls functions and operators that another role creates in a shared schema: its sessions
look up names only in pg_catalog.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy
from psycopg import sql

import penstock
from penstock.errors import InvalidInputError, OffsetConflictError, StoreError
from penstock.queue import maintenance
from penstock.tables.names import resolve
from penstock.ui.snapshots import Collector
from tests.support.planted import plant

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
SAFE = "pg_catalog, pg_temp"


@pytest.fixture(scope="module")
def planted(pg_url: str) -> Iterator[str]:
    """A database with malicious operators and functions in ``public`` and in the store's own schema."""
    name = f"planted_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        url = urlsplit(pg_url)._replace(path=f"/{name}").geturl()
        try:
            plant(url, "public", "penstock")
            yield url
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def store(planted: str) -> Iterator[penstock.Store]:
    with penstock.connect(planted) as store:
        yield store
        for consumer in store.consumers():
            store.drop_consumer(consumer)
        for queue in store.queues():
            store.drop_queue(queue, force=True)


def rows(*ids: int) -> list[dict[str, object]]:
    return [{"id": number, "name": f"n{number}"} for number in ids]


def test_planted_functions_are_called_with_public_in_the_search_path(planted: str) -> None:
    with psycopg.connect(planted) as connection:
        for text in ("select 1::numeric * 2::smallint", "select * from unnest('{1}'::bigint[])"):
            with pytest.raises(psycopg.errors.RaiseException, match="the planted"):
                connection.execute(text.encode())
            connection.rollback()
        connection.execute(f"set search_path to {SAFE}".encode())
        assert connection.execute("select 1::numeric * 2::smallint").fetchone() == (2,)


def test_queues_consumers_and_producers_call_no_planted_function(store: penstock.Store, planted: str) -> None:
    queue = store.create_queue("q", SCHEMA, partitions=2, key=["id"], retention=penstock.Retention(rows=1000))
    for number in range(3 * maintenance.COMPACTION_FAN_IN):
        queue.append(rows(number, number + 1))
    producer = store.producer("q", session="s")
    producer.append(rows(1), sequence=1)
    assert producer.append(rows(1), sequence=1).skipped
    queue.add_columns(pa.schema([("more", pa.int64())]))
    queue.add_partitions(1)
    store.maintain()
    store.create_consumer("c").register("q", vital=True)
    consumer = store.consumer("c")
    pull = consumer.pull("q", 0)
    consumer.advance("q", 0, old=pull.start, new=pull.end)
    with pytest.raises(OffsetConflictError):
        consumer.advance("q", 0, old=pull.start, new=pull.end)
    assert consumer.lag("q").rows > 0
    consumer.seek("q", to="earliest")
    assert queue.read(0, 0).num_rows > 0
    with closing(queue.watch()) as watch:
        assert watch.wait({0: 0}, 5)
    queue.trim(0, 1)
    collector = Collector(planted)
    assert collector.collect()["store"]["error"] is None
    collector.close()


def test_every_session_has_the_safe_search_path(store: penstock.Store) -> None:
    database: Any = store.database
    with database.transaction(write=False) as tx:
        assert tx.query("select current_setting('search_path')") == [(SAFE,)]
    with closing(database.long_lived_connection()) as lasting:
        assert lasting.execute("select current_setting('search_path')").fetchone() == (SAFE,)


def test_a_table_without_a_schema_is_resolved_by_the_roles_search_path(
    planted: str, store: penstock.Store
) -> None:
    with store.database.transaction(write=False) as tx:
        # The first existing schema of "$user", public. The tests' role has the same name as the store's
        # schema.
        assert resolve(tx, "orders").table == "orders"
        assert tx.query("select current_setting('search_path')") == [(SAFE,)]
    with psycopg.connect(planted, autocommit=True) as connection:
        connection.execute("create schema sales")
    with (
        penstock.connect(f"{planted}?options=-csearch_path%3Dnowhere,sales,public") as other,
        other.database.transaction() as tx,
    ):
        assert resolve(tx, "orders").sql == '"sales"."orders"'
        assert resolve(tx, "public.orders").sql == '"public"."orders"'


def path_of(connection: Any) -> str:
    (found,) = connection.execute("show search_path").fetchone()
    return str(found)


def test_a_callers_connection_calls_no_planted_function_and_keeps_its_search_path(
    store: penstock.Store, planted: str
) -> None:
    queue = store.create_queue("q", SCHEMA)
    store.create_consumer("c").register("q")
    with psycopg.connect(planted) as own:
        assert queue.append(rows(1, 2), connection=own).rows == 2
        assert path_of(own) == '"$user", public'
        own.commit()
        own.execute("set local search_path to public, penstock")
        store.consumer("c").advance("q", 0, old=0, new=1, connection=own)
        assert path_of(own) == "public, penstock"
        with pytest.raises(OffsetConflictError):
            store.consumer("c").advance("q", 0, old=0, new=1, connection=own)
        assert path_of(own) == "public, penstock"
        own.commit()
        assert path_of(own) == '"$user", public'
        own.execute("set search_path to penstock")
        queue.append(rows(3), connection=own)
        own.commit()
        assert path_of(own) == "penstock"
    assert queue.info().rows == 3
    assert store.consumer("c").offsets("q") == {0: 1}


def test_a_connection_to_another_database_keeps_its_search_path(store: penstock.Store, pg_url: str) -> None:
    queue = store.create_queue("q", SCHEMA)
    with psycopg.connect(pg_url) as own:
        with pytest.raises(InvalidInputError, match=r"OTHER_DATABASE\].*is not to"):
            queue.append(rows(1), connection=own)
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        own.execute("set local search_path to public")
        with pytest.raises(InvalidInputError, match=r"OTHER_DATABASE\].*is not to"):
            queue.append(rows(1), connection=own)
        assert path_of(own) == "public"


def _psycopg(url: str) -> Any:
    return psycopg.connect(url)


def _sqlalchemy(url: str) -> Any:
    # SQLAlchemy itself runs queries when it connects.
    engine = sqlalchemy.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:", 1),
        poolclass=sqlalchemy.NullPool,
        connect_args={"options": "-csearch_path=pg_catalog"},
    )
    return engine.connect()


@pytest.mark.parametrize("connect", [_psycopg, _sqlalchemy])
@pytest.mark.parametrize("schema", ["ledgers", "led :gers%s"])
def test_the_exactly_once_ledger_calls_no_planted_function(
    planted: str, connect: Callable[[str], Any], schema: str
) -> None:
    with psycopg.connect(planted, autocommit=True) as connection:
        connection.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(schema)))
    text = sqlalchemy.text if connect is _sqlalchemy else str
    path = f'"{schema}", public'
    for number, new in ((0, True), (0, False), (1, True)):
        with connect(planted) as own:
            own.execute(
                text(
                    "select set_config('search_path', '"
                    + path.replace(":", "' || chr(58) || '")
                    + "', false)"
                )
            )
            own.commit()
            with penstock.exactly_once(own, "t", connect.__name__, number) as batch:
                assert batch.new is new
                assert path_of_any(own, text) == path
            own.commit()
            assert path_of_any(own, text) == path
    with psycopg.connect(planted, options="-csearch_path=pg_catalog") as connection:
        found = connection.execute(
            sql.SQL("select batch_id from {}.penstock_exactly_once where app_id = {}").format(
                sql.Identifier(schema), connect.__name__
            )
        ).fetchall()
    assert found == [(1,)]


def path_of_any(connection: Any, text: Callable[[str], Any]) -> str:
    return str(connection.execute(text("show search_path")).fetchone()[0])


def test_a_trigger_that_cannot_resolve_its_names_is_reported(planted: str, store: penstock.Store) -> None:
    with psycopg.connect(planted, autocommit=True) as connection:
        connection.execute(
            """
            create table public.audit (id bigint);
            create table public.t (id bigint primary key);
            create function public.note() returns trigger language plpgsql as
                $$ begin insert into audit values (new.id); return new; end $$;
            create trigger note after insert on public.t for each row execute function public.note();
            """
        )
        with pytest.raises(StoreError, match=r"only in pg_catalog.*alter function") as caught:
            store.database.run(lambda tx: tx.change("insert into public.t values (1)"))
        assert caught.value.condition == "STORE_ERROR.UNQUALIFIED_NAME"
        connection.execute("alter function public.note() set search_path = public")
        store.database.run(lambda tx: tx.change("insert into public.t values (1)"))
        assert connection.execute("select id from public.audit").fetchall() == [(1,)]
    # A missing name in the user's own statement is still an ordinary error.
    with pytest.raises(StoreError) as caught:
        store.database.run(lambda tx: tx.change("insert into public.nowhere values (1)"))
    assert caught.value.condition == "STORE_ERROR"
