"""An interrupted run of the demo is resumed, with the same result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from examples.flights.run import RunState
from examples.flights.tables import BOARD
from tests.support.processes import ChildProcess

UNTIL = "700"


def test_the_state_of_an_interrupted_run_is_loaded_by_the_next_one(tmp_path: Path) -> None:
    fresh = RunState("sqlite:///a.db", 60)
    assert fresh.load_interrupted(tmp_path) is None
    saved = replace(fresh.save(tmp_path), killed=5).save(tmp_path)
    assert fresh.load_interrupted(tmp_path) == saved


@pytest.mark.parametrize("other", [RunState("sqlite:///b.db", 60), RunState("sqlite:///a.db", None)])
def test_a_run_with_another_store_or_hour_is_not_resumed(tmp_path: Path, other: RunState) -> None:
    other.save(tmp_path)
    assert RunState("sqlite:///a.db", 60).load_interrupted(tmp_path) is None


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    fresh = RunState("sqlite:///a.db", 60)
    replace(fresh, finished=True).save(tmp_path)
    assert fresh.load_interrupted(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"store": 1', '{"other": 1}'])
def test_an_unreadable_state_is_not_resumed(tmp_path: Path, text: str) -> None:
    (tmp_path / "demo.json").write_text(text)
    assert RunState("sqlite:///a.db", 60).load_interrupted(tmp_path) is None


@pytest.mark.crash_full
@pytest.mark.timeout(600)
def test_a_demo_that_was_killed_resumes_with_the_same_result(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    def start() -> ChildProcess:
        return run_child("examples.flights", "--folder", tmp_path, "--until", UNTIL, "--json")

    killed = start()
    wait_for_rows(tmp_path / "penstock.db")
    killed.kill_tree()
    again = start()
    assert again.wait(400) == 0, again.output
    result = json.loads(next(line for line in again.output.splitlines() if line.startswith("{")))
    assert (result["holds"], result["resumed"]) == (True, True)
    assert (tmp_path / "report.html").stat().st_size > 10_000


def wait_for_rows(file: Path) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if file.exists():
            try:
                with penstock.connect(f"sqlite:///{file}") as store:
                    if store.queue(BOARD).info().rows:
                        return
            except penstock.PenstockError:
                pass
        time.sleep(0.1)
    raise TimeoutError("the board stays empty")
