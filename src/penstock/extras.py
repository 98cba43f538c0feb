"""Optional dependencies: the extra of each package, and the error when one is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.errors import MissingDependencyError

EXTRAS = {
    "click": "cli",
    "cryptography": "encryption",
    "deltalake": "delta",
    "fastapi": "ui",
    "numpy": "spark",
    "obstore": "objects",
    "pandas": "spark",
    "prometheus_client": "ui",
    "psycopg": "postgres",
    "py4j": "spark",
    "pyiceberg": "iceberg",
    "pyroaring": "delta",
    "pyspark": "spark",
    "rich": "cli",
    "typer": "cli",
    "uvicorn": "ui",
}
"""The extra that installs each package."""


def missing(package: str, what: str) -> MissingDependencyError:
    extra = EXTRAS[package]
    return MissingDependencyError(
        f"{what} needs {package}: pip install 'penstock-spark[{extra}]'", package=package, extra=extra
    )


def instead(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError | MissingDependencyError:
    """Return the error to raise in place of Python's: the same one if no extra has the missing package."""
    package = (error.name or "").partition(".")[0]
    return missing(package, what) if package in EXTRAS else error


def load(home: str, name: str, what: str) -> Any:
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise instead(error, what) from None


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's ``__getattr__``, which imports a public name's module when the name is used.

    Spark's workers import single modules of a package, and so do not import the others. A public module is
    its own home.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        full_name = f"{package}.{name}"
        is_module = homes[name] == full_name
        return import_module(full_name) if is_module else load(homes[name], name, full_name)

    return get


def deltalake(name: str, what: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise missing("deltalake", what) from None
