"""What Spark shows and keeps of feeds and tables that need secrets: plans, event log, errors, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.feeds.contract import DEAD_LETTERS
from penstock.feeds.protocol import Feed
from penstock.testing import temporary_store_url
from tests.feeds.delta.tables import History
from tests.feeds.delta.tables import rows as delta_rows
from tests.feeds.iceberg.lake import Lake
from tests.feeds.iceberg.lake import rows as iceberg_rows
from tests.support.debezium_events import postgres
from tests.support.exposure import error_text, event_log, explained, files_in
from tests.support.postgres_source import Source

SECRET = "0nlyForTheStorage"
OPTIONS = {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SECRET}


def of_delta(folder: Path, source: Source) -> Feed:
    History(folder / "delta", feed=False, partitioned=False).append(delta_rows((1, "a", 1.0)))
    return penstock.DeltaFeed(folder / "delta", "id", storage_options=OPTIONS)


def of_iceberg(folder: Path, source: Source) -> Feed:
    lake = Lake(folder / "lake")
    lake.table().append(iceberg_rows((1, "a", 1)))
    secrets = {"token": SECRET, "s3.secret-access-key": SECRET, "credential": f"me:{SECRET}"}
    return penstock.IcebergFeed("shop.orders", properties={**lake.properties, **secrets}, row_id="id")


def of_postgres(folder: Path, source: Source) -> Feed:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a')")
    return source.feed(snapshot="initial")


def check(shown: list[str], folder: Path, secret: str, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "shown").write_text("\n".join([*shown, *capfd.readouterr()]))
    written = files_in(folder)
    forms = {secret.encode(), quote(secret).encode()}
    assert [name for name, content in written.items() if any(form in content for form in forms)] == []
    # What there is to be seen was looked at.
    assert (
        b"".join(written[name] for name in written if "events/" in name).count(b"SparkListenerJobStart") > 1
    )
    assert any(name.endswith("offsets/0") for name in written)


@pytest.mark.parametrize("make", [of_delta, of_iceberg, of_postgres])
def test_the_secrets_of_a_feed_and_of_a_delta_table_are_never_shown(
    spark: SparkSession,
    source: Source,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[Path, Source], Feed],
) -> None:
    with event_log(spark, tmp_path / "events"):
        feed = make(tmp_path, source)
        url = f"delta://{tmp_path}/tables?" + "&".join(f"storage.{name}={SECRET}" for name in OPTIONS)
        sink = penstock.TableSink("copy", ["id"], url, apply_changes=True)
        pipeline = penstock.stream(spark, feed).write(sink)
        query = pipeline.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now())
        query.awaitTermination()
        if make is of_postgres:
            source.run(f"INSERT INTO {source.name}.t VALUES (2, 'b')")
        read = penstock.changes.read(spark, feed)
        read.collect()
        assert DeltaTable(tmp_path / "tables" / "copy").to_pyarrow_table().num_rows == 1
        shown = [
            explained(read),
            explained(penstock.changes.read_stream(spark, feed.url)),
            str([progress.json for progress in query.recentProgress]),
            f"{feed!r} {feed.name} {sink!r} {pipeline!r}",
            error_text(lambda: read.selectExpr("raise_error(_change_type)").collect()),
            error_text(
                lambda: penstock.changes.read(spark, feed.url.replace("orders", "none")[:-1] + "x&bad=1")
            ),
        ]
    check(shown, tmp_path, SECRET, capfd)
    if make is of_postgres:
        check(shown, tmp_path, str(urlsplit(source.url).password), capfd)


def test_the_password_of_a_dead_letter_queue_is_never_shown(
    spark: SparkSession, pg_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with temporary_store_url(pg_url) as url, event_log(spark, tmp_path / "events"):
        with penstock.connect(url, create=True) as store:
            store.create_queue("dead", DEAD_LETTERS)
        (tmp_path / "in").mkdir()
        events = [postgres("c", after={"id": 1, "name": "a"}), "bad"]
        pq.write_table(pa.table({"value": events}), tmp_path / "in" / "0.parquet")
        dead = penstock.QueueSink("dead", url=url)
        feed = penstock.DebeziumFeed("id bigint not null, name string", "id", dead_letters=dead)
        changes = feed.unwrap(spark.readStream.schema("value string").parquet(str(tmp_path / "in")))
        query = (
            changes.writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "ck"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

        def failing() -> DataFrame:
            wrong = penstock.QueueSink("none", url=url)
            other = penstock.DebeziumFeed("id bigint not null", "id", dead_letters=wrong)
            return other.unwrap(spark.read.parquet(str(tmp_path / "in")))

        batch = feed.unwrap(spark.read.parquet(str(tmp_path / "in")))
        assert batch.count() == 1
        shown = [
            explained(changes),
            explained(batch),
            str([progress.json for progress in query.recentProgress]),
            f"{feed!r} {dead!r}",
            error_text(failing),
            error_text(lambda: batch.selectExpr("raise_error(name)").collect()),
        ]
    check(shown, tmp_path, str(urlsplit(url).password), capfd)
