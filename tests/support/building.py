"""The distributions of the working tree, as a release has them."""

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
"""What users may ask for."""


def build(source: Path, into: Path, *kinds: str) -> None:
    """Build ``sdist`` or ``wheel`` of a source tree, with the build backend of this environment."""
    targets = [word for kind in kinds for word in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def unpacked(sdist: Path, into: Path) -> Path:
    """The tree in a source distribution."""
    with tarfile.open(sdist) as archive:
        # Python 3.11 before 3.11.4 has no filters.
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(into)
    return into / sdist.name.removesuffix(".tar.gz")


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def requirements(*extras: str) -> list[Requirement]:
    """What the package and some of its extras ask for, the packages of others."""
    asked = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            found = Requirement(text)
            asked += requirements(*found.extras) if found.name == PROJECT["name"] else [found]
    return list(dict.fromkeys(asked))


def floors() -> list[str]:
    """The lowest version of each that pyproject.toml allows, as constraints for pip."""
    found = []
    for each in requirements(*EXTRAS):
        (lowest,) = (bound.version for bound in each.specifier if bound.operator == ">=")
        found.append(f"{each.name}=={lowest}")
    return found
