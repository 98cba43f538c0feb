"""One quiet Spark session for all benchmarks."""

from __future__ import annotations

from functools import cache

from pyspark.sql import SparkSession

import penstock as ps


@cache
def spark() -> SparkSession:
    session = ps.session(
        "bench",
        master="local[2]",
        memory="4g",
        conf={
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    session.sparkContext.setLogLevel("OFF")
    return session
