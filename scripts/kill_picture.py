"""Draw ``docs/kill-and-restart.svg`` from a real run of a pipeline that is killed three times.

A producer appends orders to a queue while a pipeline copies them, exactly once, into a SQL table. The
pipeline's process is killed with SIGKILL and restarted. In the end, both have the same rows and total.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from html import escape
from pathlib import Path

import pyarrow as pa

import penstock

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "kill-and-restart.svg"
ORDERS, APPEND = 100_000, 250
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
KILLS = (0.2, 0.5, 0.8)
"""The shares of the rows after which the pipeline is killed."""

PIPELINE = """
import penstock

spark = penstock.session(master="local[2]", url="sqlite:///shop.db")
orders = penstock.QueueSource("orders", consumer="copy", options={"maxRowsPerTrigger": 2000})
pipeline = penstock.stream(spark, orders).write(penstock.TableSink("copied"))
pipeline.start(checkpoint="checkpoint").awaitTermination()
"""

_WIDTH, _LINE, _MARGIN = 640, 20, 24
_STYLE = (
    "text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}"
    ".prompt{fill:#7ee787}.killed{fill:#ff7b72}.total{fill:#79c0ff}.dim{fill:#8b949e}"
)

Line = tuple[str, str]
"""CSS class and text of a line."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines = run(random.Random(7))
    PICTURE.write_text(draw(lines))
    print("\n".join(text for _, text in lines))


def run(rng: random.Random) -> list[Line]:
    """Run the pipeline with its kills, and return the lines of the picture."""
    Path("pipeline.py").write_text(PIPELINE)
    lines: list[Line] = []
    with penstock.connect("sqlite:///shop.db") as store:
        orders = store.create_queue("orders", SCHEMA)
        store.create_consumer("copy").register("orders")
        appended, amount = 0, 0
        process = _start_pipeline(lines)
        for share in (*KILLS, 1.0):
            while appended < share * ORDERS:
                amounts = [rng.randint(1, 1000) for _ in range(APPEND)]
                orders.append(pa.table({"id": range(appended, appended + APPEND), "amount": amounts}, SCHEMA))
                appended, amount = appended + APPEND, amount + sum(amounts)
            if share < 1.0:
                _await_rows(share * ORDERS / 2)
                process.send_signal(signal.SIGKILL)
                process.wait()
                lines += [("prompt", f"$ kill -9 {process.pid}"), ("killed", f"[1]+  Killed    {_COMMAND}")]
                process = _start_pipeline(lines)
        _await_rows(appended)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        rows, total = _count_copied()
    assert (rows, total) == (appended, amount), (rows, total, appended, amount)
    lines += [
        ("", ""),
        ("total", f"orders appended   {appended:>9,} rows   amount {amount:>12,}"),
        ("total", f"table copied      {rows:>9,} rows   amount {total:>12,}"),
    ]
    return lines


_COMMAND = "python pipeline.py"


def _start_pipeline(lines: list[Line]) -> subprocess.Popen[bytes]:
    lines.append(("prompt", f"$ {_COMMAND} &"))
    process = subprocess.Popen([sys.executable, "pipeline.py"], stderr=subprocess.DEVNULL)
    lines.append(("dim", f"[1] {process.pid}"))
    return process


def _await_rows(rows: float) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if _count_copied()[0] >= rows:
            return
        time.sleep(0.05)
    raise TimeoutError(f"the table has fewer than {rows:,.0f} rows")


def _count_copied() -> tuple[int, int]:
    """Return the number of rows in the table, and the sum of their amounts."""
    with closing(sqlite3.connect("shop.db")) as connection, suppress(sqlite3.OperationalError):
        # The table does not exist before the first run.
        row = connection.execute("select count(*), coalesce(sum(amount), 0) from copied").fetchone()
        return int(row[0]), int(row[1])
    return 0, 0


def draw(lines: list[Line]) -> str:
    """Return an SVG picture of a terminal with these lines."""
    height = 2 * _MARGIN + _LINE * len(lines)
    label = "A pipeline is killed three times and started again; the table has every order once"
    size = f'width="{_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    drawing = [head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>']
    for number, (kind, text) in enumerate(lines):
        position = f'x="{_MARGIN}" y="{_MARGIN + _LINE * number + 14}"'
        drawing.append(f'<text class="{kind}" {position} xml:space="preserve">{escape(text)}</text>')
    return "\n".join([*drawing, "</svg>", ""])


if __name__ == "__main__":
    main()
