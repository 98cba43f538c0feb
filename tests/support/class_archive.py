"""Archive of the classes that Spark's driver loads (class data sharing of JDK 13).

A JVM starts in half the time with it. The first test process that needs the archive creates it in build/, for
this Java and this PySpark.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

FOLDER = Path(__file__).resolve().parents[2] / "build"
TIMEOUT = 300
ARCHIVE_VARIABLE = "PENSTOCK_TEST_CLASSES"
"""The environment variable with the path of the archive for child processes, or empty without one."""


def class_archive() -> str:
    """Return the archive's path. It is empty if none could be created, and tests then run without one."""
    if ARCHIVE_VARIABLE not in os.environ:
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"spark-{pyspark.__version__}-{_java_digest()}.jsa"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _create(path)
        os.environ[ARCHIVE_VARIABLE] = str(path) if path.exists() else ""
    return os.environ[ARCHIVE_VARIABLE]


def _java_digest() -> str:
    """Identify the Java installation, because an archive works with one only."""
    java = Path(os.environ.get("JAVA_HOME") or Path(shutil.which("java") or "/bin/java").resolve().parents[1])
    modules = java / "lib/modules"
    identity = [
        str(java),
        *([modules.stat().st_size, modules.stat().st_mtime_ns] if modules.exists() else ()),
    ]
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


def _create(path: Path) -> None:
    partial = path.with_suffix(".partial")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.class_archive", str(partial), folder]
        environment = {**os.environ, ARCHIVE_VARIABLE: ""}
        try:
            subprocess.run(
                command,
                env=environment,
                timeout=TIMEOUT,
                check=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""
            print(
                f"no archive of Spark's classes: {error}\n{output.decode(errors='replace')}", file=sys.stderr
            )
        else:
            # Within one file system, a rename is atomic.
            partial.rename(path)


def _load_classes(archive: str, folder: Path) -> None:
    """Do what most tests do: run a stateful stream from a queue into a queue."""
    import pyarrow as pa

    import penstock
    from tests.support.sparks import SHORT_LIVED, make_spark

    spark = make_spark(folder / "spark", java_options=f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={archive}")
    penstock.register(spark)
    url = f"sqlite:///{folder}/penstock.db"
    with penstock.connect(url, create=True) as store:
        schema = pa.schema([("id", pa.int64())])
        store.create_queue("source", schema).append([{"id": number} for number in range(10)])
        store.create_queue("sink", schema)
    rows = spark.readStream.format("penstock").option("url", url).load("source")
    distinct = penstock.stream(spark, rows.dropDuplicates(["id"]))
    query = distinct.write(penstock.QueueSink("sink", url=url)).start(
        checkpoint=folder / "checkpoint",
        name="classes",
        trigger=penstock.Trigger.available_now(),
        check=False,
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    _load_classes(sys.argv[1], Path(sys.argv[2]))
