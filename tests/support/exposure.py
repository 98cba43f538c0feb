"""Reads what Spark shows and stores of a query: its plans, errors and event log."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession


@contextlib.contextmanager
def event_log(spark: SparkSession, folder: Path) -> Iterator[Path]:
    """Write a separate event log into a folder, as ``spark.eventLog.enabled`` does."""
    folder.mkdir()
    context: Any = spark.sparkContext
    jvm, java_context = context._jvm, context._jsc.sc()
    conf = (
        java_context.conf()
        .clone()
        .set("spark.eventLog.compress", "false")
        .set("spark.eventLog.rolling.enabled", "false")
    )
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "app",
        jvm.scala.Option.empty(),
        jvm.java.net.URI(folder.as_uri()),
        conf,
        context._jsc.hadoopConfiguration(),
    )
    log.start()
    java_context.addSparkListener(log)
    yield folder
    java_context.removeSparkListener(log)


def explained(frame: DataFrame) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain(mode="extended")
    return text.getvalue()


def error_text(action: Callable[[], object]) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        action()
    return f"{caught.value!r} {caught.value}"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
