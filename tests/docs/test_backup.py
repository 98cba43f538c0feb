"""What docs/how-to/backup.md says about restored backups: both, or one without the other."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import PenstockError
from tests.support.pgtools import program
from tests.support.sql_tables import query

SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])


def totals(orders: DataFrame) -> DataFrame:
    return orders.groupBy("customer").count().toDF("customer", "orders")


@dataclass
class Job:
    """A store, a stateful query of it and its checkpoint, with ways to back them up."""

    spark: SparkSession
    url: str
    folder: Path
    server: str | None = None

    def __post_init__(self) -> None:
        self.checkpoint = self.folder / "checkpoint"
        with penstock.connect(self.url) as store:
            store.create_queue("orders", SCHEMA)
            store.create_consumer("totals").register("orders", vital=True)

    def add(self, first: int) -> None:
        """Ten orders, by a session that may repeat them."""
        with penstock.connect(self.url) as store:
            producer = store.producer("orders", session="web")
            producer.append([{"id": first + n, "customer": "ab"[n % 2]} for n in range(10)], sequence=first)

    def run(self, guarantee: str = "exactly_once") -> None:
        sink = penstock.TableSink("totals", keys=["customer"], url=self.url)
        made = penstock.stream(self.spark, penstock.QueueSource("orders", "totals", self.url)).transform(
            totals
        )
        started = made.write(sink, guarantee=guarantee, output_mode="update").start(
            checkpoint=self.checkpoint, trigger=penstock.Trigger.available_now()
        )
        started.awaitTermination()

    def counts(self) -> dict[str, int]:
        return dict(query(self.url, "select customer, orders from totals"))

    def back_up_store(self) -> None:
        if self.server is None:
            path = self.url.removeprefix("sqlite:///")
            with (
                closing(sqlite3.connect(path)) as there,
                closing(sqlite3.connect(self.folder / "copy.db")) as copy,
            ):
                there.backup(copy)
        else:
            _call("pg_dump", "--format=custom", f"--file={self.folder}/copy.dump", self.url)

    def restore_store(self) -> None:
        if self.server is None:
            path = self.url.removeprefix("sqlite:///")
            with (
                closing(sqlite3.connect(self.folder / "copy.db")) as copy,
                closing(sqlite3.connect(path)) as there,
            ):
                copy.backup(there)
            return
        name = urlsplit(self.url).path[1:]
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        _call("pg_restore", f"--dbname={self.url}", f"{self.folder}/copy.dump")

    def back_up_checkpoint(self) -> None:
        shutil.copytree(self.checkpoint, self.folder / "copy")

    def restore_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(self.folder / "copy", self.checkpoint)

    def forget(self, batch: int) -> None:
        """Take the micro-batches behind one out of the checkpoint."""
        for log in ("offsets", "commits"):
            for file in (self.checkpoint / log).iterdir():
                number = file.name.strip(".").removesuffix(".crc")
                if number.isdigit() and int(number) > batch:
                    file.unlink()

    def refused(self) -> str:
        with pytest.raises(PenstockError) as caught:
            self.run()
        return caught.value.condition

    def last_in_ledger(self) -> int:
        ledger = "penstock_ledger" if self.server is None else "penstock.ledger"
        (found,) = query(self.url, f"select max(batch_id) from {ledger}")
        return int(found[0])


def _call(name: str, *words: str) -> None:
    done = subprocess.run(
        [str(program(name)), *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["sqlite", "postgresql"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """A job of which ten orders are counted."""
    spark = request.getfixturevalue("spark")
    penstock.register(spark)
    if request.param == "sqlite":
        yield _begun(Job(spark, f"sqlite:///{tmp_path}/shop.db", tmp_path))
        return
    server = request.getfixturevalue("pg_url")
    name = f"backup_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield _begun(Job(spark, urlsplit(server)._replace(path=f"/{name}").geturl(), tmp_path, server))
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


one_kind = pytest.mark.parametrize("job", ["sqlite"], indirect=True)


def _begun(job: Job) -> Job:
    job.add(0)
    job.run()
    return job


def test_both_restored_continue_from_the_time_of_the_backup(job: Job) -> None:
    job.back_up_store()
    job.back_up_checkpoint()
    job.add(10)
    job.run()
    assert job.counts() == {"a": 10, "b": 10}
    job.restore_store()
    job.restore_checkpoint()
    assert job.counts() == {"a": 5, "b": 5}
    job.add(0)  # the producer repeats what it is not sure of
    job.add(10)
    job.run()
    assert job.counts() == {"a": 10, "b": 10}


@one_kind
def test_a_store_older_than_the_checkpoint_is_refused_until_the_checkpoint_is_rolled_back(job: Job) -> None:
    job.back_up_store()
    job.add(10)
    job.run()
    job.restore_store()
    job.add(10)
    assert job.refused() == "CHECKPOINT_MISMATCH.SINK_BEHIND"
    assert job.counts() == {"a": 5, "b": 5}
    job.forget(job.last_in_ledger())
    job.run()
    assert job.counts() == {"a": 10, "b": 10}


@one_kind
def test_an_older_store_is_refused_at_the_start_if_rows_may_be_repeated(job: Job) -> None:
    job.add(10)
    job.run("at_least_once")
    job.back_up_store()
    job.add(20)
    job.run("at_least_once")
    job.restore_store()
    # No row has come since.
    with pytest.raises(PenstockError) as caught:
        job.run("at_least_once")
    assert caught.value.condition == "CHECKPOINT_MISMATCH.SINK_BEHIND"
    assert job.counts() == {"a": 10, "b": 10}


@one_kind
def test_a_checkpoint_older_than_the_store_is_refused(job: Job) -> None:
    job.back_up_checkpoint()
    job.add(10)
    job.run()
    job.restore_checkpoint()
    job.add(20)
    assert job.refused() == "CHECKPOINT_MISMATCH.OTHER_INPUT"
    assert job.counts() == {"a": 10, "b": 10}


@one_kind
def test_a_store_without_its_checkpoint_refuses_a_query_that_would_lose_its_state(job: Job) -> None:
    shutil.rmtree(job.checkpoint)
    job.add(10)
    assert job.refused() == "CONSUMER_BOUND"
    assert job.counts() == {"a": 5, "b": 5}
