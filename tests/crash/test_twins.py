"""Two attempts of one task at the same time: Spark starts the second one when the first is slow."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault, release
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.crash_full, pytest.mark.timeout(600)]

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def master(tmp_path: Path, run_child: Callable[..., ChildProcess]) -> str:
    """A standalone cluster of two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    environment = {"PYSPARK_PYTHON": sys.executable}

    def start(name: str, host: str, *arguments: object) -> ChildProcess:
        return run_child(
            "tests.support.spark_class",
            f"org.apache.spark.deploy.{name}",
            *("--host", host, "--webui-port", 0, *arguments),
            env={**environment, "SPARK_LOCAL_IP": host},
        )

    master = start("master.Master", "127.0.0.1", "--port", port)
    for host in HOSTS:
        folder = tmp_path / host
        start("worker.Worker", host, "--cores", 1, "--memory", "1g", "--work-dir", folder, url)
    wait_until(lambda: master.output.count("Registering worker") == len(HOSTS), 120, "both hosts are there")
    return url


def test_the_slower_of_two_attempts_adds_nothing(
    make_case: Callable[..., Case], children: Children, master: str
) -> None:
    cases = [
        make_case("postgresql", "watermark", "exactly_once", chunks=2),
        make_case("postgresql", "stateless", "idempotent", chunks=2),
    ]
    for case in cases:
        settings = {
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.multiplier": "1.5",
            "spark.executor.memory": "512m",
        }
        child = children.start([case], {case.name: Fault("HALF")}, master=master, conf=settings)
        # The first attempt has written and waits; its twin is not held up, and the query continues with it.
        assert children.reached(child, [case]), child.output
        wait_until(lambda child=child, case=case: f"ENDED {case.name}" in child.output, 240, "the twin won")
        release(case)
        assert child.wait(240) == 0, child.output
        check_complete(case, 2)
        store, sink = case.stores()
        assert sink.info().staged_segments == 0
        store.close()
        sink.close()
