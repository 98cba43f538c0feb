"""A standalone cluster with rows in a bucket: workers that share no folder with the driver, and that die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.testing import temporary_store_url
from tests.support.object_store import object_store, settings
from tests.support.processes import ChildProcess
from tests.support.standalone import standalone

pytestmark = [pytest.mark.crash_full, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parent / "programs/standalone.py"
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def test_every_guarantee_holds_on_a_cluster_whose_workers_are_killed(
    pg_url: str,
    run_child: Callable[..., ChildProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tmp_path / "driver"
    own.mkdir()
    with object_store() as bucket, temporary_store_url(pg_url) as url:
        bucket.bucket("rows")
        environment = settings(bucket.endpoint)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with (
            penstock.connect(url) as store,
            standalone(tmp_path / "cluster", hidden=own, environment=environment) as cluster,
        ):
            for name in ("in", "exactly_once", "idempotent", "continuous"):
                store.create_queue(name, SCHEMA, partitions=2, payloads="s3://rows/test")
            store.create_consumer("continuous").register("in")
            cluster.add_worker()
            cluster.add_worker()
            driver = run_child(PROGRAM, cluster.url, url, own)
            for guarantee, worker in zip(("exactly_once", "idempotent"), list(cluster.workers), strict=True):
                driver.wait_for_line(f"RUNNING {guarantee}", 300)
                worker.kill_tree()
                cluster.add_worker()
            assert driver.wait(300) == 0, driver.output
            assert [line for line in driver.output.splitlines() if line[:1].islower()] == [
                "in 40000 40000",
                "exactly_once 40000 40000",
                "idempotent 40000 40000",
                "continuous 80000 80000",
                "compacted True",
                "after 40000 40000",
            ]
            found = store.check_objects()
            assert [(each.queue, each.missing, each.damaged) for each in found if each.objects] == [
                (name, [], []) for name in ("continuous", "exactly_once", "idempotent", "in")
            ]
