"""Tasks and executors that die; the driver survives."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault
from tests.support.processes import ChildProcess

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]


@pytest.mark.crash_full
def test_a_task_that_fails_after_writing_is_repeated_without_repeating_its_rows(
    make_case: Callable[..., Case], children: Children
) -> None:
    cases = [
        make_case("sqlite", "watermark", "exactly_once", chunks=2),
        make_case("postgresql", "stateless", "idempotent", chunks=2),
    ]
    children.run(cases, faults={case.name: Fault("HALF", raises=True) for case in cases}, master="local[2,4]")
    for case in cases:
        assert Path(case.marker).exists()
        check_complete(case, 2)
        store, sink = case.stores()
        assert sink.info().staged_segments == 0
        store.close()
        sink.close()


@pytest.fixture
def clean_up() -> Iterator[list[ChildProcess]]:
    """Spark's own workers write into the folder of its package."""
    import pyspark

    children: list[ChildProcess] = []
    yield children
    for child in children:
        for app in re.findall(r"SPARK (app-[\w-]+)", child.output):
            shutil.rmtree(Path(pyspark.__file__).parent / "work" / app, ignore_errors=True)


@pytest.mark.crash_full
@pytest.mark.parametrize("state", ["HALF", "PLANNED", "STAGED"])
def test_killing_an_executor_loses_and_repeats_nothing(
    make_case: Callable[..., Case], children: Children, clean_up: list[ChildProcess], state: str
) -> None:
    """Real executors in separate processes; one of them dies in the middle of a task of a micro-batch."""
    cases = [make_case("postgresql", kind, "exactly_once", chunks=2) for kind in ("watermark", "stateless")]
    stopped = cases[0]
    child = children.start(cases, {stopped.name: Fault(state)}, master="local-cluster[2,1,1024]")
    clean_up.append(child)
    assert children.reached(child, [stopped]), child.output
    worker = psutil.Process(int(Path(stopped.marker).read_text()))
    executor_of(worker, child).send_signal(signal.SIGKILL)
    if state != "HALF":
        Path(f"{stopped.marker}.released").touch()
    assert child.wait(300) == 0, child.output
    for case in cases:
        assert f"ENDED {case.name}" in child.output, child.output
        check_complete(case, 2)


def executor_of(worker: psutil.Process, child: ChildProcess) -> psutil.Process:
    """The executor that runs a Python worker; any one, when the driver does."""
    executors = {
        process.pid: process
        for process in child.processes()
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline()
    }
    own = [executors[parent.pid] for parent in worker.parents() if parent.pid in executors]
    return own[0] if own else next(iter(executors.values()))
