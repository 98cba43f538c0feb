"""The story that the demo prints and writes to its page."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from examples.flights.alerts import CASES, Latency
from examples.flights.change_feed import Summary
from examples.flights.proof import Count, Proof
from examples.flights.report import print_story, write_report
from examples.flights.story import DemoResult, Step, story
from examples.flights.tables import BOARD, CANCELLED, CURRENT, DAY, DELAYS, TOTALS
from penstock.limits import LimitProgress

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
OUTPUTS = [BOARD, DELAYS, DAY, CURRENT, TOTALS, "alerts, continuous", "alerts, micro_batch", CANCELLED]


@pytest.fixture
def result(tmp_path: Path) -> DemoResult:
    pictures = [tmp_path / name for name in ("delays.png", "modes.svg", "latencies.png")]
    for picture in pictures:
        picture.write_bytes(PIXEL)
    times = {"continuous": [1.0, 2.0, 4.0, 8.0], "micro_batch": [100.0, 200.0, 400.0, 1234.5]}
    flights = {"carrier": ["<UA>"], "flight_id": [7], "_commit_version": [60]}
    return DemoResult(
        [Proof(name, 1000, 1000, 0, 0, 0) for name in OUTPUTS],
        Count(4321, 2100, 650, {"delete": 16}),
        Summary(5, 4321, 1, 1, 1, 1),
        88,
        12.5,
        False,
        "SQLite",
        pictures[0],
        "append\n  batch  k < 3",
        pictures[1],
        [Latency(case.trigger, case.guarantee, 300.0, times[case.trigger]) for case in CASES],
        pictures[2],
        pa.table(flights),
        LimitProgress(10, 10),
    )


def on_screen(result: DemoResult) -> str:
    out = StringIO()
    print_story(story(result), result, Console(file=out, width=100))
    return out.getvalue()


def test_each_of_the_five_steps_says_what_it_shows_and_what_pyspark_would_need(
    result: DemoResult,
) -> None:
    steps = story(result)
    assert len(steps) == 5
    assert all(step.shows.endswith(".") and step.in_plain_pyspark.endswith(".") for step in steps)
    text = " ".join(on_screen(result).split())
    assert all(f"{number} of 5: {step.title}" in text for number, step in enumerate(steps, 1))
    assert text.count("In plain PySpark:") == 5


def test_every_output_is_in_one_table_of_the_story(result: DemoResult) -> None:
    proofs = [table for step in story(result) for table in step.tables if "lost" in table.columns]
    assert [row[0] for table in proofs for row in table.rows] == OUTPUTS


def test_the_text_contains_the_results(result: DemoResult) -> None:
    queue, changes, _, continuous, limit = story(result)
    assert "4,321 rows in 5 commits" in queue.shows
    assert "88 changes on the board" in queue.shows
    assert "2,100 were carried over" in changes.shows
    assert "16 delete" in changes.shows
    assert "100.0 times as long at the median exactly once" in continuous.in_plain_pyspark
    assert "10 of 10; it stopped by itself" in limit.shows


def test_the_end_says_whether_every_row_arrived_exactly_once(result: DemoResult) -> None:
    assert on_screen(result).rstrip().endswith("\nEvery row arrived exactly once.")
    lost = replace(result, proofs=[Proof(BOARD, 10, 9, 1, 0, 0)])
    assert on_screen(lost).rstrip().endswith("\nNOT every row arrived exactly once.")


def test_a_resumed_run_has_no_rate(result: DemoResult) -> None:
    assert "change rows a second" in on_screen(result)
    assert "change rows a second" not in on_screen(replace(result, resumed=True))


class Page(HTMLParser):
    """The contents of a page; every element that is opened has to be closed."""

    ALONE = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles = 0
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.titles += tag == "h2"
        self.sources += [value for name in ("src", "href") if (value := given.get(name))]
        assert tag != "img" or given["alt"]
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_complete_and_self_contained(result: DemoResult, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_report(story(result), result, file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert (page.open, page.titles, len(page.sources)) == ([], 5, 3)
    assert all(re.match(r"data:image/(png|svg\+xml);base64,", source) for source in page.sources)
    assert "http" not in re.sub(r"base64,[^']*", "", text)
    assert "Every row arrived exactly once." in text


def test_data_is_escaped_on_the_page(result: DemoResult, tmp_path: Path) -> None:
    step = Step("a < b", "<script>", "R&D", text="")
    write_report([step, *story(result)], result, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(found in text for found in ("a &lt; b", "&lt;script&gt;", "R&amp;D", "&lt;UA&gt;"))
    assert "<script" not in text
