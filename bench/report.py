"""What the benchmarks found, kept over runs of some of them, and told in bench/report.md."""

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

from bench.harness import Result, shown
from bench.scaling import Curve, draw

_HEAD = """# Benchmarks

Made by `make bench`; `make bench ARGS="latency-sqlite scaling-reads"` runs some of them, and what it finds
takes the place of what was here. Each that has a peer is measured beside it, in turn, in the same run: read
the ratios. Absolute figures are those of the machine of that day. A ratio is the peer's figure divided by
ours: above 1 Penstock is faster. A bar with a unit is for our own figure. `make bench` ends with exit code 1
if a bar is missed.
"""


@dataclass
class Findings:
    """The findings of all benchmarks, by name, as JSON has them."""

    file: Path
    machine: str = ""
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, machine: str) -> Findings:
        return cls(file, machine, json.loads(file.read_text()) if file.exists() else {})

    def add(self, name: str, found: list[Result] | Curve) -> None:
        """Take note, at once: a run may be ended in the middle."""
        kind = (
            {"curve": asdict(found)} if isinstance(found, Curve) else {"results": [asdict(x) for x in found]}
        )
        self.cases[name] = {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": self.machine} | kind
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.cases, indent=1) + "\n")


def machine(postgres: str) -> str:
    """What the figures depend on, the server's version of PostgreSQL among it."""
    names = ("penstock-spark", "pyspark", "pyarrow", "psycopg", "deltalake", "pyiceberg")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}; Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, PostgreSQL {postgres}, Java {_java()}, {versions}"
    )


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown processor"


def _java() -> str:
    program = Path(os.environ["JAVA_HOME"]) / "bin/java" if "JAVA_HOME" in os.environ else "java"
    said = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    return said.split('"')[1]


def write(findings: Findings, folder: Path) -> None:
    """Write report.md and its plots."""
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join([_HEAD, *_tables(findings), *_curves(findings, plots)]))


def _tables(findings: Findings) -> Iterator[str]:
    yield "## Against peers\n"
    yield "| benchmark | what | ours | peer | ratio | bar | |\n|---|---|---|---|---|---|---|"
    for name, case in findings.cases.items():
        for found in case.get("results", ()):
            yield _row(name, Result(**found))
    yield ""
    machines: dict[str, list[str]] = {}
    for name, case in findings.cases.items():
        machines.setdefault(f"{case['machine']} ({case['at'][:10]})", []).append(f"`{name}`")
    yield "## Where\n"
    yield from (f"- {where}: {', '.join(names)}" for where, names in machines.items())
    yield ""


def _row(name: str, found: Result) -> str:
    verdict = "" if found.bar == "none" else "met" if found.met else "**missed**"
    note = f"; {found.note}" if found.note else ""
    ratio = "-" if found.ratio is None else f"{found.ratio:,.2f}"
    figures = (shown(found.ours, found.unit), shown(found.peer, found.unit), ratio)
    cells = (f"`{name}`", f"{found.name}{note}", *figures)
    return f"| {' | '.join((*cells, found.bar.replace('none', ''), verdict))} |"


LATENCIES = {
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
    for name, what in LATENCIES.items():
        if name in findings.cases and (plots / f"{name}.png").exists():
            yield f"### {what}\n"
            yield f"![{what}](plots/{name}.png)\n"
