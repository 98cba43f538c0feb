"""The roles of docs/how-to/postgres-roles.md have exactly the rights that the page describes."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

import penstock
from penstock.errors import PenstockError
from penstock.ui.snapshots import Collector
from tests.support.pages import DOCS, blocks
from tests.support.planted import plant
from tests.support.raw_sql import run_sql

PAGE = DOCS / "how-to/postgres-roles.md"
STATEMENTS = [block.body for block in blocks(PAGE) if block.language == "sql"]
ROLES = (
    "penstock_owner", "penstock_producer", "penstock_consumer", "penstock_query", "penstock_reader",
    "penstock_feed",
)  # fmt: skip
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.fixture(scope="module")
def database(pg_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of its own, with the roles of the page.

    A stranger has made things for them in the schemas.
    """
    name = f"roles_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        url = urlsplit(pg_url)._replace(path=f"/{name}").geturl()
        try:
            run(url, "create table public.stock (item text primary key, pieces integer)")
            run(url, STATEMENTS[0])
            plant(url, "public", "penstock")
            with penstock.connect(as_role(url, "penstock_owner")) as store:
                store.create_queue("orders", SCHEMA, partitions=2).append(rows(range(10)), partition=0)
                store.create_queue("copy", SCHEMA)
                store.create_queue("large", SCHEMA, payloads=tmp_path_factory.mktemp("objects"))
                for consumer in ("billing", "query", "table"):
                    store.create_consumer(consumer).register("orders", vital=consumer == "billing")
                store.consumer("billing").register("large")
            for statements in STATEMENTS[1:]:
                if not statements.startswith("-- instead"):
                    run(url, statements.replace("database shop", f"database {name}"))
            yield url
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            for role in reversed(ROLES):
                connection.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(role)))


def run(url: str, statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statements.encode())


def as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    trust = "" if role in ("penstock_owner", "penstock_feed") else "owner=penstock_owner"
    return parts._replace(netloc=f"{role}:change%20me@{parts.hostname}:{parts.port}", query=trust).geturl()


def rows(ids: object) -> list[dict[str, object]]:
    return [{"id": number, "name": f"n{number}"} for number in ids]


def refused(action: object) -> None:
    with pytest.raises(PenstockError, match=r"permission denied|must be owner"):
        action()


def test_a_producer_may_append_and_do_nothing_else(database: str, caplog: pytest.LogCaptureFixture) -> None:
    url = as_role(database, "penstock_producer")
    with penstock.connect(url, create=False) as store:
        orders = store.queue("orders")
        orders.append(rows([1000]))
        producer = store.producer("orders", session="web")
        assert producer.append(rows([1001]), sequence=1).rows == 1
        assert producer.append(rows([1001]), sequence=1).skipped
        refused(lambda: orders.read(0, 0))
        refused(lambda: orders.trim(0, 1))
        refused(lambda: store.create_queue("mine", SCHEMA))
        refused(lambda: store.drop_queue("orders", force=True))
        refused(lambda: store.create_consumer("mine"))


@pytest.mark.parametrize("role", ["penstock_producer", "penstock_query"])
def test_rows_go_to_object_storage(database: str, role: str) -> None:
    with penstock.connect(as_role(database, role), create=False) as store:
        queue = store.queue("large")
        added = [{"id": number, "name": os.urandom(2000).hex()} for number in range(100)]
        assert queue.append(added).rows == 100
    with penstock.connect(as_role(database, "penstock_owner"), create=False) as store:
        assert run_sql(store.database, "select 1 from penstock.segment where object_id is not null")
        assert store.clean_up_objects() == 0
    with penstock.connect(as_role(database, "penstock_consumer"), create=False) as store:
        pull = store.consumer("billing").pull("large", 0)
        assert pull is not None
        assert pull.table.num_rows >= 100


def test_maintenance_that_a_producer_may_not_do_is_left_to_the_owner(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.connect(as_role(database, "penstock_owner")) as store:
        store.create_queue("crowded", SCHEMA)
    with (
        caplog.at_level(logging.WARNING, "penstock.queue"),
        penstock.connect(as_role(database, "penstock_producer"), create=False) as store,
    ):
        queue = store.queue("crowded")
        for number in range(70):
            queue.append(rows([number]))
    assert any(getattr(record, "action", "") == "maintenance_failed" for record in caplog.records)
    assert "permission denied" in caplog.text
    with penstock.connect(as_role(database, "penstock_owner"), create=False) as store:
        store.maintain()
        assert store.queue("crowded").info().partitions[0].segments < 10
        assert store.queue("crowded").info().rows == 70


def test_a_producer_with_maintenance_rights_does_maintenance(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    (more,) = (each for each in STATEMENTS if each.startswith("-- instead"))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create role penstock_keeper login password 'change me'")
    run(database, more.replace("penstock_producer", "penstock_keeper"))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("grant penstock_producer to penstock_keeper")
    try:
        with penstock.connect(as_role(database, "penstock_owner")) as store:
            store.create_queue("kept", SCHEMA, retention=penstock.Retention(rows=5))
        with (
            caplog.at_level(logging.WARNING, "penstock.queue"),
            penstock.connect(as_role(database, "penstock_keeper"), create=False) as store,
        ):
            queue = store.queue("kept")
            for number in range(70):
                queue.append(rows([number]))
            queue.maintain()
            assert queue.info().rows == 5
        assert not caplog.records
    finally:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("drop owned by penstock_keeper")
            connection.execute("drop role penstock_keeper")


def test_a_consumer_may_pull_and_advance_and_do_nothing_else(database: str) -> None:
    with penstock.connect(as_role(database, "penstock_consumer"), create=False) as store:
        billing = store.consumer("billing")
        pull = billing.pull("orders", 0)
        billing.advance("orders", 0, old=pull.start, new=pull.end)
        assert billing.lag("orders").partitions[0].rows == 0
        refused(lambda: billing.seek("orders", to="earliest"))
        refused(lambda: store.queue("orders").append(rows([1])))
        refused(lambda: store.create_consumer("mine"))
        refused(lambda: store.drop_consumer("billing"))
        refused(lambda: store.queue("orders").trim(0, 1))


def test_a_reader_may_inspect_the_store_but_not_read_rows(database: str) -> None:
    with penstock.connect(as_role(database, "penstock_reader"), create=False) as store:
        assert "orders" in store.queues()
        orders = store.queue("orders")
        assert orders.info().rows >= 10
        assert "billing" in store.consumers()
        assert store.consumer("billing").lag("orders").rows >= 0
        assert {each.consumer for each in store.registrations()} == {"billing", "query", "table"}
        refused(lambda: orders.read(0, 0))
        refused(lambda: orders.append(rows([1])))
        page = Collector(as_role(database, "penstock_reader"))
        found = page.collect()
        page.close()
        assert found["store"]["error"] is None
        assert "orders" in [queue["name"] for queue in found["queues"]]
        refused(lambda: store.consumer("billing").seek("orders", to="latest"))


@pytest.mark.parametrize(
    "guarantee",
    [
        "exactly_once",
        pytest.param("idempotent", marks=pytest.mark.soak),
        pytest.param("at_least_once", marks=pytest.mark.soak),
    ],
)
def test_a_query_may_read_and_commit(
    database: str, spark: SparkSession, tmp_path: Path, guarantee: str
) -> None:
    owner, url = as_role(database, "penstock_owner"), as_role(database, "penstock_query")
    with penstock.connect(owner) as store:
        out = store.create_queue(guarantee, SCHEMA)
        store.create_consumer(guarantee).register("orders")
        there = store.queue("orders").info().rows
    penstock.register(spark)
    made = penstock.stream(spark, penstock.QueueSource("orders", guarantee, url)).write(
        penstock.QueueSink(guarantee, url=url), guarantee=guarantee
    )
    made.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()).awaitTermination()
    with penstock.connect(owner) as store:
        assert store.queue(out.name).info().rows == there
        assert store.consumer(guarantee).lag("orders").rows == 0
    with penstock.connect(url, create=False) as store:
        refused(lambda: store.drop_queue(guarantee))


def test_a_query_may_maintain_a_table_created_for_it(
    database: str, spark: SparkSession, tmp_path: Path
) -> None:
    url = as_role(database, "penstock_query")
    penstock.register(spark)
    made = (
        penstock.stream(spark, penstock.QueueSource("orders", "table", url))
        .transform(lambda orders: orders.groupBy("name").count().toDF("name", "number"))
        .write(penstock.TableSink("public.counts", keys=["name"], url=url), output_mode="update")
    )
    made.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()).awaitTermination()
    with psycopg.connect(database) as connection:
        (found,) = connection.execute("select count(*) from public.counts").fetchall()
    assert found[0] >= 10
    page = Collector(as_role(database, "penstock_reader"))
    assert "stopped" in [query["state"] for query in page.collect()["queries"]]
    page.close()


def test_a_feed_reads_changes_with_a_replication_role(database: str, spark: SparkSession) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("insert into public.stock values ('bolt', 1)")
        connection.execute("create publication stock for table public.stock")
    feed = penstock.PostgresFeed(
        as_role(database, "penstock_feed"), publication="stock", slot=f"s_{uuid.uuid4().hex[:8]}"
    )
    opened = feed.open()
    try:
        opened.prepare()
        assert [row.item for row in penstock.changes.read(spark, feed).collect()] == ["bolt"]
    finally:
        run(
            database,
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
            "where database = current_database()",
        )
