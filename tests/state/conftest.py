"""The shared session with the data source registered, and checkpoints that are created once."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from tests.support.made_checkpoints import CASES, Made, make, write_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[[str], Made]


@pytest.fixture(scope="session")
def spark(spark: SparkSession) -> SparkSession:
    penstock.register(spark)
    return spark


@pytest.fixture(scope="session")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`made(name)`: the checkpoint of one of the cases, to be looked at and not to be changed."""
    folder = tmp_path_factory.mktemp("state")
    write_events(folder / "events")
    found: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name == "variables" and importlib.util.find_spec("google.protobuf") is None:
            pytest.skip("transformWithState in Python needs the package protobuf")
        if name not in found:
            # Spark's reader finds no path that a URL would have escapes in.
            path = folder / name.replace(" ", "-")
            found[name] = make(spark, CASES[name], folder / "events", path)
        return found[name]

    return get


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Callable[[str], Path]:
    """`copied(name)`: a copy of such a checkpoint, to be broken."""

    def get(name: str) -> Path:
        return Path(shutil.copytree(made(name).path, tmp_path / "copy"))

    return get
