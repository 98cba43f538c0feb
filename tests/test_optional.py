"""A missing package is reported with the extra that installs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.extras import EXTRAS

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
_OFFERED = {name: asked for name, asked in PROJECT["optional-dependencies"].items() if name != "dev"}
_FOR = {"penstock.stream": "pyspark", "penstock.changes.read": "pyspark", "penstock.testing.run": "pyspark"}


def test_every_package_of_an_extra_is_listed_with_an_extra() -> None:
    installed = packages_distributions()
    known = {canonicalize_name(name) for package in EXTRAS for name in installed.get(package, ())}
    for extra, asked in _OFFERED.items():
        for each in map(Requirement, asked):
            if each.name != PROJECT["name"]:
                assert canonicalize_name(each.name) in known, (
                    f"{each.name} of the extra {extra} is not in penstock.extras"
                )
    assert set(EXTRAS.values()) <= set(_OFFERED)


@pytest.mark.parametrize("name", _FOR)
def test_a_name_that_needs_an_extra_fails_with_the_command_that_installs_it(name: str) -> None:
    home, _, short = name.rpartition(".")
    program = (
        f"import sys; sys.modules[{_FOR[name]!r}] = None\n"
        f"import importlib; home = importlib.import_module({home!r})\n"
        f"try: home.{short}\n"
        "except ImportError as error: print(type(error).__name__, error, error.__cause__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"MissingDependencyError [MISSING_DEPENDENCY] {name} needs {_FOR[name]}: "
        "pip install 'penstock-spark[spark]' None\n"
    )


def test_a_missing_package_outside_the_extras_keeps_pythons_error() -> None:
    program = "import sys; sys.modules['pyarrow'] = None\nimport penstock\npenstock.connect"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of pyarrow")
