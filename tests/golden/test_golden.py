"""Stores and checkpoints of released versions are read, and their queries continue.

Each folder beside this file belongs to one version; ``scripts/make_golden.py`` made it.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import ProducerFencedError
from penstock.store import store_schema
from tests.golden.contents import (
    COPIED,
    CUSTOMERS,
    DIALECTS,
    FOLDER,
    LIMIT,
    NOON,
    PASSED,
    SCHEMA,
    SEQUENCE,
    SESSION,
    cases,
    copy_name,
    describe,
    orders,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS = sorted(path.name for path in FOLDER.iterdir() if (path / "made_with.json").exists())
MOST_BYTES = 300_000


@dataclass(frozen=True)
class Golden:
    """A store of an earlier version, with its checkpoints, in the test's own folder."""

    version: str
    dialect: str
    url: str
    folder: Path

    @property
    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (FOLDER / self.version / self.dialect / "expected.json").read_text()
        )
        return found

    def checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def require_spark(self) -> None:
        """Skip the test if Spark is older than the version that wrote the checkpoint."""
        import pyspark

        made_with = json.loads((FOLDER / self.version / "made_with.json").read_text())["spark"]
        if _numbers(pyspark.__version__) < _numbers(made_with):
            pytest.skip(f"the checkpoints are of Spark {made_with}")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@pytest.fixture(params=[(version, dialect) for version in VERSIONS for dialect in DIALECTS], ids="-".join)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Golden]:
    version, dialect = request.param
    source = FOLDER / version / dialect
    shutil.copytree(source / "checkpoints", tmp_path / "checkpoints")
    if dialect == "sqlite":
        (tmp_path / "store.db").write_bytes(gzip.decompress((source / "store.db.gz").read_bytes()))
        yield Golden(version, dialect, f"sqlite:///{tmp_path}/store.db", tmp_path)
        return
    import psycopg

    from penstock.testing.stores import drop_schema, with_schema

    pg_url, schema = request.getfixturevalue("pg_url"), f"t_{uuid.uuid4().hex}"
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute((source / "store.sql").read_text().replace(SCHEMA, schema).encode())
    yield Golden(version, dialect, with_schema(pg_url, schema), tmp_path)
    drop_schema(pg_url, schema)


@pytest.fixture
def store(golden: Golden) -> Iterator[penstock.Store]:
    with penstock.connect(golden.url, create=False) as opened:
        yield opened


def test_each_release_has_a_golden_store() -> None:
    changes = (FOLDER.parents[1] / "CHANGELOG.md").read_text()
    assert set(re.findall(r"^## \[?(\d[^]\s]*)", changes, re.MULTILINE)) <= set(VERSIONS)
    assert penstock.__version__ in VERSIONS


def test_each_golden_store_is_small_and_has_no_absolute_paths() -> None:
    for version in VERSIONS:
        files = [path for path in (FOLDER / version).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < MOST_BYTES
        for path in files:
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            assert b"/tmp" not in text, path


def test_a_golden_store_opens_with_its_contents(golden: Golden, store: penstock.Store) -> None:
    expected = golden.expected
    found = describe(store)
    assert found.keys() == expected.keys()
    for part in expected:
        assert found[part] == expected[part], part
    assert store.info().version == store_schema.VERSION
    with penstock.connect(golden.url, create=False) as again:
        assert describe(again) == found


def test_a_golden_store_can_be_used_further(golden: Golden, store: penstock.Store) -> None:
    """Keys keep their partitions, even after the queue grows; sessions and offsets continue; maintenance
    works.
    """
    queue = store.queue("orders")
    homes = {
        row["customer"]: partition
        for partition in range(queue.partitions)
        for row in queue.read(partition, 0, columns=["customer"]).to_pylist()
    }
    assert len(homes) == CUSTOMERS
    before = queue.info().rows
    queue.add_partitions(1)
    for n, row in enumerate(orders(range(1000, 1000 + CUSTOMERS))):
        assert set(queue.append([row]).ranges) == {homes[row["customer"]]}, n
    producer = store.producer("orders", SESSION)
    assert (producer.sequence, producer.epoch) == (SEQUENCE, 2)
    assert producer.append(orders([90]), sequence=SEQUENCE).skipped
    assert producer.append(orders([2000])).rows == 1
    later = store.producer("orders", SESSION)
    assert later.epoch == 3
    with pytest.raises(ProducerFencedError):
        producer.append(orders([2001]))
    rows = [queue.read(partition, 0) for partition in range(queue.partitions)]
    queue.compact()
    assert [queue.read(partition, 0) for partition in range(queue.partitions)] == rows
    assert sum(map(len, rows)) == before + CUSTOMERS + 1
    billing = store.consumer("billing")
    pull = billing.pull("orders", 0)
    assert pull.start == billing.offsets("orders")[0] > 0
    assert queue.trim(0, pull.end) == pull.start, "it is vital, and has not read the rest"
    billing.advance("orders", 0, old=pull.start, new=pull.end)
    assert queue.trim(0, pull.end) == pull.end - pull.start
    store.maintain()


def test_a_golden_store_gets_columns(store: penstock.Store) -> None:
    for name in store.queues():
        queue = store.queue(name)
        before = [queue.read(part.partition, part.first_index) for part in queue.info().partitions]
        queue.add_columns(pa.field("added", pa.string()))
        after = [queue.read(part.partition, part.first_index) for part in queue.info().partitions]
        assert [table.drop_columns(["added"]) for table in after] == before, name
        assert all(table["added"].null_count == len(table) for table in after)
        queue.compact()
        assert [queue.read(part.partition, part.first_index) for part in queue.info().partitions] == after


def test_a_golden_feed_continues(golden: Golden, store: penstock.Store) -> None:
    feed = penstock.QueueFeed("flights", golden.url)
    opened = feed.open()
    assert (opened.newest(-1), opened.oldest()) == (2, -1)
    feed.append_commit(3, NOON, [{"id": 9, "status": "new", "_change_type": "insert"}])
    assert [(each.version, each.rows) for each in opened.commits(-1, 3)] == [(1, 4), (2, 2), (3, 1)]


def test_micro_batch_queries_continue(golden: Golden, store: penstock.Store, spark: SparkSession) -> None:
    """One was killed with rows staged, one between the sink's commit and Spark's."""
    from tests.support.crash.cases import check_complete
    from tests.support.crash.child import start

    golden.require_spark()
    penstock.register(spark)
    found = cases(golden.dialect, golden.url, str(golden.folder))
    apps = {json.loads((golden.checkpoint(case.name) / "metadata").read_text())["id"] for case in found}
    assert len(apps & _staged(store)) == 1
    for case in found:
        case.append(2)
    for query in [start(spark, case, penstock.Trigger.available_now()) for case in found]:
        query.awaitTermination()
    for case in found:
        check_complete(case, 3)
    assert not apps & _staged(store)


def _staged(store: penstock.Store) -> set[str]:
    """The apps that have rows staged."""
    return {row.app_id for row in store.database.run(lambda tx: tx.all("staged_apps"), write=False)}


def test_a_continuous_query_continues(golden: Golden, store: penstock.Store, spark: SparkSession) -> None:
    """It was killed between the sink's commit and its log's; either engine continues from its checkpoint."""
    from tests.support.copies import filter_and_double

    golden.require_spark()
    name = copy_name(golden.dialect)
    source, sink = store.queue(f"{name} in"), store.queue(name)
    assert sink.schema.equals(COPIED)
    count = source.info().rows
    for trigger in (penstock.Trigger.continuous("50 ms"), penstock.Trigger.available_now()):
        source.append([{"id": n} for n in range(count, count + 6)])
        count += 6
        stream = penstock.stream(spark, penstock.QueueSource(f"{name} in", name, golden.url)).transform(
            filter_and_double
        )
        query = stream.write(penstock.QueueSink(name, golden.url)).start(
            checkpoint=golden.checkpoint(name), trigger=trigger
        )
        if trigger == penstock.Trigger.available_now():
            query.awaitTermination()
        else:
            query.processAllAvailable()
            query.stop()
        found = [row for p in range(sink.partitions) for row in sink.read(p, 0).to_pylist()]
        expected = [{"id": n, "twice": 2 * n} for n in range(count) if n % 3]
        assert sorted(found, key=lambda row: row["id"]) == expected
        assert store.consumer(name).lag(f"{name} in").rows == 0


def test_a_limit_continues_from_its_count(golden: Golden, store: penstock.Store, spark: SparkSession) -> None:
    golden.require_spark()
    penstock.register(spark)
    queue, out = store.queue("in"), store.queue("out")
    assert sum(out.read(p, 0).num_rows for p in range(out.partitions)) == PASSED
    queue.append([{"id": n, "name": "new"} for n in range(100, 100 + LIMIT)])
    stream = penstock.stream(spark, penstock.QueueSource("in", consumer="c", url=golden.url)).limit(LIMIT)
    checkpoint = golden.checkpoint(f"limited_{golden.dialect}")
    assert str(penstock.limits.limit_progress(checkpoint)) == f"{PASSED} of {LIMIT}"
    query = stream.write(penstock.QueueSink("out", url=golden.url)).start(checkpoint=checkpoint)
    assert query.awaitTermination(60)
    ids = [n for p in range(out.partitions) for n in out.read(p, 0)["id"].to_pylist()]
    assert len(ids) == len(set(ids)) == LIMIT
