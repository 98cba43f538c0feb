"""Executors are processes of their own, against PostgreSQL, and one of them is killed in the middle."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyspark
import pytest

import penstock as ps
from tests.support.postgres import drop_schema, with_schema
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

ROWS = 12_000
IN = pa.schema([("id", pa.int64())])
OUT = pa.schema([("id", pa.int64()), ("value", pa.int64())])


@pytest.fixture
def url(pg_url: str) -> Iterator[str]:
    schema = f"t_{uuid.uuid4().hex}"
    yield with_schema(pg_url, schema)
    drop_schema(pg_url, schema)


def executors(child: ChildProcess) -> list[psutil.Process]:
    marker = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    return [process for process in child.processes() if marker in process.cmdline()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["stateful", pytest.param("stateless", marks=pytest.mark.crash_full)])
def test_a_killed_executor_loses_nothing_and_repeats_nothing(
    kind: str, url: str, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    with ps.connect(url) as store:
        store.create_queue("in", IN, partitions=2)
        store.create_consumer("c").register("in")
        store.create_queue("out", OUT, partitions=2)
        for first in range(0, ROWS, 500):
            ids = pa.table({"id": range(first, first + 500)})
            store.queue("in").append(ids, partition=first // 500 % 2)
        child = run_child("tests.cluster.job", url, tmp_path, kind)
        try:
            wait_until(lambda: _ended(child) or store.info().commits >= 3, 150, "three commits")
            victims = executors(child)
            assert len(victims) == 2, child.output
            victims[0].kill()
            committed = store.info().commits
            assert child.wait(150) == 0, child.output
            assert store.info().commits > committed, "the kill came after the work"
        finally:
            _sweep_work_folder(child)
        assert _sorted(store.queue("out")) == expected(kind)
        assert store.consumer("c").lag("in").rows == 0


def expected(kind: str) -> list[tuple[int, int]]:
    if kind == "stateless":
        return [(number, 2 * number) for number in range(ROWS)]
    # The last group stays open: nothing comes behind it that would close it.
    return [(start, 1000) for start in range(0, ROWS - 1000, 1000)]


def _ended(child: ChildProcess) -> bool:
    assert child.returncode in (None, 0), child.output
    return child.returncode == 0


def _sorted(queue: ps.Queue) -> list[tuple[int, int]]:
    found = pa.concat_tables([queue.read(partition, 0) for partition in range(queue.partitions)])
    return sorted(zip(found["id"].to_pylist(), found["value"].to_pylist(), strict=True))


def _sweep_work_folder(child: ChildProcess) -> None:
    """A local cluster's workers write beside Spark itself, wherever they are told to."""
    for line in child.output.splitlines():
        if line.startswith("application "):
            shutil.rmtree(Path(pyspark.__file__).parent / "work" / line.split()[1], ignore_errors=True)
