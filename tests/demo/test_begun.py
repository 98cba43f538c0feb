"""A run of the demo that ended early is carried on, to the same end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.demo.begun import Begun
from penstock.demo.tables import BOARD
from tests.support.processes import ChildProcess

UNTIL = "700"


def test_what_a_run_has_begun_is_found_by_the_next_one(tmp_path: Path) -> None:
    anew = Begun("sqlite:///a.db", 60)
    assert anew.left(tmp_path) is None
    began = replace(anew.keep(tmp_path), killed=5).keep(tmp_path)
    assert anew.left(tmp_path) == began


@pytest.mark.parametrize("other", [Begun("sqlite:///b.db", 60), Begun("sqlite:///a.db", None)])
def test_a_run_of_something_else_is_not_carried_on(tmp_path: Path, other: Begun) -> None:
    other.keep(tmp_path)
    assert Begun("sqlite:///a.db", 60).left(tmp_path) is None


def test_a_run_that_came_to_its_end_is_not_carried_on(tmp_path: Path) -> None:
    anew = Begun("sqlite:///a.db", 60)
    replace(anew, finished=True).keep(tmp_path)
    assert anew.left(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"store": 1', '{"other": 1}'])
def test_what_cannot_be_read_is_not_carried_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "demo.json").write_text(text)
    assert Begun("sqlite:///a.db", 60).left(tmp_path) is None


@pytest.mark.crash_full
@pytest.mark.timeout(600)
def test_a_demo_that_is_killed_goes_on_to_the_same_end(
    tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    def start() -> ChildProcess:
        return run_child("penstock.demo", "--folder", tmp_path, "--until", UNTIL, "--json")

    killed = start()
    wait_for_rows(tmp_path / "penstock.db")
    killed.kill_tree()
    again = start()
    assert again.wait(400) == 0, again.output
    told = json.loads(next(line for line in again.output.splitlines() if line.startswith("{")))
    assert (told["holds"], told["resumed"]) == (True, True)
    assert (tmp_path / "report.html").stat().st_size > 10_000


def wait_for_rows(file: Path) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if file.exists():
            try:
                with ps.connect(f"sqlite:///{file}") as store:
                    if store.queue(BOARD).info().rows:
                        return
            except ps.PenstockError:
                pass
        time.sleep(0.1)
    raise TimeoutError("the board stays empty")
