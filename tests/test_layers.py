"""The layers that import-linter holds, and what its contracts cannot say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def test_every_import_stays_in_its_layer() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_the_contract_against_spark_lists_every_module_below_it() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (c for c in config["tool"]["importlinter"]["contracts"] if c["id"] == "no-spark-below")
    below = {
        f"penstock.{name}"
        for name in (
            *(
                "errors",
                "arguments",
                "instants",
                "json_text",
                "logs",
                "extras",
                "folders",
                "parallel",
                "redaction",
                "secret_patterns",
            ),
            *("arrow", "objects", "store", "queue", "commit"),
        )
    }
    present = grimp.build_graph("penstock", cache_dir=None).find_children("penstock")
    assert set(contract["source_modules"]) == below & present


def test_no_module_imports_the_top_level_package_to_bypass_the_layers() -> None:
    people = {"penstock.cli", "penstock.ui"}
    graph = grimp.build_graph("penstock", cache_dir=None)
    importers = graph.find_modules_that_directly_import("penstock")
    below = {name for name in importers if not any(name == p or name.startswith(f"{p}.") for p in people)}
    assert below == set()
