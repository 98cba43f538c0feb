"""What docs/connect.md says about Spark Connect is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, links, pages
from tests.support.processes import ChildProcess

PAGE = DOCS / "connect.md"
PROGRAM = Path(__file__).parent / "programs/over_connect.py"
EXPECTED: dict[str, object] = {
    "register, batch read and write": 30,
    "stream exactly_once": 30,
    "stream idempotent": 30,
    "stream at_least_once": 30,
    "pipeline": 10,
    "publish": ["plain", "told"],
    "log_progress": True,
    "pipeline into a table": "TABLE_REFUSED.CLASSIC_SESSION_NEEDED",
    "limit": 7,
    "limit for each key": 6,
    "first_rows of a batch": 6,
    "changes.read": 1,
    "changes.post_process of a batch": 1,
    "changes.read_stream without passes": 1,
    "changes.read_stream with passes": "INVALID_CDC_OPTION.CLASSIC_SESSION_NEEDED",
    "changes.diff": 1,
    "DebeziumFeed of a batch": [3, 1],
    "DebeziumFeed of a stream": [3, 1],
    "modes.check": [False, True, True],
    "modes.preview": "PREVIEW_NEEDS_CLASSIC",
    "continuous": "CONTINUOUS_REFUSED.CLASSIC_SESSION_NEEDED",
    "state": 3,
    "take": "TAKE_NEEDS_CLASSIC",
    "sample": "TAKE_NEEDS_CLASSIC",
    "exactly_once": 30,
}
"""What each try gives, or the condition that it is refused with."""
# Every page of a capability says where to look.
CAPABILITIES = (
    "queues", "changes", "continuous", "feeds", "limits", "modes", "modes-preview", "options", "state",
    "tables", "taking", "testing",
)  # fmt: skip


@pytest.mark.soak
def test_what_works_over_spark_connect(run_child: Callable[..., ChildProcess], tmp_path: Path) -> None:
    child = run_child(PROGRAM, tmp_path)
    assert child.wait(240) == 0, child.output[-4000:]
    tried = [
        json.loads(line.removeprefix("TRIED "))
        for line in child.output.splitlines()
        if line.startswith("TRIED ")
    ]
    found = {each["name"]: each.get("refused", each.get("result")) for each in tried}
    assert found == EXPECTED, "\n".join(each["message"] for each in tried if "message" in each)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_each_page_of_a_capability_links_to_it(name: str) -> None:
    assert any(link.partition("#")[0] == "connect.md" for link in links(DOCS / f"{name}.md"))


def test_every_row_names_the_test_of_it() -> None:
    assert PAGE in pages()
    tried = {"sample"}  # with take
    for row in PAGE.read_text().splitlines():
        if row.startswith("| ") and not row.startswith(("| capability", "|--")):
            name = row.split("|")[-2].strip().strip("`")
            assert name in EXPECTED or (DOCS.parent / name).exists(), name
            tried.add(name)
    assert set(EXPECTED) <= tried
