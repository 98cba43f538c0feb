"""A session with the data source, and a check that nothing is left behind."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.peek import query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(spark: SparkSession) -> SparkSession:
    penstock.register(spark)
    return spark


@pytest.fixture(autouse=True)
def nothing_stays(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No query, no file in the place for temporary ones, no thread, no setting."""
    place = tmp_path_factory.mktemp("temporary")

    def temporary(
        prefix: str, dir: str | None, ignore_cleanup_errors: bool
    ) -> tempfile.TemporaryDirectory[str]:
        folder = dir or str(place)
        return tempfile.TemporaryDirectory(
            prefix=prefix, dir=folder, ignore_cleanup_errors=ignore_cleanup_errors
        )

    # Others run at the same time, and have the machine's own place.
    monkeypatch.setattr(query, "TemporaryDirectory", temporary)
    settings = dict(spark.conf.getAll)
    yield
    assert [active.name for active in spark.streams.active] == []
    assert list(place.glob("penstock_take*")) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-take")] == []
    assert {name: spark.conf.get(name) for name in settings} == settings
