"""The shared session with the data source registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(spark: SparkSession) -> SparkSession:
    penstock.register(spark)
    return spark
