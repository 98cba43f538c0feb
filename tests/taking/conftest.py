"""A session with the data source, and the proof that nothing stays behind."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(spark: SparkSession) -> SparkSession:
    penstock.register(spark)
    return spark


@pytest.fixture(autouse=True)
def nothing_stays(spark: SparkSession) -> Iterator[None]:
    """No query, no file in the place for temporary ones, no thread, no setting."""
    settings = dict(spark.conf.getAll)
    yield
    assert [query.name for query in spark.streams.active] == []
    assert list(Path(tempfile.gettempdir()).glob("penstock_take*")) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-take")] == []
    assert {name: spark.conf.get(name) for name in settings} == settings
