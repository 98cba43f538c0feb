"""Stores that live as long as a test, and the pytest plugin that provides them."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

import penstock
from penstock.errors import InvalidUrlError
from penstock.testing import temporary_store, temporary_store_url

pytest_plugins = ["pytester"]

TESTS = """
    import penstock
    import pyarrow as pa

    seen = []

    def test_one(penstock_store):
        queue = penstock_store.create_queue("q", pa.schema([("id", pa.int64())]))
        queue.append([{"id": 1}])
        seen.append(queue.info().rows)

    def test_another(penstock_store_url):
        assert penstock_store_url not in seen
        with penstock.connect(penstock_store_url, create=True) as store:
            assert [queue.name for queue in store.queues()] == []
"""


def test_a_file_is_removed_with_everything_beside_it() -> None:
    with temporary_store_url() as url:
        folder = Path(url.removeprefix("sqlite:///")).parent
        assert list(folder.iterdir()) == []
        with penstock.connect(url, create=True) as store:
            store.create_consumer("c")
    assert not folder.exists()


def test_a_database_schema_is_removed_with_everything_in_it(pg_url: str) -> None:
    with psycopg.connect(pg_url, autocommit=True) as other:

        def schemas() -> set[str]:
            found = other.execute(
                "select nspname from pg_namespace where nspname like 'penstock\\_%'"
            ).fetchall()
            return {name for (name,) in found}

        before = schemas()
        with temporary_store(pg_url) as store:
            store.create_consumer("c")
            (mine,) = schemas() - before
            other.execute(f"create table {mine}.own (id int)".encode())
        assert schemas() == before


def test_a_failing_test_leaves_nothing_behind(pg_url: str) -> None:
    for database in (None, pg_url):
        with pytest.raises(ZeroDivisionError), temporary_store_url(database) as url:
            raise ZeroDivisionError
        with pytest.raises(penstock.errors.StoreNotFoundError), penstock.connect(url, create=False):
            pass


def test_simultaneous_stores_are_separate(pg_url: str) -> None:
    with temporary_store(pg_url) as one, temporary_store(pg_url) as other, temporary_store() as third:
        for store in (one, other, third):
            store.create_consumer("c")


def test_other_kinds_of_databases_are_refused() -> None:
    with (
        pytest.raises(InvalidUrlError, match=r"UNKNOWN_KIND\].*is not a PostgreSQL database"),
        temporary_store_url("sqlite:///x.db"),
    ):
        pass


def test_pytest_finds_the_fixtures_automatically(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_TEST_PG_URL", raising=False)
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess("-v").assert_outcomes(passed=2)


def test_with_a_database_each_test_runs_on_both_stores(
    pytester: pytest.Pytester, pg_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(TESTS)
    monkeypatch.setenv("PENSTOCK_TEST_PG_URL", pg_url)
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_one?sqlite?*", "*test_one?postgresql?*"])
    assert pg_url not in result.stdout.str()
