"""Program: run the queries of some cases until they have read everything. Its parent usually kills it.

Arguments: a folder for Spark, the master, and the cases as JSON. The variable SETTINGS has more settings of
the session's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import penstock
from tests.support.crash.cases import Case
from tests.support.sparks import make_spark
from tests.support.warm import warm_workers


def start(spark: SparkSession, case: Case, trigger: penstock.Trigger) -> Any:
    frames = [
        spark.readStream.format("penstock")
        .options(url=case.url, consumer=case.name, **case.options)
        .load(queue)
        for queue in case.sources
    ]
    stream = penstock.stream(spark, case.query.transform(frames))
    return case.write(stream).start(
        checkpoint=case.checkpoint, name=case.name, trigger=trigger, check=case.query.bounded
    )


def run(spark: SparkSession, case: Case, began: float) -> None:
    try:
        start(spark, case, penstock.Trigger.available_now()).awaitTermination()
    except Exception as error:
        print(f"FAILED {case.name} {error}", flush=True)
    else:
        print(f"ENDED {case.name} after {time.monotonic() - began:.1f} s", flush=True)


def main(folder: str, master: str, *texts: str, kind: type[Case] = Case) -> None:
    began = time.monotonic()
    settings = json.loads(os.environ.get("SETTINGS", "{}"))
    if master.startswith("spark:"):
        # Executors of such a cluster are not this process's children.
        settings |= {f"spark.executorEnv.{name}": os.environ[name] for name in ("FAULTS", "PYTHONPATH")}
    with warm_workers():
        spark = make_spark(
            Path(folder), master, **{key.replace(".", "__"): value for key, value in settings.items()}
        )
    print(f"SPARK {spark.sparkContext.applicationId} after {time.monotonic() - began:.1f} s", flush=True)
    penstock.register(spark)
    cases = [kind.from_json(text) for text in texts]
    if len(cases) == 1:
        # In the main thread, where SIGTERM is handled.
        run(spark, cases[0], began)
        return
    # Each in its own thread: a fault may stop a query while it starts.
    with ThreadPoolExecutor(len(cases)) as threads:
        for done in [threads.submit(run, spark, case, began) for case in cases]:
            done.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
