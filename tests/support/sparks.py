"""One way to make a small, quiet Spark session, for the shared fixture and for child processes alike."""

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


# With one tier of compilation a code cache has 48 MB, which a few hundred tests fill. A `chmod` sets the mode
# of each file of a checkpoint; with VFORK the JVM starts it without a process in between.
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Xshare:auto "
    "-Djdk.lang.Process.launchMechanism=VFORK"
)


def remember_java_names() -> None:
    """Ask the JVM for each Java class and package once.

    PySpark asks anew each time, and the JVM then looks for a class of that name in all of Spark's 300 JARs.
    """
    from py4j.java_gateway import JavaClass, JavaPackage, JVMView

    for kind in (JVMView, JavaPackage):
        if kind.__getattr__.__name__ != "remembered":
            _remember(kind, (JavaClass, JavaPackage))


def _remember(kind: type, kept: tuple[type, ...]) -> None:
    ask = kind.__getattr__  # type: ignore[attr-defined]  # both kinds have it

    def remembered(self: Any, name: str) -> Any:
        found = ask(self, name)
        if isinstance(found, kept):
            # From now on an attribute, which Python finds by itself.
            self.__dict__[name] = found
        return found

    kind.__getattr__ = remembered  # type: ignore[attr-defined]


def short_lived() -> str:
    """Options for a JVM that does not live long enough to be worth much compiling.

    A program gets them as ``SPARK_SUBMIT_OPTS``.
    """
    archive = class_archive()
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={archive}" if archive else SHORT_LIVED


def _code_generation() -> dict[str, str]:
    """Have expressions and operators interpreted, unless ``PENSTOCK_TEST_CODEGEN`` is set.

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
    """A session whose files are all under `directory`; `conf` keys are written with `__` for a dot."""
    from pyspark.sql import SparkSession

    from penstock.spark.internals.sessions import CHECKPOINT_FILE_MANAGER

    remember_java_names()
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
