"""Every tutorial works as described, from its first block to its last."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

import penstock
from tests.docs.shell import Reader
from tests.support.object_store import object_store, settings
from tests.support.pages import DOCS
from tests.support.postgres import free_port

TUTORIALS = DOCS / "tutorials"
NAMES = ("first-queue", "exactly-once", "postgres-to-delta", "output-modes", "continuous", "cluster")
LONG = ("exactly-once", "postgres-to-delta", "continuous", "cluster")
ON_POSTGRES = ("exactly-once", "postgres-to-delta", "cluster")


def test_no_tutorial_is_left_out() -> None:
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(NAMES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in LONG else []) for name in NAMES]
)
def test_a_tutorial_shows_the_actual_output(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tests' Spark session, except for steps that kill processes with a session."""
    if name != "first-queue":
        spark = request.getfixturevalue("spark")
        monkeypatch.setattr(penstock, "session", _sessions(spark))
        request.addfinalizer(lambda: _without_store(spark))
    _do(name, tmp_path, request, monkeypatch, here=True)


@pytest.mark.soak
@pytest.mark.crash
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_works_in_separate_processes(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    _do(name, tmp_path, request, monkeypatch, here=False)


def _do(
    name: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *, here: bool
) -> None:
    with _database(name, request) as url, _cluster(name) as cluster:
        variables = {"PENSTOCK_URL": url or f"sqlite:///{folder}/tutorial.db", "DATABASE_URL": url, **cluster}
        reader = Reader(
            TUTORIALS / f"{name}.md",
            folder,
            variables,
            ready=lambda: _CONDITIONS[name](folder, variables["PENSTOCK_URL"]),
            here=here,
        )
        try:
            reader.do(monkeypatch)
        finally:
            reader.close()


def _sessions(spark: SparkSession) -> Callable[..., SparkSession]:
    """What stands in for `penstock.session`: the session that there is, with the store as its default."""

    def session(*_: Any, url: str | None = None, **__: Any) -> SparkSession:
        if url is not None:
            spark.conf.set("spark.penstock.url", url)
        penstock.register(spark)
        return spark

    return session


def _without_store(spark: SparkSession) -> None:
    spark.conf.unset("spark.penstock.url")
    penstock.register(spark)


@contextmanager
def _database(name: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database, where the tutorial asks for one."""
    if name not in ON_POSTGRES:
        yield ""
        return
    server = request.getfixturevalue("pg_url")
    database = f"tutorial_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(database)))
        try:
            yield urlsplit(server)._replace(path=f"/{database}").geturl()
        finally:
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
                [database],
            )
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(database)))


@contextmanager
def _cluster(name: str) -> Iterator[dict[str, str]]:
    """The object storage and the ports of a cluster, where the tutorial starts both."""
    if name != "cluster":
        yield {}
        return
    with object_store() as storage:
        yield {
            **settings(storage.endpoint),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_MASTER_HOST": "127.0.0.1",
            "SPARK_MASTER_PORT": str(free_port()),
            "SPARK_MASTER_WEBUI_PORT": "0",
            "SPARK_WORKER_CORES": "2",
            "SPARK_WORKER_MEMORY": "1g",
            "SPARK_WORKER_WEBUI_PORT": "0",
        }


def _appended(folder: Path, url: str) -> bool:
    with penstock.connect(url) as store:
        return store.queue("orders").info().rows > 30


_CONDITIONS: dict[str, Callable[[Path, str], bool]] = {"first-queue": _appended}
"""What a `sleep` of a tutorial is for."""
