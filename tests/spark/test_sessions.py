"""Other kinds of sessions than the shared one, each in its own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.processes import ChildProcess

PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., ChildProcess]
postgres_only = pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)


def output(child: ChildProcess) -> str:
    assert child.wait(180) == 0, child.output[-4000:]
    return child.output


@postgres_only
def test_an_unregistered_session_works_and_does_not_show_the_password(run_child: Run, store_url: str) -> None:
    said = output(run_child(PROGRAMS / "unregistered.py", store_url))
    assert "READ 3\n" in said
    assert "WROTE 6" in said
    assert said.count("\nREFUSED ") == 5
    for words in (
        "Did you mean 'orders'",
        "Did you mean 'billing'",
        "Did you mean 'id'",
        "guarantee='often'",
    ):
        assert words in said
    assert "INFO" in said, "the log has something to say"
    assert said.count("UI ") >= 4
    password = urlsplit(store_url).password
    assert password
    assert password not in said


@pytest.mark.crash_full
def test_failed_tasks_are_retried_and_rows_are_written_once(run_child: Run, store_url: str) -> None:
    lines = output(run_child(PROGRAMS / "retries.py", store_url)).splitlines()
    ids = [*range(5), *range(10, 15), *range(20, 25)]
    assert f"exactly_once {ids} 0" in lines
    assert f"idempotent {ids} 0" in lines
    # The attempts that failed leave their staging to the clean-up of old ones.
    assert any(line.startswith(f"batch {list(range(9))}") for line in lines)


@postgres_only
@pytest.mark.crash_full
def test_queries_run_on_a_cluster(run_child: Run, store_url: str, tmp_path: Path) -> None:
    said = output(run_child(PROGRAMS / "cluster.py", f"sqlite:///{tmp_path}/penstock.db", store_url))
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(("REFUSED", "TAKEN"))] == [
        ["REFUSED", "True"]
    ] * 3
    assert "IDS [0, 1, 2]" in said
    few, many = (int(line.split()[2]) for line in said.splitlines() if line.startswith("SESSIONS"))
    assert many <= few, (
        "connections grow with the Python workers, of which each slot has one, and not with tasks"
    )


@postgres_only
@pytest.mark.crash_full
def test_tasks_and_driver_encrypt_where_spark_does(run_child: Run, store_url: str, tmp_path: Path) -> None:
    said = output(run_child(PROGRAMS / "encrypted_cluster.py", store_url, tmp_path)).splitlines()
    assert "CONTINUOUS [0, 1, 2]" in said
    assert "MESSAGES True False" in said, "none of them can be read"
    assert "CHANGES [2]" in said
    assert "QUESTIONS True" in said
