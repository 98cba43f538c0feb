"""Classes of the JVM for tests: compiled by the compiler included in Spark, and added to its session
as a package.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

_SOURCES = Path(__file__).parent / "java"


def java_classes(spark: SparkSession, folder: Path, name: str) -> Any:
    """The package ``penstock.modes.<name>`` of a source file, which the driver and the tasks know from now
    on.

    The compiler (Janino) reads Java without type parameters.
    """
    jvm: Any = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook((_SOURCES / f"{name}.java").read_text())
    package = folder / f"penstock_modes_{name}.jar"
    with zipfile.ZipFile(package, "w") as file:
        for each, code in compiler.getBytecodes().items():
            file.writestr(f"{each.replace('.', '/')}.class", code)
    spark.sql(f"ADD JAR '{package}'")
    return getattr(jvm.penstock.modes, name)
