"""An untested version of Spark is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from pyspark.sql import SparkSession

import penstock
from penstock.spark.internals.sessions import SUPPORTED, check_version, parse_version
from tests.support.building import EXTRAS


def test_the_spark_of_the_tests_is_supported(spark: SparkSession) -> None:
    check_version(spark)


@pytest.mark.parametrize("version", ["4.1.9", "4.4.0", "5.0.0-preview1", "unknown"])
def test_another_version_is_refused_with_what_to_install(version: str) -> None:
    session: Any = SimpleNamespace(version=version)
    with pytest.raises(penstock.errors.MissingDependencyError, match=r"pyspark>=4\.2,<4\.4") as refused:
        check_version(session)
    assert refused.value.condition == "MISSING_DEPENDENCY.SPARK_VERSION"


def test_versions_of_vendor_builds_are_parsed() -> None:
    assert parse_version("4.3.0-vendor-2") == (4, 3)


def test_the_package_requires_the_supported_versions() -> None:
    (asked,) = (each for each in map(Requirement, EXTRAS["spark"]) if each.name == "pyspark")
    allowed = [minor for minor in range(20) if asked.specifier.contains(f"4.{minor}.1")]
    assert allowed == [minor for _, minor in SUPPORTED]
