"""Queues in object storage, compared with tasks that put and get the same bytes themselves.

It uses a cluster of two executors, PostgreSQL, and an S3 server that keeps its objects in memory (moto). The
peer's tasks receive or return the same rows, and put or get their bytes in objects of the same size.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock
from bench.harness import Result, scratch, speed, timed
from penstock.store.log.payloads import OBJECT_BYTES
from tests.support.object_store import object_store, settings

TASKS = 2
ROW_BYTES = 16 << 10
"""Bytes of a row. They are random, so they cannot be compressed."""
ROWS = (64 << 20) // ROW_BYTES
SCHEMA = pa.schema([("data", pa.binary())])
_BUCKET = "rows"
_MIN_RATIO = 0.8


def objects(url: str) -> list[Result]:
    """Measure writing and reading 64 MiB."""
    with scratch() as folder, _server(), _cluster(folder) as spark, penstock.connect(url) as store:
        rows = _random_rows(spark)
        names = _put(rows, "peer")

        def write() -> float:
            name = uuid.uuid4().hex
            store.create_queue(name, SCHEMA, partitions=TASKS, payloads=f"s3://{_BUCKET}/queues")
            writer = rows.write.format("penstock").option("url", url).mode("append")
            try:
                return timed(lambda: writer.save(name))
            finally:
                queue_id = store.queue(name).record.queue_id
                store.drop_queue(name)
                _delete(f"queues/{store.uuid}/{queue_id}/")

        def put() -> float:
            name = uuid.uuid4().hex
            try:
                return timed(lambda: _put(rows, name))
            finally:
                _delete(name)

        store.create_queue("read", SCHEMA, partitions=TASKS, payloads=f"s3://{_BUCKET}/queues")
        rows.write.format("penstock").option("url", url).mode("append").save("read")
        ours = spark.read.format("penstock").options(url=url, rowsPerTask=ROWS // TASKS).load("read")
        peer = _get(spark, names)
        for frame in (ours, peer):
            if _size(frame) != ROWS * ROW_BYTES:
                raise SystemExit("some rows are missing")
        return [
            speed(
                "Spark writes 64 MiB to a bucket / the same PUTs",
                write,
                put,
                least=_MIN_RATIO,
                rounds=5,
            ),
            speed(
                "Spark reads 64 MiB from a bucket / the same GETs",
                lambda: timed(lambda: _size(ours)),
                lambda: timed(lambda: _size(peer)),
                least=_MIN_RATIO,
                rounds=5,
            ),
        ]


def _random_rows(spark: SparkSession) -> DataFrame:
    def generate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                rows = min(256, batch.num_rows - start)
                data = pa.FixedSizeBinaryArray.from_buffers(
                    pa.binary(ROW_BYTES), rows, [None, pa.py_buffer(os.urandom(rows * ROW_BYTES))]
                )
                yield pa.RecordBatch.from_arrays([data.cast(pa.binary())], schema=SCHEMA)

    return spark.range(0, ROWS, 1, TASKS).mapInArrow(generate, "data binary")


def _put(frame: DataFrame, prefix: str) -> list[str]:
    """Write the bytes of the rows into objects; return their names."""

    def put_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bucket, names, part = _bucket(), [], bytearray()

        def send() -> None:
            names.append(f"{prefix}/{uuid.uuid4().hex}")
            bucket.put(names[-1], bytes(part), use_multipart=False)
            part.clear()

        for batch in batches:
            column = batch.column(0)
            offsets = column.buffers()[1]
            value_offsets = memoryview(offsets).cast("i")
            first, last = value_offsets[column.offset], value_offsets[column.offset + len(column)]
            part += memoryview(column.buffers()[2])[first:last]
            if len(part) >= OBJECT_BYTES:
                send()
        if part:
            send()
        yield pa.RecordBatch.from_pydict({"name": names})

    return [row.name for row in frame.mapInArrow(put_rows, "name string").collect()]


def _get(spark: SparkSession, names: list[str]) -> DataFrame:
    """Return a DataFrame of the rows in the objects."""

    def get_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bucket = _bucket()
        for batch in batches:
            for name in batch.column(0).to_pylist():
                data = pa.py_buffer(bucket.get(name).bytes())
                binary_type = pa.binary(ROW_BYTES)
                rows = pa.FixedSizeBinaryArray.from_buffers(binary_type, data.size // ROW_BYTES, [None, data])
                yield pa.RecordBatch.from_arrays([rows.cast(pa.binary())], schema=SCHEMA)

    object_names = spark.createDataFrame([(name,) for name in names], "name string").repartition(TASKS)
    return object_names.mapInArrow(get_rows, "data binary")


def _bucket() -> Any:
    from obstore.store import from_url

    return from_url(f"s3://{_BUCKET}", client_options={"allow_http": True})


def _size(frame: DataFrame) -> int:
    return int(frame.agg(F.sum(F.octet_length("data"))).collect()[0][0])


@contextmanager
def _server() -> Iterator[None]:
    """Run an S3 server on loopback, and set the environment variables for it."""
    with object_store() as server:
        server.bucket(_BUCKET)
        with patch.dict(os.environ, settings(server.endpoint)):
            yield


def _delete(prefix: str) -> None:
    bucket = _bucket()
    for page in bucket.list(prefix):
        bucket.delete([entry["path"] for entry in page])


@contextmanager
def _cluster(folder: Path) -> Iterator[SparkSession]:
    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()
    session = penstock.session(
        "bench",
        master=f"local-cluster[{TASKS},1,1536]",
        conf={
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "1g",
            "spark.ui.showConsoleProgress": "false",
            "spark.local.dir": str(folder / "local"),
        },
    )
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
