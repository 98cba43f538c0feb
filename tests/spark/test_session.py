"""``penstock.session``: settings that can only be given at the start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError, InvalidUrlError
from penstock.pipeline.initial_batch import InitialBatchSource
from penstock.spark import session
from penstock.spark.internals.sessions import jvm_of
from tests.support.spark_queues import one_store

_READ_FROM_HADOOPS = "spark.sql.streaming.checkpointFileManagerClass"
"""Spark (4.2, 4.3) takes it from Hadoop's configuration, and does not list it among its own."""


class Builder:
    """Stands in for Spark's, and notes what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}

    def appName(self, name: str) -> Builder:  # noqa: N802 - Spark's name
        self.given["spark.app.name"] = name
        return self

    def master(self, master: str) -> Builder:
        self.given["spark.master"] = master
        return self

    def config(self, key: str, value: str) -> Builder:
        self.given[key] = value
        return self

    def getOrCreate(self) -> Builder:  # noqa: N802 - Spark's name
        return self


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What a session is started with, and what is set once it runs."""
    found: dict[str, dict[str, str]] = {"later": {}}
    builder = Builder()
    found["start"] = builder.given
    monkeypatch.setattr(session.SparkSession, "builder", builder)
    monkeypatch.setattr(session, "running_context", lambda: None)
    monkeypatch.setattr(session, "_register_or_stop", lambda _, later: found["later"].update(later))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    return found


def test_a_session_for_stateless_queries_is_optimised_and_keeps_two_micro_batches(
    made: dict[str, dict[str, str]],
) -> None:
    penstock.session("app", master="local[2]", memory="3g")
    start = made["start"]
    assert (start["spark.app.name"], start["spark.master"]) == ("app", "local[2]")
    assert start["spark.driver.memory"] == "3g"
    assert start["spark.sql.streaming.minBatchesToRetain"] == "2"
    assert start["spark.sql.adaptive.streaming.stateless.enabled"] == "true"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_a_session_for_stateful_queries_keeps_sparks_defaults(made: dict[str, dict[str, str]]) -> None:
    penstock.session(stateful=True)
    assert not {key for key in made["start"] if "minBatchesToRetain" in key or "adaptive" in key}


def test_pipelined_python_udfs_are_enabled_on_request(
    made: dict[str, dict[str, str]],
) -> None:
    setting = "spark.python.udf.pipelined.enabled"
    penstock.session()
    assert setting not in made["start"]
    penstock.session(pipelined=True)
    assert made["start"][setting] == "true"


def test_settings_of_the_user_take_precedence(made: dict[str, dict[str, str]]) -> None:
    penstock.session(conf={"spark.sql.session.timeZone": "Asia/Tokyo", "spark.pyspark.python": "/opt/python"})
    assert made["start"]["spark.sql.session.timeZone"] == "Asia/Tokyo"
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_the_store_url_is_not_in_the_command_line(made: dict[str, dict[str, str]]) -> None:
    penstock.session(url="postgresql://app:s3cret@host/db", conf={"spark.penstock.guarantee": "idempotent"})
    assert not {key for key in made["start"] if key.startswith("spark.penstock.")}
    assert made["later"] == {
        "spark.penstock.url": "postgresql://app:s3cret@host/db",
        "spark.penstock.guarantee": "idempotent",
    }


def test_a_malformed_url_is_refused_before_spark_starts(made: dict[str, dict[str, str]]) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        penstock.session(url="postgresql://app:s3cret/x@host/db")
    assert "s3cret" not in str(caught.value)
    assert not made["start"]


def test_a_password_that_spark_was_started_with_is_warned_of(tmp_path: Path) -> None:
    """It is on the command line of the JVM by then."""
    program = (
        "import penstock\n"
        "from tests.support.sparks import make_spark\n"
        "from pathlib import Path\n"
        f"spark = make_spark(Path({str(tmp_path)!r}), spark__penstock__url='postgresql://app:s3cret@host/db')\n"
        "penstock.register(spark)\n"
        "assert spark.conf.get('spark.penstock.url') == 'postgresql://app@host/db'\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert "the password in spark.penstock.url was set before Spark started" in found.stderr
    assert "s3cret" not in found.stderr


@one_store
def test_a_second_session_is_refused(spark: SparkSession, store_url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"SESSION_RUNNING\] a Spark session is already running"):
        penstock.session(url=store_url)


def test_spark_knows_every_setting_of_a_session(spark: SparkSession) -> None:
    """A setting with a wrong name would silently do nothing."""
    keys = [
        key
        for key in session.session_settings(stateful=False, pipelined=False)
        if key.startswith("spark.sql.")
    ]
    assert {key for key in keys if not spark.conf.isModifiable(key)} == {_READ_FROM_HADOOPS}


def test_a_local_checkpoint_starts_no_process_for_each_file_link(spark: SparkSession, tmp_path: Path) -> None:
    """The class has to exist, and queries of the session have to write their checkpoints with it."""
    chosen = session.session_settings(stateful=False, pipelined=False)[_READ_FROM_HADOOPS]
    checkpointing = jvm_of(spark).org.apache.spark.sql.execution.streaming.checkpointing
    files = checkpointing.CheckpointFileManager
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    conf.set(_READ_FROM_HADOOPS, chosen)
    path = spark._jvm.org.apache.hadoop.fs.Path(str(tmp_path))  # type: ignore[union-attr]
    assert files.create(path, conf).getClass().getName() == chosen


def test_threads_register_a_source_at_the_same_time(spark: SparkSession) -> None:
    together = threading.Barrier(8)

    def register(fresh: SparkSession) -> None:
        together.wait(60)
        session.register_source(fresh, InitialBatchSource)

    for _ in range(5):
        fresh = spark.newSession()
        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(register, fresh) for _ in range(8)]:
                done.result()
