"""What docs/connect.md says about Spark Connect is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pages import DOCS, links, pages
from tests.support.processes import ChildProcess

PAGE = DOCS / "connect.md"
PROGRAM = Path(__file__).parent / "programs/over_connect.py"
EXPECTED: dict[str, dict[str, object]] = {
    "queues in batch reads and writes, `penstock.register`": {"register, batch read and write": 30},
    "`readStream` and `writeStream` of queues, `exactly_once`": {"stream exactly_once": 30},
    "`readStream` and `writeStream` of queues, `idempotent`": {"stream idempotent": 30},
    "`readStream` and `writeStream` of queues, `at_least_once`": {"stream at_least_once": 30},
    "`penstock.stream(…)` into a queue": {"pipeline": 10},
    "`stream.limit(n)`": {"limit": 7},
    "`stream.limit(n, per=[…])`": {"limit for each key": 6},
    "`penstock.limits.first_rows` of a batch": {"first_rows of a batch": 6},
    "queries on the monitor page": {"publish": ["plain", "told"]},
    "`penstock.log_progress`": {"log_progress": True},
    "`penstock.stream(…)` into a `penstock.TableSink`": {
        "pipeline into a table": "TABLE_REFUSED.CLASSIC_SESSION_NEEDED"
    },
    "`penstock.exactly_once` in your own `foreachBatch`": {"exactly_once": 30},
    "`penstock.changes.read`": {"changes.read": 1},
    "`penstock.changes.post_process` of a batch": {"changes.post_process of a batch": 1},
    "`penstock.changes.read_stream` of a feed that needs no pass": {"changes.read_stream without passes": 1},
    "passes on a stream: `read_stream`, `post_process`": {
        "changes.read_stream with passes": "INVALID_CDC_OPTION.CLASSIC_SESSION_NEEDED"
    },
    "`penstock.changes.diff`": {"changes.diff": 1},
    "`penstock.DebeziumFeed` over a batch, with dead letters": {"DebeziumFeed of a batch": [3, 1]},
    "`penstock.DebeziumFeed` over a stream that needs no pass": {"DebeziumFeed of a stream": [3, 1]},
    "`penstock.modes.check`": {"modes.check": [False, True, True]},
    "`penstock.modes.preview`": {"modes.preview": "PREVIEW_NEEDS_CLASSIC"},
    "`penstock.Trigger.continuous`": {"continuous": "CONTINUOUS_REFUSED.CLASSIC_SESSION_NEEDED"},
    "`penstock.state.show`, `penstock.state.read`": {"state": 3},
    "`penstock.take`, `penstock.take_sample`": {"take": "TAKE_NEEDS_CLASSIC", "sample": "TAKE_NEEDS_CLASSIC"},
    "`penstock.session`": {},
    "`penstock.testing`": {},
}
"""What each capability of the page gives when it is tried, or the condition that it is refused with.

A session that is not classic is tested in the tests of sessions; `testing` cannot be tried without one.
"""
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
    expected = {name: result for tries in EXPECTED.values() for name, result in tries.items()}
    assert found == expected, "\n".join(each["message"] for each in tried if "message" in each)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_each_page_of_a_capability_links_to_it(name: str) -> None:
    assert any(link.partition("#")[0] == "connect.md" for link in links(DOCS / f"{name}.md"))


def test_every_capability_of_the_page_is_tried() -> None:
    assert PAGE in pages()
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == list(EXPECTED)
