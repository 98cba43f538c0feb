"""Takes rows over Spark Connect, whose server this starts."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import penstock as ps
from penstock.errors import InvalidInput

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
builder = SparkSession.builder.remote("local[1]")
for key, value in {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}.items():
    builder = builder.config(key, value)
stream = builder.getOrCreate().readStream.format("rate").load()
for refused in (ps.take, ps.sample):
    try:
        refused(stream, 1)
    except InvalidInput as error:
        print("REFUSED", error.condition)
