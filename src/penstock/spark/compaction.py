"""Compaction of a queue by a Spark job, whose tasks read, encode and write separate partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.arguments import in_quotes
from penstock.errors import InvalidOptionError, PenstockError, QueryFailedError, StoreError, error_class
from penstock.queue.checks import check_name
from penstock.queue.store import open_store
from penstock.redaction import sentence
from penstock.spark.error_boundary import iterate_in_worker, original_error
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.internals.sessions import JvmError
from penstock.spark.session import URL_SETTING, default_url
from penstock.store.log import compact as log
from penstock.store.log.decode import is_about_rows
from penstock.store.records import catalog

_TASK_BYTES = 64 << 20
"""The bytes of segments for which a task is worthwhile."""
_TASKS_PER_CORE = 4
"""Several, so that no core waits long for the last task."""
_REPORT = pa.schema(
    [("gone", pa.int64()), *((name, pa.string()) for name in ("kind", "condition", "message"))]
)


def compact(spark: SparkSession, queue: str, *, url: str | None = None) -> int:
    """Compact small segments into large ones in a Spark job; return by how many segments the queue shrank.

    Each task compacts some of the partitions. It reads payloads in the same object with one request, and
    writes new objects of about 8 MiB. Each segment is replaced in one transaction, so readers, writers and
    other compactions continue meanwhile, and a repeated task finds its work done. Tasks connect to the
    database. For a small queue, :meth:`Queue.compact` does the same in this process.

    Parameters
    ----------
    spark
        The session that runs the job.
    queue
        The queue's name.
    url
        The store's URL; by default the session's.

    Raises
    ------
    QueueNotFoundError
        When there is no such queue.
    StoreError
        When segments cannot be read. The segments of other partitions are compacted.
    QueryFailedError
        When Spark could not run the job.
    InvalidOptionError
        When there is no URL, or the store is a SQLite file and the session runs on a cluster.
    """
    check_name("queue", queue)
    store_url = url or default_url(spark)
    if store_url is None:
        raise InvalidOptionError(
            f"no store is named for the queue {in_quotes(queue)}: pass url, or set {URL_SETTING} on the "
            "session",
            condition="INVALID_OPTION.MISSING",
            option="url",
        )
    check_store_reach(store_url, spark.conf.get("spark.master", None))
    store = open_store(store_url)
    record = store.queue(queue).record
    partitions = store.database.run(lambda tx: catalog.partitions(tx, record), write=False)
    to_compact = [(part.partition, part.bytes) for part in partitions if part.segments > 1]
    shares = _shares(to_compact, _TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    if not shares:
        return 0
    task = _CompactTask(store_url, queue, shares)
    share_numbers = spark.range(0, len(shares), 1, len(shares))
    try:
        reports = share_numbers.mapInArrow(
            task, "gone long, kind string, condition string, message string"
        ).collect()
    except (PySparkException, JvmError) as error:
        raise _job_error(error, queue) from None
    for report in reports:
        if report.condition is not None:
            error_type = error_class(report.kind) or StoreError
            raise error_type(report.message, condition=report.condition, queue=queue)
    return sum(report.gone for report in reports)


def _job_error(error: Exception, queue: str) -> Exception:
    """Return the Penstock error in Spark's report, or an error with one line of Spark's message."""
    original = original_error(error)
    if isinstance(original, PenstockError):
        return original
    return QueryFailedError(
        f"Spark could not compact queue {in_quotes(queue)}: {sentence(str(error), 300)} Partitions that "
        "are already compacted stay compacted: repeat the call",
        queue=queue,
    )


def _shares(to_compact: Sequence[tuple[int, int]], max_shares: int) -> list[list[int]]:
    """Divide partitions into at most ``max_shares`` shares of about equal size.

    Adjacent partitions stay together, because they are adjacent in objects.
    """
    if not to_compact:
        return []
    total = sum(size for _, size in to_compact)
    count = min(len(to_compact), max_shares, max(1, -(-total // _TASK_BYTES)))
    shares: list[list[int]] = [[] for _ in range(count)]
    ends = accumulate(size for _, size in to_compact)
    for (partition, size), end in zip(to_compact, ends, strict=True):
        middle = end - size / 2
        shares[min(int(middle * count / max(total, 1)), count - 1)].append(partition)
    return [share for share in shares if share]


@dataclass(frozen=True)
class _CompactTask:
    """Function for ``mapInArrow`` that takes numbers of shares, and returns how many segments are gone."""

    url: str = field(repr=False)
    queue: str
    shares: Sequence[Sequence[int]]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(batches))

    def _run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_store_reach(self.url, None)
        store = open_store(self.url)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                record = store.queue(self.queue).record
                report: dict[str, object] = {}
                try:
                    report["gone"] = log.compact_all(store.database, record, self.shares[number])
                except PenstockError as error:
                    if not is_about_rows(error):
                        raise
                    # If the task raised the error, it would end the whole job, with the tasks of other
                    # partitions.
                    report |= {"gone": 0, "kind": type(error).__name__, "condition": error.condition}
                    report["message"] = error.message
                yield pa.RecordBatch.from_pylist([report], schema=_REPORT)
