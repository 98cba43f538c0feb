"""A preview as text, tables, data and a picture."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.arrow.row_text import rows_as_text
from penstock.errors import MissingDependencyError
from penstock.modes.previewing.micro_batches import DATA, NO_DATA, MicroBatch, ModePreview, StateRows
from penstock.modes.previewing.result import Preview
from penstock.spark.internals.query_start import Refusal

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema([("key", pa.string()), ("count", pa.int64())])


def rows(*values: tuple[str | None, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, value, strict=True)) for value in values], SCHEMA)


def batch(number: int, emitted: pa.Table, watermark: datetime | None = None, **about: Any) -> MicroBatch:
    state = StateRows(
        "stateStoreSave", about.pop("total", 1), 0, about.pop("removed", 0), about.pop("dropped", 0)
    )
    return MicroBatch(
        number, about.pop("kind", DATA), about.pop("input_rows", 2), emitted, watermark, (state,)
    )


@pytest.fixture
def preview() -> Preview:
    append = ModePreview(
        "append",
        (
            batch(0, rows()),
            batch(1, rows(("a", 2), (None, 10)), NOON, total=20, removed=2, dropped=1),
            batch(
                2, rows(("<&>", 3)), NOON.replace(minute=5), kind=NO_DATA, input_rows=0, total=0, removed=1
            ),
        ),
    )
    refusal = Refusal("NOT_SO", "[NOT_SO] Spark has its reasons for not doing so.")
    return Preview((append, ModePreview("complete", refusal=refusal)), "UTC")


def test_the_text_has_a_line_per_row_under_a_heading_per_micro_batch(preview: Preview) -> None:
    assert str(preview) == (
        "append\n"
        "  batch       in  watermark            state  removed  dropped  emitted  key   count\n"
        "  0            2  none                     1        0        0        0\n"
        "  1            2  2026-01-01 12:00:00     20        2        1        2  a     2\n"
        "                                                                         null  10\n"
        "  2, no data   0  2026-01-01 12:05:00      0        1        0        1  <&>   3\n"
        "\n"
        "complete: not allowed. [NOT_SO] Spark has its reasons for not doing so.\n"
        "\n"
        "Times are in UTC."
    )


def test_times_are_shown_in_the_sessions_time_zone(preview: Preview) -> None:
    shown = str(Preview(preview.modes, "Asia/Kolkata"))
    assert "2026-01-01 17:30:00" in shown
    assert shown.endswith("Times are in Asia/Kolkata.")
    assert "2026-01-01 12:00:00Z" in str(Preview(preview.modes, "Nowhere/Known"))


def test_a_query_without_state_has_no_figures_about_state() -> None:
    stateless = MicroBatch(0, DATA, 1, rows(("a", 1)), None, ())
    lines = str(Preview((ModePreview("append", (stateless,)),), "UTC")).splitlines()
    assert lines[2].split() == ["0", "1", "none", "1", "a", "1"]
    assert len(lines) == 3


def test_rich_shows_the_same_in_tables(preview: Preview) -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - as long as the console
    console.print(preview)
    shown = console.export_text()
    assert [line.split() for line in shown.splitlines()] == [
        line.split() for line in str(preview).splitlines()
    ]


def test_the_table_without_rich_says_what_to_install(
    preview: Preview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingDependencyError, match=r"penstock-spark\[cli\]"):
        preview.table()


def test_the_arrow_table_has_a_row_for_each_micro_batch_and_each_refusal(preview: Preview) -> None:
    table = preview.to_arrow()
    assert table.column("mode").to_pylist() == ["append", "append", "append", "complete"]
    assert table.column("kind").to_pylist() == ["data", "data", "no data", "not allowed"]
    assert table.column("emitted").to_pylist() == [
        [],
        [{"key": "a", "count": 2}, {"key": None, "count": 10}],
        [{"key": "<&>", "count": 3}],
        None,
    ]
    assert table.drop_columns(["mode", "kind", "emitted"]).to_pylist() == [
        {
            "batch": number,
            "input_rows": came,
            "watermark": watermark,
            "state_rows": total,
            "removed_rows": removed,
            "dropped_rows": dropped,
            "reason": reason,
        }
        for number, came, watermark, total, removed, dropped, reason in [
            (0, 2, None, 1, 0, 0, None),
            (1, 2, NOON, 20, 2, 1, None),
            (2, 0, NOON.replace(minute=5), 0, 1, 0, None),
            (None, None, None, None, None, None, "[NOT_SO] Spark has its reasons for not doing so."),
        ]
    ]


def test_the_frame_can_be_exploded_into_the_emitted_rows(spark: SparkSession, preview: Preview) -> None:
    found = preview.to_df(spark).selectExpr("mode", "batch", "inline(emitted)")
    assert sorted(map(tuple, found.collect()), key=str) == [
        ("append", 1, "a", 2),
        ("append", 1, None, 10),
        ("append", 2, "<&>", 3),
    ]


def test_a_preview_with_only_refusals_can_be_exported_as_data(spark: SparkSession) -> None:
    alone = Preview((ModePreview("append", refusal=Refusal(None, "no")),), "UTC")
    assert alone.to_arrow().column("emitted").to_pylist() == [None]
    assert str(alone) == "append: not allowed. no"


def test_the_picture_has_a_lane_for_each_mode_and_a_box_for_each_row(
    preview: Preview, tmp_path: Path
) -> None:
    written = preview.picture(tmp_path / "modes.svg")
    root = ElementTree.parse(written).getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = [text.text for text in root.findall("s:text", space)]
    assert {"append", "complete", "not allowed", "micro-batch 0", "2 in", "micro-batch 2", "no data"} <= set(
        texts
    )
    assert [text for text in texts if text in {"nothing", "a  2", "null  10", "<&>  3"}] == [
        "nothing",
        "a  2",
        "null  10",
        "<&>  3",
    ]
    assert "watermark 2026-01-01 12:00:00" in texts
    assert "state rows 20, 2 removed" in texts
    assert "1 dropped: too late" in texts
    boxes = [rect.get("class") for rect in root.findall("s:rect", space)]
    assert (boxes.count("lane"), boxes.count("row"), boxes.count("empty")) == (2, 3, 1)


def test_all_elements_are_inside_the_picture(preview: Preview, tmp_path: Path) -> None:
    root = ElementTree.parse(preview.picture(tmp_path / "modes.svg")).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for part in root.iter():
        if "x" in part.attrib:
            right = float(part.attrib["x"]) + float(part.attrib.get("width", 0))
            bottom = float(part.attrib["y"]) + float(part.attrib.get("height", 0))
            assert right <= width + 1
            assert bottom <= height + 1


def test_many_rows_are_counted_in_the_picture_and_long_ones_are_truncated() -> None:
    many = rows(*[("x" * 100, number) for number in range(12)])
    shown = Preview((ModePreview("append", (batch(0, many),)),), "UTC")._repr_html_()
    assert "and 4 more" in shown
    assert "x" * 45 not in shown


def test_a_notebook_shows_the_picture(preview: Preview) -> None:
    shown = preview._repr_html_()
    assert shown.startswith("<div")
    assert "<svg " in shown
    assert "&lt;&amp;&gt;" in shown


def test_values_are_formatted_for_reading() -> None:
    window = {"start": NOON, "end": NOON.replace(minute=10)}
    over_midnight = {"start": NOON.replace(hour=23), "end": NOON.replace(day=2, hour=1)}
    instant = pa.timestamp("us", "UTC")
    cases: list[tuple[Any, pa.DataType, str]] = [
        (None, pa.int64(), "null"),
        (True, pa.bool_(), "true"),
        ("a\nb", pa.string(), "a\\nb"),
        (b"ab", pa.binary(), "0x6162"),
        (NOON, instant, "2026-01-01 12:00:00"),
        (window, pa.struct([("start", instant), ("end", instant)]), "[2026-01-01 12:00:00, 12:10:00)"),
        (
            over_midnight,
            pa.struct([("start", instant), ("end", instant)]),
            "[2026-01-01 23:00:00, 2026-01-02 01:00:00)",
        ),
        ({"x": 1, "y": None}, pa.struct([("x", pa.int64()), ("y", pa.string())]), "{x=1, y=null}"),
        ([1, None], pa.list_(pa.int64()), "[1, null]"),
        ([("k", 1)], pa.map_(pa.string(), pa.int64()), "{k: 1}"),
    ]
    for value, kind, text in cases:
        assert list(rows_as_text(pa.table({"v": pa.array([value], kind)}))) == [(text,)]


def test_columns_with_the_same_name_are_both_shown() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["k", "k"])
    assert list(rows_as_text(table)) == [("1", "2")]
