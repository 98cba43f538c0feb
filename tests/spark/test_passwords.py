"""What Spark shows and keeps of queries whose store has a password: plans, event log, errors, checkpoints,
processes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidOptionError, InvalidUrlError
from penstock.spark.session import default_url
from tests.support.exposure import error_text, event_log, explained, files_in
from tests.support.spark_queues import SCHEMA, batch, run, stream, table


@pytest.fixture
def url(pg_url: str) -> Iterator[str]:
    yield f"{pg_url}?schema=leaks"
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("drop schema if exists leaks cascade")
        connection.execute("drop table if exists public.leaks")


@pytest.fixture
def events(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """A folder with its own event log."""
    with event_log(spark, tmp_path / "events") as folder:
        yield folder


def command_lines() -> str:
    """What everybody on the machine sees of the JVM and the workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return "\n".join(found)


def test_the_password_is_never_shown(
    spark: SparkSession, url: str, events: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with penstock.connect(url) as store:
        store.create_queue("orders", SCHEMA, partitions=2).append(table(range(3)))
        store.create_queue("out", SCHEMA)
        for name in ("c", "d"):
            store.create_consumer(name).register("orders")
    spark.conf.set("spark.penstock.url", url)
    try:
        penstock.register(spark)
        read = batch(spark, url).where("id > 0")
        shown = [
            explained(read),
            error_text(lambda: penstock.changes.read(spark, f"queue:orders?store={url}")),
        ]
        read.write.format("penstock").options(url=url).mode("append").save("out")
        run(stream(spark, url), url, "out", tmp_path / "ck1", guarantee="exactly_once")
        kept = penstock.stream(spark, penstock.QueueSource("orders", "c", url)).limit(2)
        sink = penstock.TableSink("public.leaks", keys=["id"], url=url)
        for query, trigger in (
            (kept.write(sink), penstock.Trigger.available_now()),
            (
                penstock.stream(spark, penstock.QueueSource("orders", "d")).write(penstock.QueueSink("out")),
                penstock.Trigger.continuous("100 ms"),
            ),
        ):
            started = query.start(checkpoint=str(tmp_path / f"ck {trigger}"), trigger=trigger)
            started.processAllAvailable()
            shown.append(command_lines())
            started.stop()
        shown += [
            error_text(lambda: batch(spark, url, "no_such_queue").collect()),
            error_text(lambda: read.selectExpr("raise_error(name)").collect()),
            error_text(lambda: batch(spark, url.replace("@", "x@", 1)).collect()),
            error_text(lambda: batch(spark, f"{url}&bad option").collect()),
            str(spark.conf.getAll),
        ]
    finally:
        spark.conf.unset("spark.penstock.url")
        penstock.register(spark)
    (tmp_path / "shown").write_text("\n".join([*shown, *capfd.readouterr()]))
    written = files_in(tmp_path)
    password = str(urlsplit(url).password).encode()
    assert [name for name, content in written.items() if password in content] == []
    # What there is to be seen was looked at.
    log = b"".join(content for name, content in written.items() if name.startswith("events/"))
    assert log.count(b"SparkListenerJobStart") > 3
    assert b"spark.penstock.url" in log
    assert b"pyspark.daemon" in written["shown"] or b"tests.support.daemon" in written["shown"]
    assert sum(name.endswith("offsets/0") for name in written) == 3


@pytest.mark.parametrize("setting", ["spark.penstock.url", "spark.penstock.URL"])
def test_the_url_setting_of_a_session_is_replaced_by_one_without_the_password(
    spark: SparkSession, url: str, setting: str
) -> None:
    session = spark.newSession()
    session.conf.set(setting, url)
    assert default_url(session) == url
    for _ in range(2):
        penstock.register(session)
        assert session.conf.get(setting) != url
        assert default_url(session) == url
    session.conf.set(setting, "sqlite:///x.db")
    penstock.register(session)
    assert default_url(session) == "sqlite:///x.db"
    session.conf.unset(setting)
    assert default_url(session) is None


@pytest.mark.parametrize("setting", ["spark.penstock.url", "spark.penstock.Url"])
def test_a_malformed_url_setting_is_refused_and_removed(spark: SparkSession, setting: str) -> None:
    """Its password cannot be told from the rest, and Spark would log it with each job."""
    session = spark.newSession()
    session.conf.set(setting, "postgresql://app:s3cret/x@db/shop")
    with pytest.raises(InvalidUrlError) as caught:
        penstock.register(session)
    assert "s3cret" not in str(caught.value)
    assert session.conf.get(setting, None) is None


@pytest.mark.parametrize("setting", ["spark.penstock.ulr", "spark.penstock.limitUrl"])
def test_an_unknown_setting_is_refused_and_removed(spark: SparkSession, setting: str) -> None:
    session = spark.newSession()
    session.conf.set(setting, "postgresql://app:s3cret@db/shop")
    with pytest.raises(InvalidOptionError, match="unknown setting") as caught:
        penstock.register(session)
    assert "s3cret" not in str(caught.value)
    assert session.conf.get(setting, None) is None


@pytest.mark.parametrize("place", ["path", "queue"])
def test_a_url_in_the_place_of_a_name_is_shown_without_its_password(
    spark: SparkSession, url: str, events: Path, place: str
) -> None:
    penstock.connect(url).create_queue("orders", SCHEMA)
    wrong = url.replace("://", "://app:s3cret@", 1) if "@" not in url else url.replace("@", ":s3cret@", 1)
    options = {"url": url, "queue": "orders", place: wrong}
    with pytest.raises(PySparkException, match=r"INVALID_NAME|CONFLICT") as caught:
        spark.readStream.format("penstock").options(**options).load()
    assert "s3cret" not in str(caught.value)
    assert b"s3cret" not in b"".join(files_in(events).values())


def test_a_marked_password_is_nowhere_after_a_run_of_everything(url: str, tmp_path: Path) -> None:
    """Logs of Spark and Penstock, event log, plans, checkpoints, web pages, metrics, commands, processes."""
    password = str(urlsplit(url).password).encode()
    run = subprocess.run(
        [sys.executable, "-m", "tests.spark.programs.marked_password", url, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
        check=False,
    )
    output = run.stdout
    assert run.returncode == 0, output[-5000:].decode(errors="replace")
    (tmp_path / "output").write_bytes(output)
    with psycopg.connect(url.partition("?")[0]) as connection:
        found = connection.execute("select json_agg(query)::text from leaks.query")
        (tmp_path / "store").write_text(str(found.fetchone()))
    written = files_in(tmp_path)
    assert [name for name, content in written.items() if password in content] == []
    # What there is to be seen was looked at.
    log = b"".join(content for name, content in written.items() if name.startswith("events/"))
    assert log.count(b"SparkListenerJobStart") > 3
    assert b"spark.penstock.url" in log
    assert b"USER_RAISED_EXCEPTION" in written["store"]
    assert sum(name.endswith("offsets/0") for name in written) == 3
    for seen in (
        b"INFO", b"DEBUG:penstock", b"PLAN", b"FAILED", b"pyspark.daemon", b"org.apache.spark.deploy",
        b"SPARK PAGE",
        b"penstock_store_up 1.0", b"penstock_query_batch", b"\"queries\":[", b"COMMAND", b"PROGRESS",
    ):  # fmt: skip
        assert seen in output, seen
