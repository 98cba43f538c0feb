"""The wheel in empty environments: alone, and with each extra.

Each with the lowest and with the newest versions that it allows. A package index is queried once for each
set of versions, and the environments are made from the downloaded files.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packaging.conftest import Distributions
from tests.packaging.environments import SMOKES, Environment, fetch, install, interpreter, make
from tests.support.building import EXTRAS, PROJECT, lowest_versions, requirements
from tests.support.object_store import object_store
from tests.support.type_errors import FILES, errors_of, expected_errors

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(3000)]

_OLDEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
_PYTHONS = [
    classifier.rpartition(" ")[2]
    for classifier in PROJECT["classifiers"]
    if classifier.startswith("Programming Language :: Python :: 3.")
]
_SMOKES = sorted(path.stem.removeprefix("smoke_") for path in SMOKES.glob("smoke_*.py"))
_SERVERS = {"objects": "bucket_server", "postgres": "pg_url", "pump": "logical_pg_url"}
"""The fixture that has the URL of a server, for each program that is given one."""
Server = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def house(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Wheels of the newest of everything, for this Python."""
    folder = tmp_path_factory.mktemp("newest") / "wheels"
    yield fetch(folder, [_asked(distributions, *EXTRAS)])
    shutil.rmtree(folder)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Environment]:
    """An environment with nothing in it."""
    yield make(tmp_path / "environment")
    shutil.rmtree(tmp_path / "environment")


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[str]:
    """The URL of a server with the protocol of S3, with an empty bucket ``smoke``."""
    with object_store() as server:
        server.bucket("smoke")
        yield server.endpoint


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """Return the URL of the server of a program, which is started if it has one."""
    return lambda name: [request.getfixturevalue(_SERVERS[name])] if name in _SERVERS else []


def _asked(distributions: Distributions, *extras: str) -> str:
    return f"{distributions.wheel}[{','.join(extras)}]" if extras else str(distributions.wheel)


def _with(extras: tuple[str, ...]) -> set[str]:
    """The extras, and those that they include."""
    found = {name for name in EXTRAS if set(requirements(name)) <= set(requirements(*extras))}
    return found | set(extras)


def _smokes(
    environment: Environment, extras: tuple[str, ...], names: list[str], cwd: Path, server: Server
) -> None:
    there = ",".join(sorted(_with(extras)))
    for name in names:
        folder = cwd / name
        folder.mkdir()
        environment.smoke(name, folder, *server(name), PENSTOCK_SMOKE_EXTRAS=there)


def test_without_extras_only_pyarrow_is_installed(
    distributions: Distributions, house: Path, empty: Environment, tmp_path: Path, server: Server
) -> None:
    install(empty, house, _asked(distributions))
    assert set(empty.packages(tmp_path)) - {"pip", "setuptools"} == {"penstock-spark", "pyarrow"}
    _smokes(empty, (), ["plain", "names"], tmp_path, server)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_works_and_names_the_missing_others(
    extra: str, distributions: Distributions, house: Path, empty: Environment, tmp_path: Path, server: Server
) -> None:
    assert extra in _SMOKES, f"smokes/smoke_{extra}.py is to show what the extra promises"
    install(empty, house, _asked(distributions, extra))
    names = ["plain", "names", *sorted(_with((extra,)) & set(_SMOKES) - {extra}), extra]
    _smokes(empty, (extra,), names, tmp_path, server)


def test_type_checkers_see_the_types_of_the_installed_package(
    distributions: Distributions, house: Path, empty: Environment, tmp_path: Path
) -> None:
    install(empty, house, _asked(distributions, "spark"))
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\n[mypy-pyarrow.*]\nignore_missing_imports = true\n")
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(settings),
        "--python-executable",
        str(empty.python),
    ]
    assert errors_of(mypy, FILES, tmp_path) == expected_errors(FILES)


def test_the_lowest_versions_work(
    distributions: Distributions, tmp_path: Path, server: Server, empty: Environment
) -> None:
    python = interpreter(_OLDEST_PYTHON)
    assert python is not None, f"there is no python{_OLDEST_PYTHON}"
    oldest = empty if python == sys.executable else make(tmp_path / "oldest", python)
    pins = lowest_versions()
    wheels = fetch(tmp_path / "wheels", [_asked(distributions, *EXTRAS)], python=python, pins=pins)
    install(oldest, wheels, _asked(distributions, *EXTRAS))
    there = oldest.packages(tmp_path)
    for pin in pins:
        name, _, version = pin.partition("==")
        assert Version(there[canonicalize_name(name)]) == Version(version), (
            f"{name} is {there[canonicalize_name(name)]}"
        )
    _smokes(oldest, tuple(EXTRAS), _SMOKES, tmp_path, server)
    shutil.rmtree(wheels)


@pytest.mark.parametrize("version", _PYTHONS)
def test_the_newest_versions_work_on_every_python(
    version: str, distributions: Distributions, tmp_path: Path, server: Server
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no python{version} here")
    wheels = fetch(tmp_path / "wheels", [_asked(distributions, *EXTRAS)], python=python)
    newest = make(tmp_path / "newest", python)
    install(newest, wheels, _asked(distributions, *EXTRAS))
    _smokes(newest, tuple(EXTRAS), _SMOKES, tmp_path, server)
    shutil.rmtree(wheels)


def test_a_package_index_accepts_the_distributions_and_renders_their_description(
    distributions: Distributions, empty: Environment, tmp_path: Path
) -> None:
    install(
        empty,
        fetch(tmp_path / "wheels", ["twine>=6.1", "readme-renderer[md]>=44"]),
        "twine",
        "readme-renderer[md]",
    )
    both = (distributions.wheel, distributions.sdist)
    done = empty.run("twine", "check", "--strict", *both, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
