"""Pytest plugin with fixtures for stores, streams and a Spark session. pytest loads it if Penstock is
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.queue.store import Store
    from penstock.testing.streams import MemoryStream

_OPTION, _VARIABLE = "--penstock-postgres", "PENSTOCK_TEST_PG_URL"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--penstock-postgres URL``."""
    parser.getgroup("penstock").addoption(
        _OPTION,
        metavar="URL",
        default=os.environ.get(_VARIABLE),
        help="A PostgreSQL database on which tests with a store also run, each in its own schema. "
        f"[default: the environment variable {_VARIABLE}, which keeps a password out of the command line]",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses a store once for each database."""
    if "penstock_store_url" in metafunc.fixturenames:
        databases = ["sqlite", *(["postgresql"] if metafunc.config.getoption(_OPTION) else [])]
        metafunc.parametrize("penstock_store_url", databases, indirect=True)


@pytest.fixture
def penstock_store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a store, for this test only. The store does not exist yet."""
    from penstock.testing.stores import temporary_store_url

    database = request.config.getoption(_OPTION) if request.param == "postgresql" else None
    with temporary_store_url(database) as url:
        yield url


@pytest.fixture
def penstock_store(penstock_store_url: str) -> Iterator[Store]:
    """Return a new, open store for this test only."""
    from penstock.queue.store import connect

    with connect(penstock_store_url, create=True) as store:
        yield store


@pytest.fixture(scope="session")
def penstock_spark() -> Iterator[SparkSession]:
    """Return a Spark session for all tests: the active session, or a new one with two threads that stops
    after the tests.
    """
    from pyspark.sql import SparkSession

    from penstock.spark.session import register, session

    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)
        yield active
        return
    started = session("tests", master="local[2]", stateful=True, conf=_SMALL)
    yield started
    started.stop()


_SMALL = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}


@pytest.fixture
def penstock_stream(penstock_spark: SparkSession) -> Iterator[Callable[[str], MemoryStream]]:
    """Return a function that creates a `MemoryStream`, as in ``penstock_stream("id long")``. The stream is
    removed after the test.
    """
    from penstock.testing.streams import MemoryStream

    with ExitStack() as streams:
        yield lambda schema: streams.enter_context(MemoryStream(penstock_spark, schema))
