"""Builds the distributions of the working tree, and reads their contents and requirements."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: requirements for name, requirements in PROJECT["optional-dependencies"].items() if name != "dev"
}
"""The extras for users, with their requirements."""


def build(source: Path, into: Path, *kinds: str) -> None:
    """Build an ``sdist`` or a ``wheel`` of a source tree with the build backend of this environment."""
    targets = [argument for kind in kinds for argument in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(into)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack a source distribution, and return the folder of its source tree."""
    with tarfile.open(sdist) as archive:
        # Python 3.11 before 3.11.4 has no filters.
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(into)
    return into / sdist.name.removesuffix(".tar.gz")


def read_wheel(wheel: Path) -> dict[str, bytes]:
    """Return the contents of a wheel's files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def requirements(*extras: str) -> list[Requirement]:
    """Return the third-party requirements of the package and of some of its extras."""
    required = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(text)
            required += (
                requirements(*requirement.extras) if requirement.name == PROJECT["name"] else [requirement]
            )
    return list(dict.fromkeys(required))


def lowest_versions() -> list[str]:
    """Return the lowest version of each requirement that pyproject.toml allows, as constraints for pip."""
    constraints = []
    for requirement in requirements(*EXTRAS):
        (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
        constraints.append(f"{requirement.name}=={lowest}")
    return constraints
