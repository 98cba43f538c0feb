"""Virtual environments that have nothing but what was installed into them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

SMOKES = Path(__file__).with_name("smokes")
_SECONDS = 1500
# What would let a program see the working tree, or this environment's packages.
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")


@dataclass(frozen=True)
class Environment:
    """One of them."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def run(self, *command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of it, by its name, or another one."""
        name, *rest = map(str, command)
        own = self.folder / "bin" / name
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        return subprocess.run(
            [str(own) if own.exists() else name, *rest],
            cwd=cwd,
            env=kept | {"PATH": path, "PYTHONNOUSERSITE": "1", "SPARK_LOCAL_IP": "127.0.0.1", **variables},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )

    def smoke(self, name: str, cwd: Path, *words: str, **variables: str) -> str:
        """Run a program of ``smokes``; what it printed."""
        done = self.run("python", SMOKES / f"smoke_{name}.py", *words, cwd=cwd, **variables)
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return done.stdout

    def packages(self, cwd: Path) -> dict[str, str]:
        """What is installed, and in which version."""
        done = self.run("python", "-m", "pip", "list", "--format", "json", cwd=cwd)
        return {canonicalize_name(each["name"]): each["version"] for each in json.loads(done.stdout)}


def make(folder: Path, python: str = sys.executable) -> Environment:
    """An empty one."""
    _pip_free([python, "-m", "venv", str(folder)])
    return Environment(folder)


def fetch(
    folder: Path, wanted: Iterable[str], *, python: str = sys.executable, pins: Sequence[str] = ()
) -> Path:
    """Wheels of requirements and all that they need, in a folder.

    Parameters
    ----------
    python
        The interpreter that they are for.
    pins
        Versions that are given, as constraints of pip.
    """
    folder.mkdir()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins))
    pip = [
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "-w",
        str(folder),
        "-c",
        str(constraints),
    ]
    _pip_free([python, *pip, *wanted])
    return folder


def install(into: Environment, wheels: Path, *wanted: str, pins: Sequence[str] = ()) -> None:
    """Install from a folder of wheels alone."""
    options = ["--no-index", "--find-links", str(wheels), "-q", "--disable-pip-version-check"]
    _pip_free([str(into.python), "-m", "pip", "install", *options, *wanted])


def interpreter(version: str) -> str | None:
    """A Python of a version, such as ``3.13``; None where there is none that runs."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    check = [found, "-c", "import ensurepip, venv"]
    return found if subprocess.run(check, capture_output=True, check=False).returncode == 0 else None


def _pip_free(command: Sequence[str]) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
