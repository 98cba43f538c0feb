"""Checks of all queries over Spark Connect, whose server this starts; the argument is a folder for the
streams.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import penstock
from penstock.modes.checking.report import MODES
from tests.modes.frames import FRAMES, inputs, settings_of

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
builder = SparkSession.builder.remote("local[1]")
for key, value in {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
streams = inputs(spark, Path(sys.argv[1]))
for name, frame in FRAMES.items():
    with settings_of(spark, name):
        report = penstock.modes.check(frame.build(streams))
    codes = {mode: sorted(problem.code for problem in report[mode].problems) for mode in MODES}
    print("CHECKED", json.dumps({"name": name, "told": codes, "not_run": len(report.not_run)}))
