"""Fixtures that every layer's tests share; the work is in tests/support."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.processes import ChildProcess
from tests.support.processes import run_child as start_child

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Before any JVM starts: zones of naive timestamps, and what child processes and Spark's Python workers can
# import.
ROOT = Path(__file__).resolve().parents[1]
STARTUP = ROOT / "tests/support/startup"
os.environ["TZ"] = "UTC"
time.tzset()
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "src"), str(ROOT), str(STARTUP), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
if "PENSTOCK_TEST_PAYLOADS" in os.environ:
    from tests.support import payloads_everywhere

    payloads_everywhere.apply()

# A shared machine stalls now and then: how long an example took says nothing about the code.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


_LONGEST_FIRST = (
    "docs", "tables", "continuous", "crash", "spark", "feeds", "changes", "modes", "simulation", "limits",
    "pipeline", "golden",
)  # fmt: skip
"""Folders, with those whose files take longest first."""


_ABOVE_STORES = (
    "cli", "continuous", "feeds", "golden", "limits", "peek", "pipeline", "pump", "reconciliation", "spark",
    "ui",
)  # fmt: skip
"""Folders of code that asks a store, of whichever kind, only through its interface."""
_KINDS = re.compile(r"(?<=[\[-])(sqlite|postgresql|delta|iceberg)(?=[\]-])")
"""A kind of store, or of table, among the parameters of a test."""
_FAMILIES = {"sqlite": "sql", "postgresql": "sql", "delta": "lake", "iceberg": "lake"}
"""Kinds of tables that share most of their code."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases that are much like others to the soak run: further kinds of stores for code above the
    stores, a second kind of each family of tables, and what tests that are marked have of them.
    """
    _leave_to_soak(items, _kind_apart, lambda item: 1)
    _leave_to_soak(items, _function, _few)
    # Short files at the end, so that no worker waits long for the last one.
    places = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(_folder(item), len(places)))


def _leave_to_soak(
    items: list[pytest.Item],
    group: Callable[[pytest.Item], str | None],
    count: Callable[[pytest.Item], int],
) -> None:
    """Mark all but some tests of each group: by chance, so that each kind has its share, but always the same
    ones.
    """
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = None if item.get_closest_marker("soak") else group(item)
        if name is not None:
            alike.setdefault(name, []).append(item)
    for others in alike.values():
        others.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in others[count(others[0]) :]:
            item.add_marker(pytest.mark.soak)


def _kind_apart(item: pytest.Item) -> str | None:
    """The test but for the kind of store or table; None if all kinds are run."""
    if item.get_closest_marker("all_kinds"):
        return None
    if _folder(item) in _ABOVE_STORES or item.get_closest_marker("one_kind"):
        return _KINDS.sub("*", item.nodeid)
    if _folder(item) == "tables":
        return _KINDS.sub(lambda kind: _FAMILIES[kind[0]], item.nodeid)
    return None


def _function(item: pytest.Item) -> str | None:
    """The test but for its parameters, if a few of its cases are enough."""
    return item.nodeid.partition("[")[0] if item.get_closest_marker("few") else None


def _few(item: pytest.Item) -> int:
    marker = item.get_closest_marker("few")
    assert marker is not None
    count: int = marker.args[0]
    return count


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


@pytest.fixture(scope="session")
def pg_url() -> Iterator[str]:
    """A PostgreSQL database that other processes reach too: PENSTOCK_TEST_PG_URL, or a server of our own."""
    if url := os.environ.get("PENSTOCK_TEST_PG_URL"):
        yield url
        return
    from tests.support.postgres import start_postgres

    server = start_postgres()
    yield server.url
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store that does not exist yet, once for each kind of database."""
    from penstock.testing import temporary_store_url

    with temporary_store_url(
        request.getfixturevalue("pg_url") if request.param == "postgresql" else None
    ) as url:
        yield url


@pytest.fixture
def store(store_url: str) -> Iterator[Any]:
    """A new, open store."""
    import penstock

    opened = penstock.connect(store_url, create=True)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def decoding_server() -> None:
    """The server under test is one that feeds can read."""
    from tests.support.pgtools import server_version

    if server_version() < 15:
        pytest.skip("feeds need PostgreSQL 15")


@pytest.fixture(scope="session")
def logical_pg_url(decoding_server: None) -> Iterator[str]:
    """A PostgreSQL database of our own with wal_level=logical, where slots can be made and dropped."""
    from tests.support.postgres import start_postgres

    server = start_postgres()
    yield server.url
    server.stop()


@pytest.fixture
def source(logical_pg_url: str) -> Iterator[Any]:
    """A schema of that database, with a publication of its tables."""
    from tests.support.postgres_source import source_at

    with source_at(logical_pg_url) as made:
        yield made


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of the run: local[2], UTC, two shuffle partitions."""
    from tests.support.sparks import make_spark
    from tests.support.warm import warm_workers

    with warm_workers():
        session = make_spark(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def penstock_spark(spark: SparkSession) -> SparkSession:
    """The session of the fixtures that Penstock's plugin has."""
    return spark


@pytest.fixture
def run_child(tmp_path: Path) -> Iterator[Callable[..., ChildProcess]]:
    """`run_child(script_or_module, *args, env=)`: a child.

    Neither it nor its JVM and workers outlive the test.
    """
    children: list[ChildProcess] = []

    def run(script_or_module: str | Path, *args: object, **options: Any) -> ChildProcess:
        options.setdefault("log", tmp_path / f"child-{len(children)}.log")
        children.append(start_child(script_or_module, *args, **options))
        return children[-1]

    yield run
    for child in children:
        child.kill_tree()
