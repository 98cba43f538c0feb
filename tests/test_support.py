"""The fixtures work as promised: the results of other tests depend on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
from pyspark.sql import SparkSession

from penstock.testing.stores import drop_schema
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

RunChild = Callable[..., ChildProcess]


def test_a_timeout_of_wait_until_names_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match="the tide turns"):
        wait_until(lambda: 0, timeout=0.05, message="the tide turns")


def test_postgres_has_logical_decoding_and_no_fsync(pg_url: str) -> None:
    with psycopg.connect(pg_url) as connection:
        for setting, value in {
            "fsync": "off",
            "synchronous_commit": "on",
            "wal_level": "logical",
            "TimeZone": "UTC",
        }.items():
            assert connection.execute(f"SHOW {setting}").fetchone() == (value,)


def test_a_schema_can_be_dropped_despite_an_open_transaction(pg_url: str) -> None:
    with psycopg.connect(pg_url) as left_open, psycopg.connect(pg_url, autocommit=True) as other:
        other.execute("CREATE SCHEMA t_left CREATE TABLE held (n int)")
        left_open.execute("INSERT INTO t_left.held VALUES (1)")
        drop_schema(pg_url, "t_left")
        assert other.execute("SELECT to_regnamespace('t_left')").fetchone() == (None,)
        with pytest.raises(psycopg.OperationalError):
            left_open.execute("SELECT 1")


def test_a_store_url_points_to_an_empty_place(store_url: str) -> None:
    if store_url.startswith("sqlite:"):
        file = Path(store_url.removeprefix("sqlite:///"))
        assert file.is_absolute()
        assert list(file.parent.iterdir()) == []
        return
    url, _, schema = store_url.rpartition("?schema=")
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT to_regnamespace(%s)", [schema]).fetchone() == (None,)


def test_postgres_stops_when_the_process_that_started_it_is_killed(
    run_child: RunChild, tmp_path: Path
) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal
            from tests.support.postgres import start_postgres
            server = start_postgres()
            print("directory", server.directory, flush=True)
            signal.pause()
            """
        )
    )
    child = run_child(script)
    directory = Path(child.wait_for_line("directory").split()[1])
    assert (directory / "data" / "postmaster.pid").exists()
    servers = [process for process in child.processes() if process.name() == "postgres"]
    assert servers
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: not directory.exists(), message="the guard removes the server's directory")
    assert not [
        server for server in servers if server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    ]


def test_the_session_is_small_and_in_utc(spark: SparkSession) -> None:
    assert spark.sparkContext.master == "local[2]"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.range(3).mapInArrow(lambda batches: batches, "id long").count() == 3


def test_killing_a_child_kills_its_jvm_and_python_workers(run_child: RunChild, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            from tests.support.sparks import make_spark

            def stay(batches):
                print("working", flush=True, file=sys.stderr)
                time.sleep(600)
                yield from batches

            make_spark(Path(sys.argv[1])).range(1).mapInArrow(stay, "id long").collect()
            """
        )
    )
    child = run_child(script, tmp_path / "spark")
    child.wait_for_line("working")
    before = {process.name() for process in child.processes()}
    assert "java" in before
    assert len(child.processes()) >= 4  # driver, JVM, worker daemon, worker
    child.kill_tree()
    assert child.returncode == -signal.SIGKILL
    assert child.processes() == []


def test_processes_left_by_a_driver_that_killed_itself_are_found(run_child: RunChild, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text("import subprocess, os\nsubprocess.Popen(['sleep', '600'])\nos.kill(os.getpid(), 9)\n")
    child = run_child(script)
    assert child.wait() == -signal.SIGKILL
    assert [process.name() for process in child.processes()] == ["sleep"]
    child.kill_tree()
    assert child.processes() == []


def test_the_output_of_a_child_that_ends_early_is_shown(run_child: RunChild, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text("print('before')\nraise SystemExit(3)\n")
    child = run_child(script)
    with pytest.raises(AssertionError, match=r"ended with 3(.|\n)*before"):
        child.wait_for_line("after")


def test_child_processes_can_import_what_tests_import() -> None:
    subprocess.run([sys.executable, "-c", "import penstock, tests.support"], check=True)
