"""``penstock checkpoint``: the contents of a checkpoint, on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.commands import run_penstock
from tests.support.made_checkpoints import CASES, Made, make, write_events


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_events(folder / "events")
    return make(spark, CASES["windows"], folder / "events", folder / "ck")


def test_show_prints_the_batches_and_the_operators(made: Made) -> None:
    shown = run_penstock("checkpoint", "show", made.path).out
    rows = made.operators[0]["numRowsTotal"]
    assert f"operator 0, stateStoreSave: {rows} rows" in shown
    assert "2026-01-01 12:03:12 UTC" in shown
    described = run_penstock("checkpoint", "show", made.path, "--json").json
    assert (described["query_id"], described["last_committed"]) == (
        made.progress[-1]["id"],
        made.progress[-1]["batchId"],
    )
    assert described["operators"][0]["rows"] == rows


def test_show_can_skip_counting_rows(made: Made) -> None:
    described = run_penstock("checkpoint", "show", made.path, "--no-count-rows", "--json").json
    assert described["operators"][0]["rows"] is None


def test_state_prints_rows_up_to_a_limit(made: Made) -> None:
    rows = made.operators[0]["numRowsTotal"]
    described = run_penstock("checkpoint", "state", made.path, "--json").json
    assert (len(described["rows"]), described["more"]) == (rows, False)
    assert {(row["key"]["key"], row["value"]["count"]) for row in described["rows"]} == {("a", 2), ("d", 1)}
    assert described["rows"][0]["key"]["window"]["end"] == "2026-01-01T12:04:00.000000Z"
    shown = run_penstock("checkpoint", "state", made.path, "--limit", 1)
    assert len(shown.out.splitlines()) == 2
    assert "more than these 1 rows" in shown.err
    first = run_penstock("checkpoint", "state", made.path, "--batch", 0, "--json").json
    assert len(first["rows"]) == made.progress[0]["stateOperators"][0]["numRowsTotal"]


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        (("show", "{folder}/none"), "CHECKPOINT_NOT_FOUND"),
        (("state", "{folder}/none"), "CHECKPOINT_NOT_FOUND"),
        (("state", "{checkpoint}", "--operator", "3"), "STATE_REFUSED.NO_OPERATOR"),
        (("state", "{checkpoint}", "--part", "n"), "STATE_REFUSED.NO_PART"),
        (("state", "{checkpoint}", "--batch", "99"), "STATE_REFUSED.NO_BATCH"),
    ],
)
def test_errors_are_one_line(made: Made, tmp_path: Path, words: tuple[str, ...], condition: str) -> None:
    filled = [word.format(folder=tmp_path, checkpoint=made.path) for word in words]
    said = run_penstock("checkpoint", *filled, code=1).err
    assert said.startswith(f"error: [{condition}]")
    assert len(said.splitlines()) == 1
    assert run_penstock("checkpoint", *filled, "--json", code=1).error["error"] == condition
