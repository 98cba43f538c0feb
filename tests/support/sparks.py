"""Creates small Spark sessions with little logging, for the shared fixture and for child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.class_archive import class_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


# With one tier of compilation, the code cache has 48 MB by default, which a few hundred tests fill. Hadoop
# runs `chmod` for each file of a checkpoint. With VFORK, the JVM starts it without an intermediate process.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Xshare:auto "
    "-Djdk.lang.Process.launchMechanism=VFORK"
)


def cache_java_names() -> None:
    """Look up each Java class and package in the JVM only once.

    PySpark looks them up at each use, and the JVM then searches all of Spark's 300 JARs for the class.
    """
    from py4j.java_gateway import JavaClass, JavaPackage, JVMView

    for kind in (JVMView, JavaPackage):
        if kind.__getattr__.__name__ != "lookup_once":
            _cache_lookups(kind, (JavaClass, JavaPackage))


def _cache_lookups(kind: type, cached_kinds: tuple[type, ...]) -> None:
    lookup = kind.__getattr__  # type: ignore[attr-defined]  # both kinds have it

    def lookup_once(self: Any, name: str) -> Any:
        value = lookup(self, name)
        if isinstance(value, cached_kinds):
            # From now on Python finds the attribute without a lookup.
            self.__dict__[name] = value
        return value

    kind.__getattr__ = lookup_once  # type: ignore[attr-defined]


def short_lived() -> str:
    """Return options for a JVM that lives too short for much compilation to pay off.

    A program gets them as ``SPARK_SUBMIT_OPTS``.
    """
    archive = class_archive()
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={archive}" if archive else SHORT_LIVED


def _code_generation() -> dict[str, str]:
    """Return settings that interpret expressions and operators, unless ``PENSTOCK_TEST_CODEGEN`` is set.

    Spark would generate and compile code for each query of a few rows: for the tests of change feeds, the JVM
    would need two thirds more CPU time. `make test-soak` and `make test-spark-versions` set the variable, and
    the programs of the documentation and the demonstration run with Spark's defaults.
    """
    if os.environ.get("PENSTOCK_TEST_CODEGEN"):
        return {}
    return {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def make_spark(
    directory: Path, master: str = "local[2]", *, java_options: str | None = None, **conf: str
) -> SparkSession:
    """Create a session whose files are all under `directory`. Keys of `conf` have `__` instead of dots."""
    from pyspark.sql import SparkSession

    from penstock.spark.internals.sessions import CHECKPOINT_FILE_MANAGER

    cache_java_names()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    directory.mkdir(parents=True, exist_ok=True)
    log4j = directory / "log4j2.properties"
    log4j.write_text(QUIET_LOG4J)
    java_options = (
        f"{short_lived() if java_options is None else java_options} "
        f"-Dlog4j2.configurationFile={log4j.as_uri()} "
        f"-Dderby.system.home={directory} -Djava.io.tmpdir={directory} -Duser.timezone=UTC"
    )
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": java_options,
        "spark.local.dir": str(directory / "local"),
        "spark.python.daemon.module": "tests.support.daemon",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILE_MANAGER,
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        **_code_generation(),
        "spark.ui.showConsoleProgress": "false",
        **{key.replace("__", "."): value for key, value in conf.items()},
    }
    builder = SparkSession.builder.master(master).appName("penstock-tests")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
