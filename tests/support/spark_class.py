"""Run a class of Spark: ``python -m tests.support.spark_class CLASS ARGUMENT …``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark

if __name__ == "__main__":
    home = Path(pyspark.__file__).parent
    os.environ["SPARK_HOME"] = str(home)
    os.execv(home / "bin/spark-class", ["spark-class", *sys.argv[1:]])
