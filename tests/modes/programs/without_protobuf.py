"""``transformWithState`` where the package protobuf is missing, and then where it is installed.

The arguments are a folder for the streams and one that is first on the path of Python and of its workers: in
it is a package ``google`` without ``protobuf``, which is taken away for the second half.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import penstock
from tests.modes.cells import Cell, refusal_of
from tests.modes.frames import FRAMES, inputs, settings_of
from tests.support.sparks import make_spark

folder, hiding = Path(sys.argv[1]), Path(sys.argv[2])
spark = make_spark(folder)
cell = Cell("transformed_with_state", "append", "noop")
with settings_of(spark, cell.query):
    df = FRAMES[cell.query].build(inputs(spark, folder / "streams"))
    for state in ("MISSING", "INSTALLED"):
        report = penstock.modes.check(df)["append"]
        print(state, "CODES", [problem.code for problem in report.problems])
        print(state, "RUNS", refusal_of(cell, df, folder) is None, flush=True)
        shutil.rmtree(hiding / "google", ignore_errors=True)
        # This interpreter may have imported what hid the package; the workers are new ones.
        sys.modules.pop("google", None)
        importlib.invalidate_caches()
    shown = (
        df.writeStream.format("memory").queryName("shown").option("checkpointLocation", str(folder / "shown"))
    )
    query = shown.trigger(availableNow=True).start()
    query.awaitTermination(120)
    print("EMITS", report.emits)
    print("ROWS", sorted(row["k"] for row in spark.table("shown").collect()))
