"""What docs/connect.md says of Spark Connect is so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, links, pages
from tests.support.processes import ChildProcess

PAGE = DOCS / "connect.md"
PROGRAM = Path(__file__).parent / "programs/over_connect.py"
_ROW = re.compile(r"^\| .* \| (yes|no|in part) \| .*?\| `?([^|`]*)`? \|$", re.MULTILINE)
# Every page of a capability says where to look.
CAPABILITIES = (
    "queues", "changes", "continuous", "feeds", "limits", "modes", "modes-preview", "options", "state", "tables", "taking", "testing",
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
def test_each_page_of_a_capability_leads_to_it(name: str) -> None:
    assert any(link.partition("#")[0] == "connect.md" for link in links(DOCS / f"{name}.md"))


def test_every_row_says_where_it_is_tried() -> None:
    assert PAGE in pages()
    tried = {"register, batch read and write"}
    for row in PAGE.read_text().splitlines():
        if row.startswith("| ") and not row.startswith(("| capability", "|--")):
            name = row.split("|")[-2].strip().strip("`")
            assert name in EXPECTED or (DOCS.parent / name).exists(), name
            tried.add(name)
    assert set(EXPECTED) <= tried


EXPECTED: dict[str, object] = {}
