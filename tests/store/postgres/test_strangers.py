"""PostgreSQL roles that may only connect to a store's database cannot affect the store's users."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

import penstock
from penstock.errors import StoreUnsafeError
from penstock.store.postgres import staging_relations
from penstock.store.postgres.locks import RANDOM_KEY_BITS, advisory_key
from tests.support.strangers import SharedDatabase, shared_database
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
NAME = "somebody's consumer"
As = Callable[..., str]


@pytest.fixture(scope="module")
def shared(pg_url: str) -> Iterator[SharedDatabase]:
    """A separate database, in which any role may connect and create schemas."""
    with shared_database(pg_url, "app", "friend", "stranger") as made:
        yield made


@pytest.fixture
def database(shared: SharedDatabase) -> str:
    return shared.url


@pytest.fixture
def as_role(shared: SharedDatabase) -> As:
    """Return a function that returns the URL for a role, as in `as_role("app", "schema=s")`."""
    return shared.as_role


def run(url: str, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def schema(database: str) -> Iterator[str]:
    name = f"s_{uuid.uuid4().hex[:8]}"
    yield name
    run(database, f"drop schema if exists {name} cascade")


@pytest.fixture
def store(as_role: As, schema: str) -> Iterator[penstock.Store]:
    with penstock.connect(as_role("app", f"schema={schema}")) as made:
        yield made


def refused(url: str, owner: str) -> None:
    for create in (True, False):
        with pytest.raises(StoreUnsafeError, match=f"belongs to the role .*_{owner}") as caught:
            penstock.connect(url, create=create)
        assert caught.value.condition == "STORE_UNSAFE.SCHEMA_OWNER"
        assert str(caught.value.parameters["owner"]).endswith(f"_{owner}")


def test_a_schema_created_by_a_stranger_is_refused(database: str, as_role: As, schema: str) -> None:
    run(as_role("stranger"), f"create schema {schema}; grant all on schema {schema} to public")
    refused(as_role("app", f"schema={schema}"), "stranger")
    # The role with the most rights is the worthwhile victim.
    refused(f"{database}?schema={schema}", "stranger")
    name = urlsplit(database).path[1:]
    with penstock.connect(as_role("app", f"schema={schema}&owner={name}_stranger")) as store:
        assert store.queues() == []


def test_a_store_created_by_a_stranger_is_refused(database: str, as_role: As, schema: str) -> None:
    penstock.connect(as_role("stranger", f"schema={schema}")).close()
    run(
        as_role("stranger"),
        f"""
        create function {schema}.trap() returns trigger language plpgsql as
            $$ begin
                execute 'alter role ' || quote_ident(session_user) || ' connection limit 0'; return new;
            end $$;
        create trigger trap before insert on {schema}.queue for each row execute function {schema}.trap();
        grant all on schema {schema} to public; grant all on all tables in schema {schema} to public;
        """,
    )
    refused(as_role("app", f"schema={schema}"), "stranger")
    refused(f"{database}?schema={schema}", "stranger")
    with penstock.connect(as_role("stranger", f"schema={schema}"), create=False) as own:
        assert own.queues() == []


def test_a_strangers_table_in_a_shared_schema_is_refused(database: str, as_role: As, schema: str) -> None:
    run(database, f"create schema {schema}; grant all on schema {schema} to public")
    run(as_role("stranger"), f"create table {schema}.store (uuid text, version bigint)")
    refused(as_role("app", f"schema={schema}"), "stranger")


def test_roles_that_the_user_is_a_member_of_are_trusted_only_if_they_are_named(
    database: str, as_role: As, schema: str
) -> None:
    """An administrator of a role can make any role a member of it."""
    penstock.connect(as_role("friend", f"schema={schema}")).close()
    name = urlsplit(database).path[1:]
    run(database, f"grant {name}_friend to {name}_app; alter role {name}_friend nologin")
    try:
        refused(as_role("app", f"schema={schema}"), "friend")
        penstock.connect(as_role("app", f"schema={schema}&owner={name}_friend"), create=False).close()
        run(database, f"alter role {name}_friend login")
        refused(as_role("app", f"schema={schema}"), "friend")
    finally:
        run(database, f"alter role {name}_friend login; revoke {name}_friend from {name}_app")


@pytest.mark.parametrize("how", ["partition", "partition of a partition", "child"])
def test_a_strangers_partition_of_a_table_is_refused(
    shared: SharedDatabase, store: penstock.Store, schema: str, how: str
) -> None:
    """The partition's triggers run with the rights of the role that writes to the table."""
    theirs = f"part_{uuid.uuid4().hex[:8]}"
    if how == "child":
        made = "create table {0}.sums (id bigint); create table {0}.{1} () inherits ({0}.sums)"
    elif how == "partition":
        made = (
            "create table {0}.sums (id bigint) partition by range (id); "
            "create table {0}.{1} partition of {0}.sums default"
        )
    else:
        made = (
            "create table {0}.sums (id bigint) partition by range (id); "
            "create table {0}.middle partition of {0}.sums default partition by range (id); "
            "create table {0}.{1} partition of {0}.middle default"
        )
    shared.run(made.format(schema, theirs), role="app")
    with store.database.transaction() as tx:
        tx.lock_table(schema, "sums")
    shared.run(f"alter table {schema}.{theirs} owner to {shared.role('stranger')}")
    with pytest.raises(StoreUnsafeError, match=theirs), store.database.transaction() as tx:
        tx.lock_table(schema, "sums")


def test_a_store_is_not_written_through_a_connection_whose_role_does_not_trust_its_owner(
    shared: SharedDatabase, store: penstock.Store, schema: str
) -> None:
    """The store's role trusts itself, but its triggers would run with the rights of the connection's role."""
    queue = store.create_queue("q", SCHEMA)
    shared.run(f"grant usage on schema {schema} to public", role="app")
    shared.trap("app", f"{schema}.segment")
    shared.run(f"grant all on all tables in schema {schema} to public", role="app")
    shared.run(f"grant all on all sequences in schema {schema} to public", role="app")
    with psycopg.connect(shared.as_role("friend")) as connection:
        with pytest.raises(StoreUnsafeError, match=f"the rights of the role '{shared.role('friend')}'"):
            queue.append([{"id": 1}], connection=connection)
        connection.commit()
        assert shared.trapped() == []
        trusting = shared.as_role("app", f"schema={schema}&owner={shared.role('app')}")
        with penstock.connect(trusting) as theirs:
            theirs.queue("q").append([{"id": 1}], connection=connection)
        connection.commit()
    assert queue.info().rows == 1


@pytest.fixture
def held(as_role: As) -> Iterator[psycopg.Connection[object]]:
    """Hold locks in a session of an untrusted role."""
    with psycopg.connect(as_role("stranger"), autocommit=True) as connection:
        yield connection


def hold(connection: psycopg.Connection[object], key: int) -> None:
    connection.execute("select pg_try_advisory_lock(%s)", [key])


def test_a_strangers_locks_do_not_block_a_consumer(
    store: penstock.Store, held: psycopg.Connection[object]
) -> None:
    first = advisory_key(NAME) >> RANDOM_KEY_BITS << RANDOM_KEY_BITS
    for drawn in range(0, 1 << RANDOM_KEY_BITS, 1 << (RANDOM_KEY_BITS - 9)):
        hold(held, first + drawn)
    one, two = (store.database.owner_lock(NAME) for _ in range(2))
    assert not two.held_elsewhere()
    assert one.acquire()
    assert two.held_elsewhere()
    assert not two.acquire()
    one.release()
    assert two.acquire()
    two.release()


def test_a_stranger_who_waits_for_an_owners_lock_does_not_become_the_owner(
    store: penstock.Store, held: psycopg.Connection[object], as_role: As
) -> None:
    lock, other = (store.database.owner_lock(NAME) for _ in range(2))
    assert lock.acquire()
    ((high, low),) = held.execute(
        "select classid::bigint, objid::bigint from pg_locks where locktype = 'advisory' and objsubid = 1 "
        "and granted and database = (select oid from pg_database where datname = current_database())"
    ).fetchall()
    with closing(psycopg.connect(as_role("stranger"), autocommit=True)) as waiting:
        key = (high << 32) + low
        waiting.pgconn.send_query(
            f"select pg_advisory_lock({key - (1 << 64) if key >> 63 else key})".encode()
        )
        lock.release()
        wait_until(lambda: not held_by_none(held, low), timeout=5)
        assert not other.held_elsewhere()
        assert other.acquire()
        other.release()


def held_by_none(connection: psycopg.Connection[object], low: int) -> bool:
    return not connection.execute(
        "select from pg_locks where locktype = 'advisory' and granted and objid = %s", [low]
    ).fetchall()


def test_a_login_role_that_may_move_consumers_through_another_role_can_be_an_owner(
    database: str, store: penstock.Store, as_role: As, schema: str
) -> None:
    """The login role has no privileges itself, but may use those of another role."""
    name = urlsplit(database).path[1:]
    run(database, f"grant {name}_app to {name}_friend; alter role {name}_friend noinherit")
    try:
        url = as_role("friend", f"schema={schema}&options=-crole%3D{name}_app")
        with penstock.connect(url, create=False) as theirs:
            lock = theirs.database.owner_lock(NAME)
            assert lock.acquire()
            assert store.database.owner_lock(NAME).held_elsewhere()
            lock.release()
    finally:
        run(database, f"revoke {name}_app from {name}_friend; alter role {name}_friend inherit")


def test_concurrent_requests_for_a_lock_get_it_one_at_a_time(store: penstock.Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    locks = [store.database.owner_lock(NAME) for _ in range(6)]
    with ThreadPoolExecutor(len(locks)) as pool, ExitStack() as stack:
        for lock in locks:
            stack.callback(lock.release)
        for _ in range(5):
            got = list(pool.map(lambda lock: lock.acquire(), locks))
            assert got.count(True) <= 1
            for lock, mine in zip(locks, got, strict=True):
                if mine:
                    lock.release()
        assert locks[0].acquire()


@pytest.mark.timeout(30)
def test_a_strangers_lock_does_not_block_the_creation_of_a_store(
    as_role: As, schema: str, held: psycopg.Connection[object]
) -> None:
    hold(held, 7235416081274633)
    penstock.connect(as_role("app", f"schema={schema}&lock_wait=1s")).close()


def test_relation_names_are_never_executed_as_sql(
    database: str, store: penstock.Store, as_role: As, schema: str
) -> None:
    """A role with the right to stage tables can create relations with any names and comments in the
    schema.
    """
    name = urlsplit(database).path[1:]
    store.create_queue("q", SCHEMA)
    run(database, f"grant usage, create on schema {schema} to {name}_stranger")
    sink, app = "table:t", "the app"
    payload = json.dumps({"sink": sink, "app_id": app, "used_at": 0})
    attack = f"{staging_relations.NAME_PREFIX}x; drop table {schema}.queue cascade"
    with psycopg.connect(as_role("stranger"), autocommit=True) as stranger:
        for relation, comment in (
            (attack, payload),
            (f"{staging_relations.NAME_PREFIX}y", "[[["),
            (f"{staging_relations.NAME_PREFIX}z", '{"a": 1}'),
        ):
            there = sql.Identifier(schema, relation)
            stranger.execute(sql.SQL("create unlogged table {} (n int)").format(there))
            stranger.execute(sql.SQL("comment on table {} is {}").format(there, sql.Literal(comment)))
    with store.database.transaction(write=False) as tx:
        assert [found.name for found in staging_relations.list_relations(tx)] == [attack]
    staging_relations.drop_earlier_relations(store.database, sink, app)
    assert store.queues() == ["q"]
    with store.database.transaction(write=False) as tx:
        assert staging_relations.list_relations(tx) == []


def test_a_notification_from_a_stranger_only_wakes_the_watch(
    store: penstock.Store, held: psycopg.Connection[object], schema: str, database: str
) -> None:
    queue = store.create_queue("q", SCHEMA)
    ((oid,),) = run(database, f"select '{schema}.partition'::regclass::oid")
    key = queue.record.queue_id & 2147483647
    held.execute("select pg_advisory_lock(%s::integer, %s::integer)", [oid, key])
    with closing(queue.watch()) as watch:
        assert not watch.wait({0: 0}, 0.2)
        held.execute("select pg_notify(%s, 'x; drop')", [f"penstock_{oid}_{queue.record.queue_id}"])
        queue.append([{"id": 1}])
        assert watch.wait({0: 0}, 5)
