"""Program that runs the queries of some cases until they have read all rows. Its parent usually kills it.

Arguments: a folder for Spark, the master, and the cases as JSON. The environment variable SETTINGS has
additional settings of the session.
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


def run(spark: SparkSession, case: Case, start_time: float) -> None:
    try:
        start(spark, case, penstock.Trigger.available_now()).awaitTermination()
    except Exception as error:
        print(f"FAILED {case.name} {error}", flush=True)
    else:
        print(f"ENDED {case.name} after {time.monotonic() - start_time:.1f} s", flush=True)


def main(folder: str, master: str, *encoded_cases: str, kind: type[Case] = Case) -> None:
    start_time = time.monotonic()
    settings = json.loads(os.environ.get("SETTINGS", "{}"))
    if master.startswith("spark:"):
        # Executors of such a cluster are not this process's children.
        settings |= {f"spark.executorEnv.{name}": os.environ[name] for name in ("FAULTS", "PYTHONPATH")}
    with warm_workers():
        spark = make_spark(
            Path(folder), master, **{key.replace(".", "__"): value for key, value in settings.items()}
        )
    print(f"SPARK {spark.sparkContext.applicationId} after {time.monotonic() - start_time:.1f} s", flush=True)
    penstock.register(spark)
    cases = [kind.from_json(encoded) for encoded in encoded_cases]
    if len(cases) == 1:
        # In the main thread, where SIGTERM is handled.
        run(spark, cases[0], start_time)
        return
    # Use a thread for each query, because a fault may stop a query while it starts.
    with ThreadPoolExecutor(len(cases)) as threads:
        for future in [threads.submit(run, spark, case, start_time) for case in cases]:
            future.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
