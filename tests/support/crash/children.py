"""Child processes that run cases, and stop or fail at a chosen state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.crash.cases import Case
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

FAULTS = Path(__file__).parent / "faults"
TIMEOUT = 240
ATTEMPTS = 4


@dataclass(frozen=True)
class Fault:
    """State of a micro-batch after which a child stops. HALF means that the first task has written its rows.

    FULL_FOR_TASK and FULL_FOR_COMMIT do not stop it. Instead, the disk is full for the writer from then on.
    """

    state: str
    batch: int = 0
    raises: bool = False
    """Whether the child fails there once, instead of stopping."""

    def __str__(self) -> str:
        return f"{self.state}({self.batch})"


class Children:
    """Starts the children of a test, in sequence or in parallel."""

    def __init__(self, folder: Path, run_child: Callable[..., ChildProcess]) -> None:
        self._folder = folder
        self._run_child = run_child
        self._count = 0
        self._faults: dict[str, str] = {}

    def start(
        self,
        cases: Sequence[Case],
        faults: Mapping[str, Fault] | None = None,
        *,
        master: str = "local[2]",
        conf: Mapping[str, str] | None = None,
        module: str = "tests.support.crash.child",
        env: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Start a child that runs the cases, with faults for the named ones."""
        self._count += 1
        self._faults = {name: str(fault) for name, fault in (faults or {}).items()}
        prepared = {
            case.name: self._prepare(case, (faults or {})[case.name])
            for case in cases
            if case.name in (faults or {})
        }
        environment = {
            "FAULTS": json.dumps(prepared),
            "SETTINGS": json.dumps(conf or {}),
            "PYTHONPATH": os.pathsep.join([str(FAULTS), os.environ["PYTHONPATH"]]),
            **(env or {}),
        }
        arguments = [str(self._folder / f"spark-{self._count}"), master, *(case.to_json() for case in cases)]
        return self._run_child(module, *arguments, env=environment)

    def _prepare(self, case: Case, fault: Fault) -> dict[str, Any]:
        for path in (case.marker, f"{case.marker}.released"):
            Path(path).unlink(missing_ok=True)
        return {
            "state": fault.state,
            "batch": fault.batch,
            "raises": fault.raises,
            "checkpoint": case.checkpoint,
            "marker": case.marker,
        }

    def run(self, cases: Sequence[Case], **options: Any) -> ChildProcess:
        """Run a child until it exits."""
        for _ in range(ATTEMPTS):
            child = self.start(cases, **options)
            code = child.wait(TIMEOUT)
            if not starved(child):
                break
        assert code == 0, child.output
        for case in cases:
            assert f"ENDED {case.name}" in child.output, child.output
        return child

    def kill_at(self, cases: Sequence[Case], faults: Mapping[str, Fault], **options: Any) -> ChildProcess:
        """Start a child, and kill it with all its processes when all its faults are reached."""
        for _ in range(ATTEMPTS):
            child = self.start(cases, faults, **options)
            if self.reached(child, [case for case in cases if case.name in faults]):
                break
            child.kill_tree()
        else:
            raise AssertionError(child.output)
        child.kill_tree()
        return child

    def reached(self, child: ChildProcess, cases: Sequence[Case]) -> bool:
        """Wait until the child has stopped at the faults of the cases.

        Return False if the machine was too busy for Spark.
        """

        def check_markers() -> str | None:
            pending = [case.name for case in cases if not os.path.exists(case.marker)]
            if pending and starved(child):
                return "starved"
            passed = [
                name
                for name in pending
                if f"ENDED {name}" in child.output or f"FAILED {name}" in child.output
            ]
            assert child.returncode is None, child.output
            assert not passed, f"{passed} passed their fault of {self._faults}\n{child.output}"
            # The file exists shortly before its content.
            return None if pending or not all(Path(case.marker).read_text() for case in cases) else "reached"

        names = [case.name for case in cases]
        return (
            wait_until(check_markers, TIMEOUT, f"faults of {names} are reached", interval=0.05) == "reached"
        )


def failed_with(output: str, case: Case, *conditions: str) -> bool:
    """Return whether a case failed with one of the conditions, according to the child's output."""
    error = output.partition(f"FAILED {case.name} ")[2].partition("\nFAILED ")[0]
    return any(condition in error for condition in conditions)


def release(case: Case) -> None:
    """Resume a child that has stopped."""
    Path(f"{case.marker}.released").touch()


def starved(child: ChildProcess) -> bool:
    """Return whether a Python worker did not start within Spark's timeout of ten seconds."""
    return "Python worker failed to connect back" in child.output
