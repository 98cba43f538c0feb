"""The figures in README and the docs are those of the benchmark report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README, BENCHMARKS, HOW_TO = "README.md", "docs/benchmarks.md", "docs/how-to/"
FOUND: dict[str, Any] = json.loads((ROOT / "bench/report.json").read_text())


def result(case: str, number: int = 0) -> dict[str, Any]:
    return dict(FOUND[case]["results"][number])


def faster(case: str, number: int = 0) -> str:
    """How many times as fast as the peer."""
    found = result(case, number)
    return f"{found['peer'] / found['ours']:.2f}"


def milliseconds(case: str) -> str:
    """Median and 99th percentile, and the median of the peer."""

    def shown(seconds: float) -> str:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"

    median, high = result(case, 0), result(case, 1)
    return f"| {shown(median['ours'])} | {shown(high['ours'])} | {shown(median['peer'])} |"


def merged(case: str) -> str:
    return str(round(float(result(case)["note"].split()[2]), 1))


def peak() -> str:
    return f"{result('worker-memory')['ours']:.0f} MiB"


LINES = [
    (README, "appends a second, SQLite | 152 ms", milliseconds("latency-sqlite")[:9]),
    (README, "1 % of rows changed | Spark's own change detection | ", faster("changes-stream-few")),
    (README, "in a running continuous query | Spark's micro-batches | ", faster("latency-backlog", 1)),
    (BENCHMARKS, "| append 2 million rows to SQLite |", faster("append-sqlite")),
    (BENCHMARKS, "| append 2 million rows to PostgreSQL |", faster("append-postgres")),
    (BENCHMARKS, "| Spark reads and aggregates a queue in SQLite |", faster("read-sqlite")),
    (BENCHMARKS, "| Spark reads and aggregates a queue in PostgreSQL |", faster("read-postgres")),
    (BENCHMARKS, "| `exactly_once`, triggers of 1,000 rows, SQLite |", faster("stream-small-sqlite")),
    (BENCHMARKS, "| `exactly_once`, triggers of 1,000 rows, PostgreSQL |", faster("stream-small-postgres")),
    (BENCHMARKS, "| `exactly_once`, micro-batches of 500,000 rows, SQLite |", faster("stream-large-sqlite")),
    (
        BENCHMARKS,
        "| `exactly_once`, micro-batches of 500,000 rows, PostgreSQL |",
        faster("stream-large-postgres"),
    ),
    (BENCHMARKS, "| upsert of a million rows", faster("tables-upsert")),
    (BENCHMARKS, "| changes of a Delta table |", faster("feed-delta")),
    (BENCHMARKS, "| changes of an Iceberg table |", faster("feed-iceberg")),
    (BENCHMARKS, "| a feed of PostgreSQL, through Spark |", faster("feed-postgres-spark")),
    (BENCHMARKS, "1 % changed, five commits a trigger |", faster("changes-stream-few")),
    (BENCHMARKS, "| the same, one commit a trigger |", faster("changes-stream-few-single")),
    (BENCHMARKS, "| the same, every row changed, five commits a trigger |", faster("changes-stream-all")),
    (BENCHMARKS, "| change feed as a batch, 1 % changed |", faster("changes-batch-few")),
    (BENCHMARKS, "| the same, every row changed |", faster("changes-batch-all")),
    (BENCHMARKS, "1 in 7 does (`penstock.take`) |", faster("take-queue", 1)),
    (BENCHMARKS, "| the same, 1 in 2,500 does |", faster("take-queue", 2)),
    (BENCHMARKS, "continuous trigger, a query that starts |", faster("latency-backlog", 0)),
    (BENCHMARKS, "| the same, a query that runs |", faster("latency-backlog", 1)),
    (BENCHMARKS, "| SQLite, `at_least_once`", milliseconds("latency-sqlite")),
    (BENCHMARKS, "| SQLite, `exactly_once` in epochs of 10 ms", milliseconds("latency-sqlite-exactly")),
    (BENCHMARKS, "| PostgreSQL, `at_least_once`", milliseconds("latency-postgres")),
    (
        BENCHMARKS,
        "| PostgreSQL, `exactly_once` in epochs of 10 ms",
        milliseconds("latency-postgres-exactly"),
    ),
    (BENCHMARKS, "Spark that reads 10 million rows takes ", peak()),
    (HOW_TO + "spark-settings.md", "reading 10 million rows took at most ", peak()),
    (HOW_TO + "micro-batch-size.md", "that reads 10 million rows | at most ", peak()),
    (HOW_TO + "micro-batch-size.md", "micro-batches of 1,000 rows | ", faster("stream-small-sqlite")),
    (HOW_TO + "micro-batch-size.md", "0.97 in SQLite, ", faster("stream-small-postgres")),
    (HOW_TO + "micro-batch-size.md", "| the same, 500,000 rows | ", faster("stream-large-sqlite")),
    (HOW_TO + "micro-batch-size.md", "| the same, 500,000 rows | 1.01 ", faster("stream-large-postgres")),
    (HOW_TO + "micro-batch-size.md", "appends of one row | ", merged("merged-sqlite")),
    (HOW_TO + "micro-batch-size.md", " s in SQLite, ", merged("merged-postgres")),
    (HOW_TO + "micro-batch-size.md", "relative to one large append | ", faster("merged-sqlite")),
    (HOW_TO + "micro-batch-size.md", "| 1.03 in SQLite, ", faster("merged-postgres")),
    (
        HOW_TO + "guarantee.md",
        "relative to `at_least_once`, micro-batches of 1,000 rows | ",
        faster("stream-small-sqlite"),
    ),
    (HOW_TO + "guarantee.md", "0.97 (SQLite), ", faster("stream-small-postgres")),
    (HOW_TO + "guarantee.md", "| the same, micro-batches of 500,000 rows | ", faster("stream-large-sqlite")),
    (HOW_TO + "guarantee.md", "1.01 (SQLite), ", faster("stream-large-postgres")),
]


@pytest.mark.parametrize(("page", "before", "figure"), LINES)
def test_figures_equal_those_of_the_report(page: str, before: str, figure: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count(before), before
    line = text.partition(before)[2].partition("\n")[0]
    assert figure in line, line
