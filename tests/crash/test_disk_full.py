"""A disk that is full while queries run: they fail and say so, and continue when there is space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crash.cases import Case, check_complete
from tests.support.crash.children import Children, Fault

pytestmark = [pytest.mark.crash_full, pytest.mark.timeout(600)]


def test_queries_without_disk_space_say_so_and_continue_when_there_is_some(
    make_case: Callable[..., Case], children: Children
) -> None:
    plan = [
        # Its first micro-batch writes nothing: all rows wait for the watermark.
        (make_case("sqlite", "watermark", "exactly_once", chunks=2), Fault("FULL_FOR_TASK", 1)),
        (make_case("sqlite", "stateless", "exactly_once", chunks=2), Fault("FULL_FOR_COMMIT")),
        (make_case("sqlite", "stateless", "idempotent", chunks=2), Fault("FULL_FOR_TASK")),
    ]
    cases = [case for case, _ in plan]
    child = children.start(cases, {case.name: fault for case, fault in plan})
    assert child.wait(240) == 0, child.output
    for case in cases:
        assert Path(case.marker).exists(), child.output
        said = next((line for line in child.output.splitlines() if f"FAILED {case.name}" in line), "")
        # What SQLite calls it depends on which file it could not write.
        assert "STORE_FULL" in said or "the disk is full" in said, child.output
        assert "none of this was written" in said
        assert case.rows() == Counter()
    children.run(cases)
    for case in cases:
        check_complete(case, 2)
