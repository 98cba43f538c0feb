"""Results of the benchmarks, which are kept in bench/report.json and shown in bench/report.md."""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.harness import Result, format_value
from bench.scaling import Curve, draw

_HEAD = """# Benchmarks

`make bench` writes this page. `make bench ARGS="latency-sqlite scaling-reads"` runs only some benchmarks and
replaces their results. Penstock and its peer are measured in turn in the same run, so compare the ratios.
Absolute figures depend on the machine. A ratio is the peer's figure divided by ours, so Penstock is faster if
it is above 1. A bar with a unit is for our own figure. `make bench` exits with code 1 if a bar is missed.
"""


@dataclass
class Findings:
    """Results of all benchmarks by name, in the form of the JSON file."""

    file: Path
    machine: str = ""
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, machine: str) -> Findings:
        return cls(file, machine, json.loads(file.read_text()) if file.exists() else {})

    def add(self, name: str, results: list[Result] | Curve) -> None:
        """Store results immediately, because a run may be interrupted."""
        kind = (
            {"curve": asdict(results)}
            if isinstance(results, Curve)
            else {"results": [asdict(result) for result in results]}
        )
        self.cases[name] = {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": self.machine} | kind
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.cases, indent=1) + "\n")


def machine(postgres: str) -> str:
    """Describe the machine and the versions that the figures depend on, including PostgreSQL's."""
    names = ("penstock-spark", "pyspark", "pyarrow", "psycopg", "deltalake", "pyiceberg")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}; Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, PostgreSQL {postgres}, Java {_java()}, {versions}"
    )


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else "unknown processor"


def _java() -> str:
    program = Path(os.environ["JAVA_HOME"]) / "bin/java" if "JAVA_HOME" in os.environ else "java"
    output = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    return output.split('"')[1]


def write(findings: Findings, folder: Path) -> None:
    """Write report.md and its plots."""
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join([_HEAD, *_tables(findings), *_curves(findings, plots)]))


def _tables(findings: Findings) -> Iterator[str]:
    yield "## Against peers\n"
    yield "| benchmark | what | ours | peer | ratio | bar | |\n|---|---|---|---|---|---|---|"
    for name, case in findings.cases.items():
        for fields in case.get("results", ()):
            yield _row(name, Result(**fields))
    yield ""
    machines: dict[str, list[str]] = {}
    for name, case in findings.cases.items():
        machines.setdefault(f"{case['machine']} ({case['at'][:10]})", []).append(f"`{name}`")
    yield "## Where\n"
    yield from (f"- {machine_and_day}: {', '.join(names)}" for machine_and_day, names in machines.items())
    yield ""


def _row(name: str, result: Result) -> str:
    verdict = "" if result.bar == "none" else "met" if result.met else "**missed**"
    note = f"; {result.note}" if result.note else ""
    ratio = "-" if result.ratio is None else f"{result.ratio:,.2f}"
    figures = (format_value(result.ours, result.unit), format_value(result.peer, result.unit), ratio)
    cells = (f"`{name}`", f"{result.name}{note}", *figures)
    return f"| {' | '.join((*cells, result.bar.replace('none', ''), verdict))} |"


LATENCY_PLOTS = {
    "latency-rates": "Latency of both triggers, against the rate that is offered",
    "latency-intervals": "Latency of exactly once, against the interval of epochs",
}


def _curves(findings: Findings, plots: Path) -> Iterator[str]:
    yield "## What should not grow\n"
    for name, case in findings.cases.items():
        if "curve" in case:
            curve = Curve(**case["curve"])
            draw(curve, plots / f"{name}.png")
            yield f"### {curve.title}, against {curve.against}\n"
            yield from (f"- {line}" for line in curve.text().splitlines())
            yield f"\n![{curve.title}, against {curve.against}](plots/{name}.png)\n"
    for name, title in LATENCY_PLOTS.items():
        if name in findings.cases and (plots / f"{name}.png").exists():
            yield f"### {title}\n"
            yield f"![{title}](plots/{name}.png)\n"
