"""Takes rows over Spark Connect, whose server this starts."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidInputError

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
builder = SparkSession.builder.remote("local[1]")
for key, value in {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}.items():
    builder = builder.config(key, value)
stream = builder.getOrCreate().readStream.format("rate").load()
for refused in (penstock.take, penstock.take_sample):
    try:
        refused(stream, 1)
    except InvalidInputError as error:
        print("REFUSED", error.condition)
